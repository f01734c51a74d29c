"""Define rules about data: where rows come from, and which of them are held out."""

from __future__ import annotations

import math
import re

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.data import Balance, Curriculum, Deduplicate
from launch.schema.enums import Format, Init, Mode
from launch.schema.trainer_args import argument

# lengths in data.filter, in tokens, which only trainings read
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")
MISSING = {
    "path": "data.path=<file.jsonl>",
    "hub_id": "data.hub_id=<owner/name>",
    "sources": ("'data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]'"),
}
TOLERANCE = 1e-6  # for the sum of weights, since 1/3 may be written with seven digits


def _weights(config: Config) -> float:
    return sum(source.weight for source in config.data.sources)


def _missing_source(config: Config) -> str:
    """Return the key that must name the rows of this kind of data, if it has no value."""
    data = config.data
    if data.kind == "jsonl" and not data.path:
        measures_it = config.method.measures_model and data.heldout_path
        has_weights = config.model.path or config.model.init == Init.pretrained
        return "" if measures_it and has_weights else "path"
    return {
        "hub": "" if data.hub_id else "hub_id",
        "mix": "" if data.sources else "sources",
    }.get(data.kind, "")


def _faulty_source(config: Config) -> str | None:
    """Return the first source whose rows do not have exactly one location."""
    for number, source in enumerate(config.data.sources):
        if (source.path is None) == (source.hub_id is None):
            names = "neither path nor hub_id" if source.path is None else "path and hub_id"
            return f"data.sources[{number}] has {names}"
    return None


def _not_streamed(config: Config) -> str | None:
    """Return the first key that needs all rows at once."""
    data = config.data
    if data.kind not in ("jsonl", "hub", "mix"):
        return f"data={data.name}"
    if data.deduplicate != Deduplicate.none:
        return f"data.deduplicate={data.deduplicate.value}"
    if data.balance != Balance.none:
        return f"data.balance={data.balance.value}"
    if argument(config, "precompute_ref_log_probs"):
        return "method.args.precompute_ref_log_probs=true"
    return (
        f"data.curriculum={data.curriculum.value}" if data.curriculum != Curriculum.none else None
    )


def _bad_pattern(config: Config) -> str | None:
    """Return the first pattern that Python's re rejects, and the error."""
    patterns = {f"data.filter.regex.{name}": p for name, p in config.data.filter.regex.items()}
    for key, pattern in {**patterns, "method.reward_pattern": config.method.reward_pattern}.items():
        try:
            re.compile(pattern or "")
        except re.error as error:
            return f"{key}={pattern}: {error}"
    return None


def has_max_steps(config: Config) -> bool:
    return int(argument(config, "max_steps") or -1) > 0


DATA_RULES = [
    Rule(
        "reasoning_data",
        lambda c: (
            c.data.kind in ("reasoning", "code") and (not c.data.tasks or c.data.num_train is None)
        ),
        lambda c: f"data={c.data.name} needs tasks, and numbers of problems",
        "one or more data.tasks, data.num_train of at least 1",
    ),
    Rule(
        "data_missing",
        lambda c: bool(_missing_source(c)),
        lambda c: f"data={c.data.name} without data.{_missing_source(c)}",
        lambda c: MISSING[_missing_source(c)],
    ),
    Rule(
        "data_preview_alone",
        lambda c: c.data.preview > 0 and c.mode == Mode.run and c.format == Format.json,
        "data.preview prints rows for a person, not format=json",
        "data.preview=5 without format=json; data.json of a run holds the figures",
    ),
    Rule(
        "data_source",
        lambda c: _faulty_source(c) is not None,
        lambda c: str(_faulty_source(c)),
        "a path or a hub_id in each",
    ),
    Rule(
        "data_weights",
        lambda c: bool(c.data.sources) and abs(_weights(c) - 1) > TOLERANCE,
        lambda c: f"data.sources: the weights sum to {_weights(c):g}, but they are shares",
        lambda c: (
            "weights that sum to 1: "
            f"{', '.join(f'{source.weight / (_weights(c) or 1):.4g}' for source in c.data.sources)}"
        ),
    ),
    Rule(
        "data_samples",
        lambda c: c.data.kind == "samples" and (c.method.rows != "dpo" or not c.data.path),
        lambda c: (
            f"data=samples with method={c.method.name} and data.path={c.data.path}: "
            "it makes preference pairs from a file of samples"
        ),
        "method=dpo data=samples data.path=<run of method=sample>/scored.jsonl",
    ),
    Rule(
        "data_streaming",
        lambda c: c.data.streaming and _not_streamed(c) is not None,
        lambda c: f"data.streaming=true with {_not_streamed(c)}, which needs all rows at once",
        "data.streaming=false, or data=jsonl or hub without it",
    ),
    Rule(
        "max_steps_needed",
        lambda c: (
            not has_max_steps(c)
            and (
                (c.data.streaming and c.method.trains)
                or (c.data.curriculum != Curriculum.none and c.method.curriculum)
            )
        ),
        lambda c: (
            (
                "data.streaming=true"
                if c.data.streaming
                else f"data.curriculum={c.data.curriculum.value}"
            )
            + " needs method.args.max_steps"
        ),
        "method.args.max_steps=1000",
    ),
    Rule(
        "heldout_twice",
        lambda c: (
            bool(c.data.heldout_fraction)
            and bool(
                c.data.kind in ("reasoning", "code", "samples")
                or c.data.heldout_path
                or c.data.heldout_split
            )
        ),
        lambda c: (
            f"data.heldout_fraction: data={c.data.name} has held-out rows of its own, or none"
        ),
        "one of data.num_heldout, heldout_path, heldout_split and heldout_fraction",
    ),
    Rule(
        "pattern",
        lambda c: _bad_pattern(c) is not None,
        lambda c: str(_bad_pattern(c)),
        r"a regular expression of Python's re, for example '\d+', quoted for the shell",
    ),
    Rule(
        "filter_lengths",  # a streamed data set would be searched for ever
        lambda c: (
            (c.data.filter.min_tokens or 0)
            > (math.inf if c.data.filter.max_tokens is None else c.data.filter.max_tokens)
        ),
        "data.filter.min_tokens is above max_tokens: no row is left",
        lambda c: (
            f"data.filter.min_tokens={c.data.filter.max_tokens} "
            f"data.filter.max_tokens={c.data.filter.min_tokens}"
        ),
    ),
    Rule(
        "chat_template_twice",
        lambda c: c.model.chat_template is not None and c.data.chat_template is not None,
        "model.chat_template and data.chat_template are both given",
        "one of them",
    ),
    Rule(
        "curriculum_packing",
        lambda c: c.data.curriculum != Curriculum.none and bool(argument(c, "packing")),
        "data.curriculum with method.args.packing=true: a packed row has many levels",
        "method.args.packing=false",
    ),
    Rule(
        "curriculum_pass_rates",
        lambda c: (
            c.data.curriculum == Curriculum.adaptive
            and c.method.curriculum
            and not c.method.generates
            and not c.data.pass_rates
        ),
        lambda c: f"data.curriculum=adaptive: method={c.method.name} measures no pass rates",
        "data.pass_rates=<result.json of an evaluation>, or data.curriculum=progressive",
    ),
]
