"""Rows of check.py's table about choosing the best model, or the best cycle of RAFT, by held-out rows."""

from __future__ import annotations

from launch.batch import batch
from launch.errors import near
from launch.rules.rule import Rule
from launch.schema import Config
from launch.trainer_args import HELD_OUT_METRICS, argument, value

INSTEAD = {
    "sample": "no method.selection: it trains nothing; a phase of method=evaluate measures a model",
}
HELD_OUT_ROWS = {
    "reasoning": "data.num_heldout=500",
    "code": "data.num_heldout=200",
    "jsonl": "data.heldout_path=<file.jsonl> or data.heldout_fraction=0.1",
    "hub": "data.heldout_split=<split> or data.heldout_fraction=0.1",
    "mix": "data.heldout_fraction=0.1",
}
ONLY_THERE = ("per_device_eval_batch_size", "eval_packing", "eval_accumulation_steps", "num_generations_eval")


def asked(config: Config) -> bool:
    return config.method.selection.metric is not None


def _given(config: Config) -> str | None:
    """The first key of method.selection that is set."""
    selection = config.method.selection
    keys = {"metric": selection.metric is not None, "patience": selection.patience is not None, "min_delta": selection.min_delta != 0}
    return next((f"method.selection.{key}" for key, is_given in keys.items() if is_given), None)


def _serves(config: Config) -> bool:
    return config.method.name in HELD_OUT_METRICS


def _first_metric(config: Config) -> str:
    return f"method.selection.metric={next(iter(HELD_OUT_METRICS[config.method.name]))}"


def _unknown_metric(config: Config) -> bool:
    return asked(config) and _serves(config) and config.method.selection.metric not in HELD_OUT_METRICS[config.method.name]


def has_heldout(config: Config) -> bool:
    """As load_heldout in recipes/common/data.py finds them: each kind of data has its own key."""
    data = config.data
    own = {"reasoning": data.num_heldout, "code": data.num_heldout, "jsonl": data.heldout_path, "hub": data.heldout_split}
    return bool(own.get(data.kind) or data.heldout_fraction)


def _held_out_groups(config: Config) -> tuple[int, int]:
    """(completions that all ranks measure at once, completions of a held-out prompt), of grpo."""
    each = argument(config, "per_device_eval_batch_size") or value(config, "per_device_train_batch_size")
    return each * batch(config).ranks, argument(config, "num_generations_eval") or 1


def _unread(config: Config) -> str | None:
    """An argument of evaluations where there are none. smoke=true sets its sizes for whoever has them."""
    if asked(config) or config.smoke or config.method.kind != "trainer":
        return None
    return next((name for name in ONLY_THERE if config.method.args.get(name) is not None), None)


SELECTION_RULES = [
    Rule(
        "selection_method",
        lambda c: _given(c) is not None and not _serves(c),
        lambda c: f"{_given(c)} with method={c.method.name}: it chooses among the models that {' or '.join(HELD_OUT_METRICS)} saves",
        lambda c: INSTEAD.get(c.method.name, f"method={' or '.join(HELD_OUT_METRICS)}, or no method.selection"),
    ),
    Rule(
        "selection_metric",
        _unknown_metric,
        lambda c: (
            f"method.selection.metric={c.method.selection.metric} with method={c.method.name}: no such figure of held-out rows."
            f"{near(str(c.method.selection.metric), HELD_OUT_METRICS[c.method.name])}"
        ),
        lambda c: " or ".join(HELD_OUT_METRICS[c.method.name]),
    ),
    Rule(
        "selection_unused",
        lambda c: _serves(c) and not asked(c) and _given(c) is not None,
        lambda c: f"{_given(c)} without method.selection.metric: no model is chosen by held-out rows, and it would be ignored",
        _first_metric,
    ),
    Rule(
        "selection_min_delta",
        lambda c: asked(c) and c.method.selection.min_delta != 0 and c.method.selection.patience is None,
        lambda c: f"method.selection.min_delta={c.method.selection.min_delta:g} without patience: it only says when to stop early",
        lambda c: "method.selection.patience=3 beside it",
    ),
    Rule(
        "selection_heldout",
        lambda c: asked(c) and _serves(c) and not has_heldout(c),
        lambda c: f"method.selection.metric={c.method.selection.metric} with data={c.data.name}: no held-out rows to measure it on",
        lambda c: HELD_OUT_ROWS.get(c.data.kind, "data=jsonl with chosen, rejected and data.heldout_path=; or no method.selection"),
    ),
    Rule(
        "selection_streaming",
        lambda c: asked(c) and c.data.streaming and bool(c.data.heldout_fraction),
        lambda c: "method.selection with data.streaming=true and data.heldout_fraction: all rows would be read to find those held out",
        lambda c: "held-out rows of their own (data.heldout_path or data.heldout_split), or data.streaming=false",
    ),
    Rule(
        "selection_saves",
        lambda c: asked(c) and _serves(c) and c.method.kind == "trainer" and argument(c, "save_strategy") != "steps",
        lambda c: (
            f"method.selection.metric with method.args.save_strategy={argument(c, 'save_strategy')}: models are measured where they are "
            "saved, every method.args.save_steps"
        ),
        lambda c: "method.args.save_strategy=steps method.args.save_steps=100; a number below 1 is a share of all steps",
    ),
    # transformers refuses it too: its loaders want the optimizer's part of a sharded checkpoint.
    Rule(
        "selection_weights_only",
        lambda c: asked(c) and bool(argument(c, "save_only_model")) and c.topology.strategy in ("fsdp", "zero2", "zero3"),
        lambda c: f"method.args.save_only_model=true with method.selection under topology={c.topology.name}: no model could be loaded back",
        lambda c: "method.args.save_only_model=false",
    ),
    # A batch is under way on the server while the trainer measures, which would send it newer weights in the middle.
    Rule(
        "selection_overlap",
        lambda c: asked(c) and c.topology.overlap,
        lambda c: "topology.overlap with method.selection: held-out prompts and the next batch would be generated at once",
        lambda c: "topology.overlap=false",
    ),
    # TRL refuses it too, once every rank has started.
    Rule(
        "selection_groups",
        lambda c: asked(c) and c.method.name == "grpo" and _held_out_groups(c)[0] % _held_out_groups(c)[1] != 0,
        lambda c: (
            f"method.args.num_generations_eval={_held_out_groups(c)[1]}: all ranks together measure "
            f"{_held_out_groups(c)[0]} completions at once, which do not divide by it"
        ),
        lambda c: "method.args.num_generations_eval=1, or a method.args.per_device_eval_batch_size that divides",
    ),
    Rule(
        "selection_arguments",
        lambda c: _unread(c) is not None,
        lambda c: f"method.args.{_unread(c)} without method.selection.metric: nothing is evaluated while training, and it would be ignored",
        lambda c: f"{_first_metric(c)}, or leave it out",
    ),
]
