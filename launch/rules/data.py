"""Rows of check.py's table about data: which rows there are, and which of them are held out."""

from __future__ import annotations

import math
import re

from launch.rules.rule import Rule
from launch.rules.selection import HELD_OUT_ROWS
from launch.schema import Config
from launch.schema.data import Balance, Curriculum, Deduplicate
from launch.schema.enums import Format, Mode
from launch.trainer_args import argument

TRAINS_ON_ROWS = ("sft", "dpo", "grpo")
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")  # of data.filter, in tokens: trainings read them
TOLERANCE = 1e-6  # of the sum of weights: 1/3 written with seven digits is one third
# What only some kinds of data read.
GENERATED = ("tasks", "num_train", "num_heldout")
DATA_KEYS = {
    "jsonl": ("path", "heldout_path"),
    "hub": ("hub_id", "heldout_split"),
    "samples": ("path",),
    "reasoning": GENERATED,
    "code": GENERATED,
}


def _of_its_kind(config: Config) -> str:
    """What to give in place of a key that this kind of data does not read."""
    key = _ignored_data(config)[0]
    kind = f"data={next(kind for kind, keys in DATA_KEYS.items() if key in keys)}"
    if key == "num_heldout" and config.data.kind in HELD_OUT_ROWS:
        return f"{HELD_OUT_ROWS[config.data.kind]}, or {kind}"
    return f"{kind}, or data.{key}={'[]' if key == 'tasks' else 'null'} where an experiment sets it" if key in GENERATED else kind


def _ignored_data(config: Config) -> list[str]:
    keys = [key for names in DATA_KEYS.values() for key in names if key not in DATA_KEYS.get(config.data.kind, ())]
    return [key for key in keys if getattr(config.data, key)]


def _weights(config: Config) -> float:
    return sum(source.weight for source in config.data.sources)


def _faulty_source(config: Config) -> str | None:
    """What is wrong with the first source that has a fault."""
    for number, source in enumerate(config.data.sources):
        if (source.path is None) == (source.hub_id is None):
            return f"data.sources[{number}] has {'neither path nor hub_id' if source.path is None else 'path and hub_id'}"
        if not 0 < source.weight < math.inf:
            return f"data.sources[{number}].weight={source.weight:g}"
    return None


def _not_streamed(config: Config) -> str | None:
    """What needs all rows at once, or a number of steps that a stream does not give."""
    data = config.data
    if data.kind not in ("jsonl", "hub", "mix"):
        return f"data={data.name}"
    if data.deduplicate != Deduplicate.none:
        return f"data.deduplicate={data.deduplicate.value}"
    if data.balance != Balance.none:
        return f"data.balance={data.balance.value}"
    return f"data.curriculum={data.curriculum.value}" if data.curriculum != Curriculum.none else None


def _bad_regex(config: Config) -> str | None:
    for name, pattern in config.data.filter.regex.items():
        try:
            re.compile(pattern)
        except re.error as error:
            return f"data.filter.regex.{name}={pattern}: {error}"
    return None


def _unread_by_samples(config: Config) -> str | None:
    """What of `data` only trainings read, and sampling would ignore."""
    data, filters = config.data, config.data.filter
    if config.method.name != "sample" and config.method.kind != "cycles":
        return None
    given = {"data.streaming": data.streaming}
    given |= {f"data.filter.{n}": getattr(filters, n) is not None for n in LENGTHS}
    return next((key for key, is_given in given.items() if is_given), None)


def _steps(config: Config) -> int:
    return int(argument(config, "max_steps") or -1)


DATA_RULES = [
    Rule(
        "reasoning_data",
        lambda c: (
            c.data.kind in ("reasoning", "code")
            and (not c.data.tasks or c.data.num_train is None or c.data.num_train < 1 or c.data.num_heldout < 0)
        ),
        lambda c: f"data={c.data.name} with {len(c.data.tasks)} tasks, num_train={c.data.num_train}, num_heldout={c.data.num_heldout}",
        lambda c: "at least one task in data.tasks, data.num_train of at least 1, data.num_heldout of at least 0",
    ),
    Rule(
        "data_path",
        lambda c: (
            c.data.kind == "jsonl"
            and not c.data.path
            and not (c.method.name == "evaluate" and c.data.heldout_path and (c.model.path or c.model.init.name == "pretrained"))
        ),
        lambda c: "data=jsonl without a file",
        lambda c: "data.path=<file.jsonl>",
    ),
    Rule(
        "data_hub",
        lambda c: c.data.kind == "hub" and not c.data.hub_id,
        lambda c: "data=hub without a data set",
        lambda c: "data.hub_id=<owner/name>",
    ),
    Rule(
        "data_of_another_kind",
        lambda c: bool(_ignored_data(c)),
        lambda c: f"data.{_ignored_data(c)[0]} under data={c.data.name}: it would be ignored",
        _of_its_kind,
    ),
    Rule(
        "data_limit",
        lambda c: c.data.limit is not None and c.data.limit < 1,
        lambda c: f"data.limit={c.data.limit}: no rows",
        lambda c: "a limit of at least 1, or data.limit=null",
    ),
    Rule(
        "data_preview",
        lambda c: c.data.preview > 0 and c.method.name not in TRAINS_ON_ROWS,
        lambda c: f"data.preview={c.data.preview} with method={c.method.name}: it trains on no rows",
        lambda c: f"method={', '.join(TRAINS_ON_ROWS)}",
    ),
    Rule(
        "data_preview_alone",
        lambda c: c.data.preview > 0 and c.mode == Mode.run and c.format == Format.json,
        lambda c: f"data.preview={c.data.preview} with format=json: it prints rows for a person, and ends",
        lambda c: "data.preview=5 without format=json; data.json of a run holds the figures",
    ),
    Rule(
        "data_sources",
        lambda c: (c.data.kind == "mix") != bool(c.data.sources),
        lambda c: f"data={c.data.name} with {len(c.data.sources)} data.sources",
        lambda c: "data=mix 'data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]'",
    ),
    Rule(
        "data_source",
        lambda c: _faulty_source(c) is not None,
        lambda c: str(_faulty_source(c)),
        lambda c: "a path or a hub_id in each, and a weight above 0",
    ),
    Rule(
        "data_weights",
        lambda c: bool(c.data.sources) and abs(_weights(c) - 1) > TOLERANCE,
        lambda c: f"the weights of data.sources sum to {_weights(c):g}, and they are shares of the rows",
        lambda c: f"weights that sum to 1: {', '.join(f'{source.weight / (_weights(c) or 1):.4g}' for source in c.data.sources)}",
    ),
    Rule(
        "data_samples",
        lambda c: c.data.kind == "samples" and (c.method.name != "dpo" or not c.data.path),
        lambda c: f"data=samples with method={c.method.name} and data.path={c.data.path}: it makes preference pairs of a file of samples",
        lambda c: "method=dpo data=samples data.path=<run of method=sample>/scored.jsonl",
    ),
    Rule(
        "data_of_samples",
        lambda c: _unread_by_samples(c) is not None,
        lambda c: f"{_unread_by_samples(c)} with method={c.method.name}: prompts are drawn from all rows, and it would be ignored",
        lambda c: (
            f"data.curriculum, method.args.{'' if c.method.name == 'sample' else 'sample.'}num_prompts, and data.filter by fields; "
            "or leave it out"
        ),
    ),
    Rule(
        "data_pairs_number",
        lambda c: c.data.pairs_per_prompt < 1,
        lambda c: f"data.pairs_per_prompt={c.data.pairs_per_prompt}: no pairs",
        lambda c: "at least 1",
    ),
    Rule(
        "data_pairs",
        lambda c: (c.data.pairs_per_prompt != 1 or c.data.pairs_of_any) and c.data.kind != "samples",
        lambda c: (
            f"data.{'pairs_of_any=true' if c.data.pairs_of_any else f'pairs_per_prompt={c.data.pairs_per_prompt}'} "
            f"under data={c.data.name}: it would be ignored"
        ),
        lambda c: "data=samples",
    ),
    Rule(
        "data_streaming",
        lambda c: c.data.streaming and _not_streamed(c) is not None,
        lambda c: f"data.streaming=true with {_not_streamed(c)}: a stream is never seen whole",
        lambda c: "data.streaming=false, or data=jsonl or hub without it",
    ),
    Rule(
        "data_streaming_reference",
        lambda c: c.data.streaming and bool(argument(c, "precompute_ref_log_probs")),
        lambda c: "method.args.precompute_ref_log_probs=true with data.streaming=true: the reference measures all rows beforehand",
        lambda c: "data.streaming=false, or precompute_ref_log_probs=false",
    ),
    Rule(
        "data_streaming_steps",
        lambda c: c.data.streaming and c.method.kind == "trainer" and _steps(c) < 1,
        lambda c: "data.streaming=true without method.args.max_steps: a stream has no end",
        lambda c: "method.args.max_steps=1000",
    ),
    Rule(
        "shuffle_buffer",
        lambda c: c.data.shuffle_buffer != 1000 and not c.data.streaming,
        lambda c: f"data.shuffle_buffer={c.data.shuffle_buffer} without data.streaming: all rows are shuffled, and it would be ignored",
        lambda c: "data.streaming=true",
    ),
    Rule(
        "heldout_fraction",
        lambda c: c.data.heldout_fraction is not None and not 0 < c.data.heldout_fraction < 1,
        lambda c: f"data.heldout_fraction={c.data.heldout_fraction}: one of both splits would be empty",
        lambda c: "a share above 0 and below 1, for example 0.1",
    ),
    Rule(
        "heldout_twice",
        lambda c: (
            bool(c.data.heldout_fraction)
            and bool(c.data.kind in ("reasoning", "code", "samples") or c.data.heldout_path or c.data.heldout_split)
        ),
        lambda c: f"data.heldout_fraction={c.data.heldout_fraction} with data={c.data.name}, which has held-out rows of its own or none",
        lambda c: "data.num_heldout (reasoning, code), or one of data.heldout_path, data.heldout_split and data.heldout_fraction",
    ),
    Rule(
        "filter_regex",
        lambda c: _bad_regex(c) is not None,
        lambda c: f"{_bad_regex(c)}",
        lambda c: "a regular expression of Python's re",
    ),
    Rule(
        "filter_lengths",
        lambda c: (c.data.filter.min_tokens or 0) > (math.inf if c.data.filter.max_tokens is None else c.data.filter.max_tokens),
        lambda c: f"data.filter.min_tokens={c.data.filter.min_tokens} above max_tokens={c.data.filter.max_tokens}: no row is left",
        lambda c: f"data.filter.min_tokens={c.data.filter.max_tokens} data.filter.max_tokens={c.data.filter.min_tokens}",
    ),
    Rule(
        "chat_template_twice",
        lambda c: c.model.chat_template is not None and c.data.chat_template is not None,
        lambda c: f"model.chat_template={c.model.chat_template} and data.chat_template={c.data.chat_template}: one would be ignored",
        lambda c: "one of them",
    ),
]
