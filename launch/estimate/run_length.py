"""Count the steps of a run, and the rows and passes that they follow from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.core.json_files import yaml_file
from launch.estimate.batch_counts import Batch, batch
from launch.inputs import jsonl_files
from launch.schema import Config
from launch.schema.data import Data
from launch.schema.trainer_args import evaluates_first, value, value_or_none

MAX_STEPS = "method.args.max_steps"
HUB_ROWS = Path(__file__).with_name("hub_rows.yaml")


def num_steps(config: Config, size: Batch, prepared: Mapping[str, Any] | None = None) -> int | None:
    """Return the number of optimizer steps; None if it depends on unread rows or on packing."""
    max_steps = value(config, "max_steps")
    if max_steps and int(max_steps) > 0:
        return int(max_steps)
    steps = epoch_steps(config, size, prepared)
    return math.ceil(steps * float(value(config, "num_train_epochs"))) if steps else None


def epoch_steps(
    config: Config, size: Batch, prepared: Mapping[str, Any] | None = None
) -> float | None:
    """Return the number of optimizer steps of a pass over the rows; None as for num_steps."""
    if prepared:
        rows = prepared.get("packed_rows") or prepared["rows"]
    else:
        rows = num_rows(config)
        if value_or_none(config, "packing"):
            return None
    if not rows:
        return None
    # GRPO generates a group of completions per row and trains on each num_iterations times.
    per_row = int(value_or_none(config, "num_generations") or 1) * int(
        value_or_none(config, "num_iterations") or 1
    )
    rows *= config.method.examples_per_row
    return float(rows * per_row / size.sequences)


def steps_between_saves(config: Config, prepared: Mapping[str, Any] | None = None) -> int | None:
    """Return the steps between two checkpoints; None if it saves none, or as for num_steps."""
    strategy, every = save_strategy(config), value_or_none(config, "save_steps")
    if strategy == "epoch":
        return math.ceil(epoch_steps(config, batch(config), prepared) or 0) or None
    if strategy != "steps" or not every:
        return None
    if every < 1:  # a share of the run
        return math.ceil(every * (num_steps(config, batch(config), prepared) or 0)) or None
    return int(every)


def save_strategy(config: Config) -> str | None:
    """Return no, steps, epoch or best; None if the method saves no checkpoints."""
    strategy = value_or_none(config, "save_strategy")
    return getattr(strategy, "value", strategy)


def num_saves(config: Config, prepared: Mapping[str, Any] | None = None) -> int | None:
    """Return how often a run saves a checkpoint; None if that is unknown.

    transformers also saves at the last step, or at the end of an incomplete last epoch.
    """
    if save_strategy(config) in (None, "no"):
        return 0
    every = steps_between_saves(config, prepared)
    steps = num_steps(config, batch(config), prepared)
    return math.ceil(steps / every) if steps and every else None


def same_answers(config: Config, sequences: int) -> int | None:
    """Return the steps of `sequences` each with as many in all; None if max_steps need not change.

    A fixed number of larger steps would take longer, however fast each sequence is.
    """
    steps, before = value(config, "max_steps"), batch(config).sequences
    is_fixed = steps and int(steps) > 0 and sequences != before
    return max(1, round(int(steps) * before / sequences)) if is_fixed else None


def num_rows(config: Config, *most: int | None) -> int | None:
    """Return the number of training rows, at most, before any is filtered; None if unknown."""
    data = config.data
    counts = (data.limit, data.num_train, source_rows(data, data.path, data.split), *most)
    return min(filter(None, counts), default=None)


def source_rows(data: Data, path: str | None, split: str | None) -> int | None:
    """Return the rows of a JSONL file, or of a split of the Hub; None if they are unknown."""
    if data.kind == "hub":
        splits: Mapping[str, int] = (yaml_file(HUB_ROWS) or {}).get(data.revision, {})
        return splits.get(split or "")
    return jsonl_files.num_rows(path) if data.kind == "jsonl" else None


def num_heldout(config: Config) -> int | None:
    """Return the number of held-out rows, at most; None if it is unknown."""
    data = config.data
    number = data.num_heldout or source_rows(data, data.heldout_path, data.heldout_split)
    if data.heldout_fraction:
        all_rows = source_rows(data, data.path, data.split)
        number = all_rows and math.ceil(data.heldout_fraction * all_rows)
    limit = data.limit if config.method.measures_model else None  # else of the training rows
    return min(filter(None, (number, number and limit)), default=None)


def num_passes(config: Config, steps: int | None) -> int:
    """Return how often a run of `steps` measures its held-out rows; 0 if it never does."""
    if config.method.selection.metric is None or not steps:
        return 0
    every = float(value(config, "eval_steps") or value(config, "save_steps"))
    every = math.ceil(every * steps) if every < 1 else every  # a share of all steps
    return evaluates_first(config) + math.ceil(steps / every)
