"""Whether a run compares with a model that it does not train, and when."""

from __future__ import annotations

from launch.schema import Config
from launch.trainer_args import value


def has_reference(config: Config) -> bool:
    """DPO compares with the start, unless it has done so beforehand; GRPO only where beta is not 0. With an adapter the base serves
    as reference."""
    if config.adapter.rank is not None:
        return False
    if config.method.name == "dpo":
        return not measures_beforehand(config)
    return config.method.name == "grpo" and bool(value(config, "beta"))


def measures_beforehand(config: Config) -> bool:
    """DPO's reference has seen all rows before training starts."""
    return config.method.name == "dpo" and config.adapter.rank is None and bool(value(config, "precompute_ref_log_probs"))
