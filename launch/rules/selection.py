"""Define rules about choosing the best model, or RAFT's best cycle, by held-out rows."""

from __future__ import annotations

from launch.core.errors import near
from launch.rules.rule import Rule
from launch.schema import Config

HELD_OUT_ROWS = {
    "reasoning": "data.num_heldout=500",
    "code": "data.num_heldout=200",
    "jsonl": "data.heldout_path=<file.jsonl> or data.heldout_fraction=0.1",
    "hub": "data.heldout_split=<split> or data.heldout_fraction=0.1",
    "mix": "data.heldout_fraction=0.1",
}


def asked(config: Config) -> bool:
    return config.method.selection.metric is not None


def _serves(config: Config) -> bool:
    return bool(config.method.held_out_metrics)


def first_metric(config: Config) -> str:
    metric = next(iter(config.method.held_out_metrics), "<a figure that its trainer logs>")
    return f"method.selection.metric={metric}"


def _unknown_metric(config: Config) -> bool:
    return (
        asked(config)
        and _serves(config)
        and config.method.selection.metric not in config.method.held_out_metrics
    )


def has_heldout(config: Config) -> bool:
    """Return whether load_heldout in recipes/data/data.py would find rows."""
    data = config.data
    own = {
        "reasoning": data.num_heldout,
        "code": data.num_heldout,
        "jsonl": data.heldout_path,
        "hub": data.heldout_split,
    }
    return bool(own.get(data.kind) or data.heldout_fraction)


SELECTION_RULES = [
    Rule(
        "selection_metric",
        _unknown_metric,
        lambda c: (
            f"method.selection.metric={c.method.selection.metric} with method={c.method.name}: "
            "no such figure of held-out rows."
            f"{near(str(c.method.selection.metric), c.method.held_out_metrics)}"
        ),
        lambda c: " or ".join(c.method.held_out_metrics),
    ),
    Rule(
        "selection_heldout",
        lambda c: asked(c) and _serves(c) and not has_heldout(c),
        lambda c: f"method.selection.metric: data={c.data.name} has no held-out rows",
        lambda c: HELD_OUT_ROWS.get(
            c.data.kind,
            "data=jsonl with chosen, rejected and data.heldout_path=; or no method.selection",
        ),
    ),
]
