"""Tell whether and when a run compares with a model that it does not train."""

from __future__ import annotations

from launch.schema import Config
from launch.schema.enums import Reference
from launch.schema.trainer_args import argument


def has_reference(config: Config) -> bool:
    """Return whether a frozen copy is in memory while the run trains.

    With an adapter, the base serves as reference, so there is no copy.
    """
    if config.adapter.rank is not None:
        return False
    return compares(config) and not measures_beforehand(config)


def compares(config: Config) -> bool:
    """Return whether the loss compares with a reference, whichever model serves as it."""
    reference = config.method.reference
    return reference is Reference.always or (
        reference is Reference.beta and bool(argument(config, "beta"))
    )


def measures_beforehand(config: Config) -> bool:
    """Return whether a frozen copy sees all rows before training starts."""
    return (
        compares(config)
        and config.adapter.rank is None
        and bool(argument(config, "precompute_ref_log_probs"))
    )
