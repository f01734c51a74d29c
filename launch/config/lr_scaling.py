"""Scale the learning rate with the batch, relative to the batch it was chosen for."""

from __future__ import annotations

import math
from typing import Any

from launch.estimate.batch_counts import batch
from launch.schema import Config
from launch.schema.data import LrScaling
from launch.schema.trainer_args import value


def scale_learning_rate(config: Config, args: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the trainer's arguments with the scaled rate, and a message about the change.

    The batch is the number of sequences per optimizer step on all ranks. The composition keeps
    the unscaled rate, so a run repeated from its record is not scaled twice.
    """
    method = config.method
    if method.lr_scaling == LrScaling.none or method.lr_reference_batch is None:
        return args, []
    rate, size = float(value(config, "learning_rate")), batch(config).sequences
    ratio = size / method.lr_reference_batch
    factor = ratio if method.lr_scaling == LrScaling.linear else math.sqrt(ratio)
    line = (
        f"method.lr_scaling={method.lr_scaling.value}: learning_rate={rate * factor:.4g}, which is "
        f"{rate:g} x {factor:.4g} for {size} sequences per step instead of "
        f"{method.lr_reference_batch}."
    )
    return {**args, "learning_rate": rate * factor}, [line]
