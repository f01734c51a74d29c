"""Define rules about data: where rows come from, and which of them are held out."""

from __future__ import annotations

from launch.rules.rule import Rule, rule_of
from launch.schema import Config
from launch.schema.enums import Init
from launch.schema.trainer_args import argument

# lengths in data.filter, in tokens, which only trainings read
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")
TOLERANCE = 1e-6  # for the sum of weights, since 1/3 may be written with seven digits


def _source_fault(config: Config) -> tuple[str, str] | None:
    """Return what the rows of this kind of data lack, or what is wrong with a mixture."""
    data, name = config.data, f"data={config.data.name}"
    if data.kind in ("reasoning", "code") and (not data.tasks or data.num_train is None):
        return (
            f"{name} without data.tasks or data.num_train",
            "one or more data.tasks, data.num_train of at least 1",
        )
    if data.kind == "jsonl" and not data.path:
        has_weights = config.model.path or config.model.init == Init.pretrained
        if not (config.method.measures_model and data.heldout_path and has_weights):
            return f"{name} without data.path", "data.path=<file.jsonl>"
    if data.kind == "hub" and not data.hub_id:
        return f"{name} without data.hub_id", "data.hub_id=<owner/name>"
    if data.kind == "mix" and not data.sources:
        return (
            f"{name} without data.sources",
            "'data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]'",
        )
    for number, source in enumerate(data.sources):
        if (source.path is None) == (source.hub_id is None):
            names = "neither path nor hub_id" if source.path is None else "path and hub_id"
            return f"data.sources[{number}] has {names}", "a path or a hub_id in each"
    total = sum(source.weight for source in data.sources)
    if data.sources and abs(total - 1) > TOLERANCE:
        shares = ", ".join(f"{source.weight / (total or 1):.4g}" for source in data.sources)
        return (
            f"data.sources: the weights sum to {total:g}, but they are shares",
            f"weights that sum to 1: {shares}",
        )
    return None


def has_max_steps(config: Config) -> bool:
    return int(argument(config, "max_steps") or -1) > 0


DATA_RULES = [
    rule_of("data_source", _source_fault),
    Rule(
        "data_samples",
        lambda c: c.data.kind == "samples" and (c.method.rows != "dpo" or not c.data.path),
        lambda c: (
            f"data=samples with method={c.method.name} and data.path={c.data.path}: "
            "it makes preference pairs from a file of samples"
        ),
        "method=dpo data=samples data.path=<run of method=sample>/scored.jsonl",
    ),
]
