"""Rows as tokens: made once for equal rows, tokenizer, template and code, looked at before a step is taken, and described.

The tokens are those that TRL's trainers make (recipes/common/data_tokens.py). One process makes them and all read its files. data.json in
the run directory holds the figures; the cache keeps them under a key that the launcher knows too, so that a plan can show them
(launch/files/data_cache.py).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import datasets
import jinja2
import numpy as np
import tokenizers
import transformers
import trl
from datasets import Dataset, IterableDataset
from huggingface_hub.utils import WeakFileLock
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from recipes.common.checkpoint import HEARTBEAT
from recipes.common.data import GENERATED, Loaded, load, rows_sha256
from recipes.common.data_check import READ
from recipes.common.data_files import line_of, paths_of
from recipes.common.data_select import Row
from recipes.common.data_tokens import (
    LENGTH_COLUMNS,
    PairTokens,
    Progress,
    PromptTokens,
    Tokens,
    first_tokens,
    lengths,
    lengths_of,
    mapped,
    without_end,
)
from recipes.common.errors import UserError
from recipes.common.files import json_sha256, place_directory, sha256, write_json
from recipes.common.program import is_main_rank, say

# Arguments of the trainers that change tokens or loss mask. What only cuts or packs is done after the cache.
ARGUMENTS = ("completion_only_loss", "assistant_only_loss", "dataset_text_field", "chat_template_path", "eos_token", "chat_template_kwargs")
ASIDE = ("preview", "cache")  # keys of data that change no row
BINS = 10  # of the histogram of lengths


def check_template(tokenizer: PreTrainedTokenizerBase, rows: Dataset | IterableDataset) -> None:
    """Raises UserError where rows are messages and there is no template to write them with, or it fails on the first row."""
    row: Row = next(iter(rows))
    messages = next((row[name] for name in ("messages", "prompt", "chosen") if isinstance(row.get(name), list)), None)
    if messages is None:
        return
    if not tokenizer.chat_template:
        raise UserError(
            "chat template missing: the rows are messages, and the tokenizer has no template to write them with. "
            "Give model.chat_template=<file.jinja>, the model's instruct version, or rows of plain text."
        )
    try:
        tokenizer.apply_chat_template(messages, tokenize=False)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses the first row: {error}. Give another by data.chat_template=<file.jinja>.") from error


class PreparedRows:
    """Mixed into SFTTrainer or DPOTrainer, before it."""

    def __init__(self, *args: Any, config: DictConfig, loaded: Loaded, heldout: Dataset | None = None, **kwargs: Any) -> None:
        self._config, self._loaded = config, loaded
        check_template(kwargs["processing_class"], loaded.rows)
        super().__init__(*args, train_dataset=loaded.rows, eval_dataset=heldout, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """The parent's, in two parts: tokens, which are cached whole; then what cuts and packs them, which is quick.

        `rest` of SFT: whether to pack, a function that is never given, the name of the rows; of DPO the name.
        """
        if isinstance(dataset, IterableDataset):
            return self._prepare_stream(dataset, processing_class, args, *rest)
        config, pairs = self._config, self._config.method.name == "dpo"
        template = None if pairs else self.chat_template
        make = PairTokens(processing_class)
        if not pairs:
            make = Tokens(processing_class, template, args.dataset_text_field, self.completion_only_loss, args.assistant_only_loss)
        arguments = {name: getattr(args, name, None) for name in ARGUMENTS}
        digest = self._loaded.sha256()["data_sha256"] if dataset is self._loaded.rows else rows_sha256(dataset)
        key = cache_key(digest, processing_class, (processing_class.chat_template, template), arguments)
        drop = (*READ[config.method.name], "finished")
        tokens = cached(config, key, dataset, make, drop, args.dataset_num_proc)
        tokens, lengths = kept_rows(tokens, config, dataset)
        packs = bool(rest[0]) and not pairs
        if pairs:  # DPO's collator cuts
            final = tokens
        elif packs or args.max_length is None or args.truncation_mode != "keep_start":
            final = super()._prepare_dataset(tokens, processing_class, args, *rest)
        else:
            final = super()._prepare_dataset(_cut(tokens, lengths, args.max_length), processing_class, _with(args, max_length=None), *rest)
        if rest[-1] == "train":  # held-out rows are none of the data that is described
            describe(config, self._loaded, lengths, final if packs else None)
        return final

    def _prepare_stream(self, dataset: IterableDataset, processing_class: Any, args: Any, *rest: Any) -> IterableDataset:
        unpacked = [False if isinstance(value, bool) else value for value in rest]
        stream = super()._prepare_dataset(dataset, processing_class, _with(args, max_length=None, shuffle_dataset=False), *unpacked)
        if self._config.method.name == "sft":
            stream = stream.map(without_end, fn_kwargs={"special": sorted(processing_class.all_special_ids)})
        stream = stream.filter(lambda row: _fits_stream(row, self._config))
        return stream if "chosen_ids" in next(iter(stream)) else super()._prepare_dataset(stream, processing_class, args, *rest)


def _with(args: Any, **changes: Any) -> Any:
    """The trainer's arguments with some of them changed."""
    changed = copy.copy(args)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _cut(rows: Dataset, lengths: dict[str, Any], most: int) -> Dataset:
    """SFT's rows cut to `most` tokens, without those of which nothing is left to learn, as TRL's keep_start has it."""
    learned = np.flatnonzero(lengths["prompt"] < np.minimum(lengths["tokens"], most))
    rows = rows if len(learned) == len(rows) else rows.select(learned)
    return first_tokens(rows, most) if lengths["tokens"].max() > most else rows


def prepare_prompts(config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase) -> Dataset | IterableDataset:
    """Rows of GRPO, whose trainer tokenizes as it generates: those that the filters leave. Raises UserError as kept_rows does."""
    check_template(tokenizer, loaded.rows)
    make = PromptTokens(tokenizer)
    if isinstance(loaded.rows, IterableDataset):
        return loaded.rows.map(make, batched=True).filter(lambda row: _fits_stream(row, config)).remove_columns("prompt_ids")
    key = cache_key(loaded.sha256()["data_sha256"], tokenizer, (tokenizer.chat_template,), {"method": "grpo"})
    rows, lengths = kept_rows(cached(config, key, loaded.rows, make), config, loaded.rows)
    describe(config, loaded, lengths, None)
    return rows.remove_columns("prompt_ids")


def heldout_prompts(config: DictConfig, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Those that the filters leave, to be answered while training. Raises UserError as check_template and kept_rows do."""
    check_template(tokenizer, rows)
    kept, _ = kept_rows(rows.map(PromptTokens(tokenizer), batched=True), config, rows)
    return kept.remove_columns("prompt_ids")


def cache_key(digest: str, tokenizer: PreTrainedTokenizerBase, template: Any, arguments: dict[str, Any]) -> str:
    """A hash of the rows' `digest`, of the tokenizer and the template, and of the code that makes tokens of them: ours, and versions."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spelling = backend.to_str() if backend is not None else tokenizer.get_vocab()
    versions = [module.__version__ for module in (trl, transformers, tokenizers, datasets)]
    content = {
        "rows": digest,
        "tokenizer": [spelling, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}],
        "template": template,
        "code": [*_code("data_prepare.py", "data_tokens.py"), *versions],
        "arguments": arguments,
    }
    return json_sha256({name: json_sha256(value) for name, value in content.items()})


def _code(*patterns: str) -> list[str]:
    return [sha256(file) for pattern in patterns for file in sorted(Path(__file__).parent.glob(pattern))]


def load_once(config: DictConfig, method: str) -> Loaded:
    """data.load, of files that were read before from the cache: under a hash of them, of what is chosen of them, and of our code."""
    data, progress = config.data, Progress("reading", Path(config.run_dir) / HEARTBEAT)
    if "data_cache" not in config or data.streaming or data.kind in GENERATED:
        return load(data, method, progress)
    chosen = {name: value for name, value in OmegaConf.to_container(data).items() if name not in ASIDE}
    files = [sha256(Path(path), progress.heartbeat) for path in (*paths_of(data), *chosen.get("files", ())) if os.path.isfile(path)]
    key = json_sha256([chosen, files, method, _code("data*.py"), datasets.__version__])

    def make(staged: Path) -> None:
        loaded = load(data, method, progress)
        loaded.rows.save_to_disk(str(staged))
        write_json(staged / "loaded.json", {"counts": loaded.counts, "digest": rows_sha256(loaded.rows)})

    folder = stored(Path(config.data_cache.directory) / "read" / key, make)
    return Loaded(Dataset.load_from_disk(str(folder)), **json.loads((folder / "loaded.json").read_text(encoding="utf-8")))


def cached(config: DictConfig, key: str, rows: Dataset, make: Any, drop: Collection[str] = (), number: int | None = None) -> Dataset:
    """The tokens that `make` makes of `rows`, in place of the columns `drop`: those under `key` in the cache, made where there are none."""
    progress = Progress("tokenizing", Path(config.run_dir) / HEARTBEAT)
    if "data_cache" not in config:  # a configuration that the launcher did not write
        return mapped(rows, make, drop, None, progress, number)
    place = Path(config.data_cache.directory) / "rows" / key
    folder = stored(place, lambda staged: mapped(rows, make, drop, staged / "rows.arrow", progress, number))
    return datasets.concatenate_datasets([Dataset.from_file(str(file)) for file in sorted(folder.glob("rows*.arrow"))])


def stored(folder: Path, make: Callable[[Path], Any]) -> Path:
    """`folder`, whole or not there: `make` writes it aside, in the first process that needs it, while others wait."""
    if folder.is_dir():
        say(f"prepared rows taken from {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            staged = folder.with_name(f".{folder.name}.{os.getpid()}")
            try:
                make(staged)
                place_directory(staged, folder)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
    return folder


def kept_rows(rows: Dataset, config: DictConfig, given: Dataset) -> tuple[Dataset, dict[str, Any]]:
    """Rows whose lengths `data.filter` allows, and {tokens, prompt, filtered}. Raises UserError for a prompt that leaves no room.

    `given` are the same rows before they were tokens: an error names the line of a file that has one.
    """
    tokens, prompt = lengths(rows)
    reasons = _reasons(tokens, prompt, config.data.filter)
    left = ~np.any(list(reasons.values()), axis=0) if reasons else np.ones(len(tokens), bool)
    filtered = {name: int(mask.sum()) for name, mask in reasons.items() if mask.any()}
    if not left.any():
        raise UserError(f"data.filter leaves none of {len(tokens)} rows: {filtered}. Their lengths are {tokens.min()} to {tokens.max()}.")
    room, what = room_for_prompt(config)
    long = np.flatnonzero(left & (prompt >= room))
    if len(long):
        line = line_of(given[int(long[0])], paths_of(config.data))
        first = f"the first{f', {line},' if line else ''} with {prompt[long[0]]} tokens"
        raise UserError(
            f"prompt longer than the context: {len(long)} of {left.sum()} rows, {first}, and {what}. "
            f"Use: data.filter.max_prompt_tokens={room - 1}, which leaves them out, or more room."
        )
    rows = rows if left.all() else rows.select(np.flatnonzero(left))
    return rows, {"tokens": tokens[left], "prompt": prompt[left], "filtered": filtered}


def _reasons(tokens: Any, prompt: Any, filters: DictConfig) -> dict[str, Any]:
    """Filter -> which rows it leaves out."""
    found = {
        "min_tokens": None if filters.min_tokens is None else tokens < filters.min_tokens,
        "max_tokens": None if filters.max_tokens is None else tokens > filters.max_tokens,
        "max_prompt_tokens": None if filters.max_prompt_tokens is None else prompt > filters.max_prompt_tokens,
    }
    return {name: mask for name, mask in found.items() if mask is not None}


def _fits_stream(row: Row, config: DictConfig) -> bool:
    """As kept_rows, of one row of a stream."""
    tokens, prompt = (int(length[0]) for length in lengths_of({name: [ids] for name, ids in row.items() if name in LENGTH_COLUMNS}))
    if any(_reasons(tokens, prompt, config.data.filter).values()):
        return False
    room, what = room_for_prompt(config)
    if prompt >= room:
        raise UserError(
            f"prompt longer than the context: one of {prompt} tokens, and {what}. Use: data.filter.max_prompt_tokens={room - 1}."
        )
    return True


def room_for_prompt(config: DictConfig) -> tuple[int, str]:
    """(tokens at which a prompt leaves no place for an answer, the reason in words)."""
    args, context = config.trainer_args, config.model.max_positions
    if config.method.name == "grpo":
        context = min(context, config.topology.server_max_length or context) if config.topology.servers else context
        completion = args.get("max_completion_length") or 256  # TRL's default
        return context - completion + 1, f"of {context} positions the completion may take {completion} (method.args.max_completion_length)"
    length = args.get("max_length", 1024)  # TRL's default
    if length is None or args.get("packing") or args.get("truncation_mode") == "keep_end":
        return context, f"model={config.model.name} has {context} positions"
    return length, f"method.args.max_length={length} would cut all of the answer off"


def describe(config: DictConfig, loaded: Loaded, lengths: dict[str, Any], packed: Dataset | None) -> None:
    """data.json in the run directory, and the same in the cache for the next plan. The main rank writes."""
    if not is_main_rank():
        return
    content = {**loaded.counts, **statistics(config, lengths, packed)}
    if lengths["filtered"]:
        content["filtered"] = {**loaded.counts.get("filtered", {}), **lengths["filtered"]}
    for line in warnings(content, config):
        say(line)
    write_json(Path(config.run_dir) / "data.json", content)
    if "data_cache" in config:
        write_json(Path(config.data_cache.directory) / "statistics" / f"{config.data_cache.key}.json", content)


def warnings(content: dict[str, Any], config: DictConfig) -> list[str]:
    """What of data.json a run's log should say: rows that are cut, and rows with nothing in a field."""
    args, most, rows, found = config.trainer_args, content["max_length"], content["rows"], []
    if content["truncated"] and not (
        args.get("packing") and args.get("packing_strategy") in ("wrapped", "bfd_split")
    ):  # these two cut nothing
        found.append(
            f"warning: {content['truncated']} of {rows} rows are longer than method.args.max_length={most}, and are cut to it. "
            f"Use: method.args.max_length={content['length']['longest']}, or data.filter.max_tokens={most}, which leaves them out."
        )
    for name, number in content.get("blank", {}).items():
        what = "an empty last turn in messages" if name == "messages" else f"nothing in {name}"
        found.append(f"warning: {number} of {rows} rows have {what}. Remove them where that is not what the model should learn.")
    return found


def statistics(config: DictConfig, lengths: dict[str, Any], packed: Dataset | None) -> dict[str, Any]:
    """Lengths in tokens before anything is cut, how many rows are cut, and how much of a batch is no padding.

    `efficiency` is the share of a batch's places that hold a token: packed, of what the packing made; else of batches in random order.
    """
    args, tokens = config.trainer_args, lengths["tokens"]
    most = args.get("max_length", 1024) if config.method.name != "grpo" else None
    edges = np.unique(np.linspace(tokens.min(), tokens.max() + 1, BINS + 1).round().astype(int))
    counts, edges = np.histogram(tokens, bins=edges)
    cut = np.minimum(tokens, most) if most else tokens
    batch = args.get("per_device_train_batch_size", 8)
    if packed is not None:
        efficiency = sum(map(len, packed["input_ids"])) / (len(packed) * most)
    else:
        order = np.random.default_rng(0).permutation(cut)
        groups = [order[at : at + batch] for at in range(0, len(order), batch)]
        efficiency = float(cut.sum() / sum(group.max() * len(group) for group in groups))
    return {
        "method": config.method.name,
        "rows": len(tokens),
        "tokens": int(cut.sum()),
        "length": {"shortest": int(tokens.min()), "mean": float(tokens.mean()), "longest": int(tokens.max())},
        "histogram": [[int(low), int(high) - 1, int(n)] for low, high, n in zip(edges[:-1], edges[1:], counts, strict=True)],
        "max_length": most,
        "truncated": int((tokens > most).sum()) if most else 0,
        "without_answer": int((lengths["prompt"] == tokens).sum()) if config.method.name == "sft" else 0,
        "packing": packed is not None,
        "packed_rows": None if packed is None else len(packed),
        "efficiency": None if config.method.name == "grpo" else efficiency,
    }
