"""Tokenize and check rows, and cache the tokens by rows, tokenizer, template and code.

The tokens equal the tokens of TRL's trainers (recipes/data/data_tokens.py). One process writes the
files that all processes read. data.json in the run directory has statistics of the rows. They are
also cached under a key that the launcher can compute, so that plans show them
(launch/plan/data_cache.py).
"""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import datasets
import numpy as np
import tokenizers
import transformers
import trl
from datasets import Dataset, IterableDataset
from huggingface_hub.utils import WeakFileLock
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from launch.core import row_formats
from launch.core.errors import UserError
from launch.core.json_files import sha256, write_json
from launch.core.row_check import QUOTE_LENGTH
from launch.core.row_formats import row_format
from recipes.data import data_select as select
from recipes.data import data_tokens
from recipes.data.data_load import GENERATED, Loaded, load, rows_sha256
from recipes.data.data_locate import Located
from recipes.data.data_select import Row
from recipes.data.data_tokens import PairTokens, Progress, PromptTokens, Tokens
from recipes.rank.files import json_sha256, place_directory
from recipes.rank.program import is_main_rank, say
from recipes.training.checkpoint import HEARTBEAT

# Trainer arguments that affect tokens or the loss mask. Rows are cached before they are truncated
# and packed, so those arguments do not matter.
ARGUMENTS = (
    *("completion_only_loss", "assistant_only_loss", "dataset_text_field"),
    *("chat_template_path", "eos_token", "chat_template_kwargs"),
)
TOKENS_CODE = ("data_prepare.py", "data_tokens.py", "data_messages.py", "row_*.py")
NOT_ROWS = ("preview", "cache")  # keys of data that do not affect rows
BINS = 10  # in the histogram of lengths


class PreparedRows:
    """Cache the tokens of a trainer's rows. Mixin, listed before SFTTrainer or DPOTrainer."""

    def __init__(
        self,
        *args: Any,
        config: DictConfig,
        loaded: Loaded,
        heldout: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        self._config, self._loaded = config, loaded
        super().__init__(*args, train_dataset=loaded.rows, eval_dataset=heldout, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Return the tokens of `dataset`, cached before truncation and packing, which are fast.

        `rest` is (packing, formatting function, split name) for SFT, and (split name,) for DPO.
        """
        config, pairs = self._config, self._config.method.name == "dpo"
        template = None if pairs else self.chat_template
        tokenize = PairTokens(processing_class)
        if not pairs:
            masks = (self.completion_only_loss, args.assistant_only_loss)
            tokenize = Tokens(processing_class, template, args.dataset_text_field, *masks)
        tokenize = Located(tokenize, config.data, config.method.name)
        drop = [*row_format(config.method.name).read, "finished"]
        if isinstance(dataset, IterableDataset):
            stream = dataset.map(tokenize, batched=True, remove_columns=drop)
            stream = stream.filter(lambda row: _fits_stream(row, config))
            if pairs:
                return stream
            return super()._prepare_dataset(stream, processing_class, args, *rest)
        arguments = {name: getattr(args, name, None) for name in ARGUMENTS}
        is_train = dataset is self._loaded.rows
        digest = self._loaded.sha256()["data_sha256"] if is_train else rows_sha256(dataset)
        templates = (processing_class.chat_template, template)
        key = cache_key(digest, processing_class, templates, arguments)
        tokens = map_cached(config, key, dataset, tokenize, drop, args.dataset_num_proc)
        final, lengths = filter_by_length(tokens, config, dataset)
        packs = bool(rest[0]) and not pairs
        if not pairs:  # DPO's collator truncates its rows
            limit = args.max_length
            if not packs and limit is not None and args.truncation_mode == "keep_start":
                # Like TRL, drop rows whose answer would be cut off entirely.
                indices = np.flatnonzero(lengths["prompt"] < np.minimum(lengths["tokens"], limit))
                final = final if len(indices) == len(final) else final.select(indices)
                if lengths["tokens"].max() > limit:
                    final = data_tokens.first_tokens(final, limit)
                args = copy.copy(args)
                args.max_length = None
            final = super()._prepare_dataset(final, processing_class, args, *rest)
        if rest[-1] == "train":  # data.json describes only the training rows
            describe(config, self._loaded, lengths, final if packs else None)
        return final


def prepare_prompts(
    config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, heldout: bool = False
) -> Dataset | IterableDataset:
    """Return GRPO's rows, filtered by length, as text: its trainer tokenizes when it generates.

    data.json describes only the training rows. Raises UserError for a row that the chat template
    cannot render, and as filter_by_length does.
    """
    options = dict(config.trainer_args.get("chat_template_kwargs") or {})
    tokenize = Located(PromptTokens(tokenizer, options), config.data, "grpo")
    if isinstance(loaded.rows, IterableDataset):
        stream = loaded.rows.map(tokenize, batched=True)
        return stream.filter(lambda row: _fits_stream(row, config)).remove_columns("prompt_ids")
    template, arguments = (tokenizer.chat_template,), {"method": "grpo", **options}
    key = cache_key(loaded.sha256()["data_sha256"], tokenizer, template, arguments)
    tokens = map_cached(config, key, loaded.rows, tokenize)
    rows, lengths = filter_by_length(tokens, config, loaded.rows)
    if not heldout:
        describe(config, loaded, lengths, None)
    return rows.remove_columns("prompt_ids")


def cache_key(
    digest: str, tokenizer: PreTrainedTokenizerBase, template: Any, arguments: dict[str, Any]
) -> str:
    """Return a hash of all that affects tokens: rows, tokenizer, template, arguments and code."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition = backend.to_str() if backend is not None else tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    versions = [module.__version__ for module in (trl, transformers, tokenizers, datasets)]
    content = {
        "rows": digest,
        "tokenizer": [definition, special],
        "template": template,
        "code": [*_code_hashes(*TOKENS_CODE), *versions],
        "arguments": arguments,
    }
    return json_sha256({name: json_sha256(value) for name, value in content.items()})


def _code_hashes(*patterns: str) -> list[str]:
    folders = (Path(__file__).parent, Path(row_formats.__file__).parent)
    files = [file for folder in folders for p in patterns for file in sorted(folder.glob(p))]
    return [sha256(file) for file in files]


def load_once(config: DictConfig, method: str) -> Loaded:
    """Return the rows of data_load.load, from the cache if the same files were read before.

    The cache key hashes the files, the settings that select rows, and the code that reads them.
    """
    data, progress = config.data, Progress("reading", Path(config.run_dir) / HEARTBEAT)
    gc.freeze()  # exclude the imports' objects from garbage collection
    if "data_cache" not in config or data.streaming or data.kind in GENERATED:
        return load(data, method, progress)
    settings = {**OmegaConf.to_container(data), **dict.fromkeys(NOT_ROWS)}
    paths = (data.path, data.heldout_path, *(source.path for source in data.sources))
    ids = (data.hub_id or "", *(source.hub_id or "" for source in data.sources))
    for directory in filter(os.path.isabs, ids):
        paths += tuple(sorted(map(str, Path(directory).rglob("*"))))
    paths = filter(None, (*paths, *settings.get("files", ())))  # `files` of a directory of samples
    files = [sha256(Path(path), progress.heartbeat) for path in paths if os.path.isfile(path)]
    code = _code_hashes("data*.py", "row_*.py")
    key = json_sha256([settings, files, method, code, datasets.__version__])

    def write(staged: Path) -> None:
        loaded = load(data, method, progress)
        loaded.rows.save_to_disk(str(staged))
        metadata = {"counts": loaded.counts, "digest": rows_sha256(loaded.rows)}
        write_json(staged / "loaded.json", metadata)

    folder = make_once(Path(config.data_cache.directory) / "read" / key, write)
    metadata = json.loads((folder / "loaded.json").read_text(encoding="utf-8"))
    return Loaded(Dataset.load_from_disk(str(folder)), **metadata)


def map_cached(
    config: DictConfig,
    key: str,
    rows: Dataset,
    make: Any,
    drop: Collection[str] = (),
    num_processes: int | None = None,
) -> Dataset:
    """Return `rows` with the columns `drop` replaced by `make`'s columns, cached under `key`."""
    progress = Progress("tokenizing", Path(config.run_dir) / HEARTBEAT)
    if "data_cache" not in config:  # only the launcher sets it
        return data_tokens.map_rows(rows, make, drop, None, progress, num_processes)

    def write(staged: Path) -> None:
        file = staged / "rows.arrow"
        data_tokens.map_rows(rows, make, drop, file, progress, num_processes)

    folder = make_once(Path(config.data_cache.directory) / "rows" / key, write)
    files = sorted(folder.glob("rows*.arrow"))
    return datasets.concatenate_datasets([Dataset.from_file(str(file)) for file in files])


def make_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Return `folder`. The first process makes it while the others wait.

    The folder is renamed into place when complete, so an existing folder is complete.
    """
    if folder.is_dir():
        say(f"reusing prepared rows from {folder}")
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


def filter_by_length(
    rows: Dataset, config: DictConfig, raw: Dataset
) -> tuple[Dataset, dict[str, Any]]:
    """Return the rows that pass the length filters, and {tokens, prompt, filtered}.

    `tokens` and `prompt` are the lengths of these rows in tokens; `filtered` counts the others by
    filter. `raw` holds the rows before tokenization, to quote one in an error. Raises UserError if
    no row passes, or if a prompt is too long for an answer to follow.
    """
    tokens, prompt = data_tokens.lengths(rows)
    masks = _masks(tokens, prompt, config.data.filter)
    passing = ~np.any(list(masks.values()), axis=0) if masks else np.ones(len(tokens), bool)
    filtered = {name: int(mask.sum()) for name, mask in masks.items() if mask.any()}
    lengths = {"tokens": f"{tokens.min()} to {tokens.max()}"}
    select.require(range(passing.sum()), "data.filter", filtered | lengths)
    too_long = np.flatnonzero(passing & (prompt >= prompt_limit(config)[0]))
    if len(too_long):
        first = too_long[0]
        text = select.question(raw[int(first)])[:QUOTE_LENGTH]
        numbers = f"{len(too_long)} of {passing.sum()} prompts are"
        _reject_prompts(config, numbers, f"the first has {prompt[first]} tokens: {text!r}")
    rows = rows if passing.all() else rows.select(np.flatnonzero(passing))
    return rows, {"tokens": tokens[passing], "prompt": prompt[passing], "filtered": filtered}


def _masks(tokens: Any, prompt: Any, filters: DictConfig) -> dict[str, Any]:
    """Return {filter: mask of the rows that it rejects} for the configured filters."""
    masks = {
        "min_tokens": (np.less, tokens),
        "max_tokens": (np.greater, tokens),
        "max_prompt_tokens": (np.greater, prompt),
    }
    limits = {name: filters[name] for name in masks if filters[name] is not None}
    return {name: masks[name][0](masks[name][1], limit) for name, limit in limits.items()}


def _fits_stream(row: Row, config: DictConfig) -> bool:
    """Do the same as filter_by_length for one row of a stream: return whether the row passes."""
    ids = {name: [row[name]] for name in row if name in data_tokens.LENGTH_COLUMNS}
    tokens, prompt = (int(length[0]) for length in data_tokens.lengths_of_columns(ids))
    if any(_masks(tokens, prompt, config.data.filter).values()):
        return False
    if prompt >= prompt_limit(config)[0]:
        _reject_prompts(config, "a prompt is", f"it has {prompt} tokens")
    return True


def _reject_prompts(config: DictConfig, numbers: str, first: str) -> NoReturn:
    limit, reason = prompt_limit(config)
    raise UserError(
        f"data: {numbers} too long for an answer to follow ({first}), because {reason}. Use: "
        f"data.filter.max_prompt_tokens={limit - 1}, which omits such rows, or raise that limit."
    )


def prompt_limit(config: DictConfig) -> tuple[int, str]:
    """Return the number of tokens at which prompts are rejected, and the reason as text."""
    args, context = config.trainer_args, config.model.max_positions
    if config.method.name == "grpo":
        if config.topology.servers:
            context = min(context, config.topology.server_max_length or context)
        completion = args.get("max_completion_length") or 256  # TRL's default
        reason = f"method.args.max_completion_length={completion} reserves {completion}"
        return context - completion + 1, f"{reason} of {context} positions"
    length = args.get("max_length", 1024)  # TRL's default
    if length is None or args.get("packing") or args.get("truncation_mode") == "keep_end":
        return context, f"model={config.model.name} has {context} positions"
    return length, f"method.args.max_length={length} would cut off all of the answer"


def describe(
    config: DictConfig, loaded: Loaded, lengths: dict[str, Any], packed: Dataset | None
) -> None:
    """Log warnings. Write data.json to the run directory, and to the cache, where plans read it."""
    if not is_main_rank():
        return
    content = {**loaded.counts, **statistics(config, lengths, packed)}
    if lengths["filtered"]:
        content["filtered"] = {**loaded.counts.get("filtered", {}), **lengths["filtered"]}
    args, limit, rows = config.trainer_args, content["max_length"], content["rows"]
    splits = args.get("packing") and args.get("packing_strategy") in ("wrapped", "bfd_split")
    if content["truncated"] and not splits:
        say(
            f"warning: method.args.max_length={limit} truncates {content['truncated']} of {rows} "
            f"rows. Use: method.args.max_length={content['length']['longest']}, or "
            f"data.filter.max_tokens={limit}, which omits them."
        )
    for name, number in content.get("blank", {}).items():
        blank = "an empty last message" if name == "messages" else f"an empty {name}"
        say(
            f"warning: {number} of {rows} rows have {blank}. Remove them, unless the model should "
            "learn that."
        )
    write_json(Path(config.run_dir) / "data.json", content)
    if "data_cache" in config:
        folder = Path(config.data_cache.directory) / "statistics"
        write_json(folder / f"{config.data_cache.key}.json", content)


def statistics(
    config: DictConfig, lengths: dict[str, Any], packed: Dataset | None
) -> dict[str, Any]:
    """Return the content of data.json: lengths in tokens before truncation, and counts of rows.

    `efficiency` is the share of positions in batches that are not padding. Unless rows are packed,
    it is computed for rows in random order.
    """
    args, method, tokens = config.trainer_args, config.method.name, lengths["tokens"]
    limit = args.get("max_length", 1024) if method != "grpo" else None
    edges = np.unique(np.linspace(tokens.min(), tokens.max() + 1, BINS + 1).round().astype(int))
    counts, edges = np.histogram(tokens, bins=edges)
    bins = zip(edges[:-1], edges[1:], counts, strict=True)
    truncated = np.minimum(tokens, limit) if limit else tokens
    if packed is not None:
        efficiency = sum(map(len, packed["input_ids"])) / (len(packed) * limit)
    else:
        batch = args.get("per_device_train_batch_size", 8)
        order = np.random.default_rng(0).permutation(truncated)
        starts = np.arange(0, len(order), batch)
        sizes = np.minimum(batch, len(order) - starts)
        padded = np.maximum.reduceat(order, starts) * sizes
        efficiency = float(truncated.sum() / padded.sum())
    shortest, longest = int(tokens.min()), int(tokens.max())
    return {
        "method": method,
        "rows": len(tokens),
        "tokens": int(truncated.sum()),
        "length": {"shortest": shortest, "mean": float(tokens.mean()), "longest": longest},
        "histogram": [[int(low), int(high) - 1, int(n)] for low, high, n in bins],
        "max_length": limit,
        "truncated": int((tokens > limit).sum()) if limit else 0,
        "without_answer": int((lengths["prompt"] == tokens).sum()) if method == "sft" else 0,
        "packing": packed is not None,
        "packed_rows": None if packed is None else len(packed),
        "efficiency": None if method == "grpo" else efficiency,
    }
