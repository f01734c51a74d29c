"""Rows as tokens: made once for equal rows, tokenizer, template and code, looked at before a step is taken, and described.

The tokens are TRL's own: its trainers make them, and what is kept here is what they made. data.json in the run directory holds the
figures; the cache keeps them under a key that the launcher knows too, so that a plan can show them (launch/files/data_cache.py).
"""

from __future__ import annotations

import copy
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
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from recipes.common.data import Loaded
from recipes.common.data_files import line_of, paths_of
from recipes.common.data_select import Row
from recipes.common.errors import UserError
from recipes.common.files import json_sha256, sha256, sync, write_json
from recipes.common.program import is_main_rank, say

# Arguments of the trainers that change tokens or loss mask. What only cuts or packs is done after the cache.
ARGUMENTS = ("completion_only_loss", "assistant_only_loss", "dataset_text_field", "chat_template_path", "eos_token", "chat_template_kwargs")
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
        """The parent's, in two parts: tokens, which are cached whole; then what cuts and packs them, which is quick."""
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        unpacked = [False if isinstance(value, bool) else value for value in rest]  # SFT's first is whether to pack

        def tokens() -> Any:
            rows = super(PreparedRows, self)._prepare_dataset(dataset, processing_class, whole, *unpacked)
            cut_off = self._config.method.name == "sft" and (isinstance(rows, IterableDataset) or "finished" in rows.column_names)
            special = sorted(processing_class.all_special_ids)
            return rows.map(without_end, fn_kwargs={"special": special}) if cut_off else rows

        if isinstance(dataset, IterableDataset):
            stream = tokens().filter(lambda row: _fits_stream(row, self._config))
            return stream if "chosen_ids" in next(iter(stream)) else super()._prepare_dataset(stream, processing_class, args, *rest)
        template = processing_class.chat_template, getattr(self, "chat_template", None)
        key = cache_key(dataset, processing_class, template, {name: getattr(args, name, None) for name in ARGUMENTS})
        tokenized, lengths = kept_rows(cached(self._config, key, tokens), self._config, dataset)
        packs = getattr(args, "packing", False)
        # DPO's collator cuts, and a second pass would make its tokens again.
        final = tokenized if "chosen_ids" in tokenized.column_names else super()._prepare_dataset(tokenized, processing_class, args, *rest)
        if rest[-1] == "train":  # the dataset's name, as the trainers call it; held-out rows are none of the data that is described
            describe(self._config, self._loaded, lengths, final if packs else None)
        return final


def without_end(row: Row, special: Collection[int]) -> Row:
    """Tokens and labels of a row; where `finished` is False, up to the special token that ends its completion, and without that.

    A sample that was cut off goes on, and a model that is trained on its end learns to stop anywhere. What was sampled holds no special
    tokens, so that the last one is the end that TRL, or the chat template, has written. Raises UserError where they write none.
    """
    ids, labels = row["input_ids"], row["labels"]
    if row.get("finished") is not False:
        return {"input_ids": ids, "labels": labels}
    end = next((n for n in reversed(range(len(ids))) if labels[n] != -100 and ids[n] in special), None)
    if end is None:
        raise UserError(
            "a row with finished=false: the chat template ends an answer with no special token, so its end cannot be left out. "
            "Use: method.args.finished_only=true for the samples, or rows without it."
        )
    return {"input_ids": ids[:end], "labels": labels[:end]}


def prepare_prompts(config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase) -> Dataset | IterableDataset:
    """Rows of GRPO, whose trainer tokenizes as it generates: those that the filters leave. Raises UserError as kept_rows does."""
    check_template(tokenizer, loaded.rows)
    given = {"tokenizer": tokenizer}
    if isinstance(loaded.rows, IterableDataset):
        return loaded.rows.map(_prompt_ids, fn_kwargs=given).filter(lambda row: _fits_stream(row, config)).remove_columns("prompt_ids")
    key = cache_key(loaded.rows, tokenizer, (tokenizer.chat_template,), {"method": "grpo"})
    rows, lengths = kept_rows(cached(config, key, lambda: loaded.rows.map(_prompt_ids, fn_kwargs=given)), config, loaded.rows)
    describe(config, loaded, lengths, None)
    return rows.remove_columns("prompt_ids")


def heldout_prompts(config: DictConfig, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Those that the filters leave, to be answered while training. Raises UserError as check_template and kept_rows do."""
    check_template(tokenizer, rows)
    kept, _ = kept_rows(rows.map(_prompt_ids, fn_kwargs={"tokenizer": tokenizer}), config, rows)
    return kept.remove_columns("prompt_ids")


def _prompt_ids(row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    if isinstance(row["prompt"], str):
        return {"prompt_ids": tokenizer(row["prompt"])["input_ids"]}
    return {"prompt_ids": tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)}


def cache_key(rows: Dataset, tokenizer: PreTrainedTokenizerBase, template: Any, arguments: dict[str, Any]) -> str:
    """A hash of the content of rows and tokenizer, of the template, and of the code that makes tokens of them: ours, and versions."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spelling = backend.to_str() if backend is not None else tokenizer.get_vocab()
    versions = [module.__version__ for module in (trl, transformers, tokenizers, datasets)]
    content = {
        "rows": rows.to_list(),
        "tokenizer": [spelling, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}],
        "template": template,
        "code": [sha256(Path(__file__)), *versions],
        "arguments": arguments,
    }
    return json_sha256({name: json_sha256(value) for name, value in content.items()})


def cached(config: DictConfig, key: str, make: Callable[[], Dataset]) -> Dataset:
    """The rows under `key` in the cache, made where there are none. Whole or not there: written aside and renamed by the main rank."""
    if "data_cache" not in config:  # a configuration that the launcher did not write
        return make()
    folder = Path(config.data_cache.directory) / "rows" / key
    # Ranks that find the rows must not leave those that make them alone in TRL's barriers, so all do the same.
    if all(gather_object([folder.is_dir()])):
        say(f"prepared rows taken from {folder}")
        return Dataset.load_from_disk(str(folder))
    rows = make()
    if is_main_rank():
        staged = folder.with_name(f".{key}.{os.getpid()}")
        rows.save_to_disk(str(staged))
        for path in [*staged.rglob("*"), staged]:
            sync(path)
        try:
            staged.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(staged)  # another run has made the same meanwhile
    return rows


def kept_rows(rows: Dataset, config: DictConfig, given: Dataset) -> tuple[Dataset, dict[str, Any]]:
    """Rows whose lengths `data.filter` allows, and {tokens, prompt, filtered}. Raises UserError for a prompt that leaves no room.

    `given` are the same rows before they were tokens: an error names the line of a file that has one.
    """
    found = [_lengths(row) for row in rows.select_columns([c for c in rows.column_names if c in LENGTH_COLUMNS])]
    tokens, prompt = (np.array(part, dtype=np.int64) for part in zip(*found, strict=True))
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


LENGTH_COLUMNS = ("input_ids", "labels", "prompt_ids", "chosen_ids", "rejected_ids")


def _lengths(row: Row) -> tuple[int, int]:
    """(tokens, tokens of the prompt) of a row: of a pair with the longer side, of GRPO the prompt alone."""
    if "labels" in row:
        labels = row["labels"]
        return len(labels), next((n for n, label in enumerate(labels) if label != -100), len(labels))
    prompt = len(row["prompt_ids"])
    return prompt + max((len(row[side]) for side in ("chosen_ids", "rejected_ids") if side in row), default=0), prompt


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
    tokens, prompt = _lengths(row)
    if any(mask for mask in _reasons(np.int64(tokens), np.int64(prompt), config.data.filter).values()):
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
