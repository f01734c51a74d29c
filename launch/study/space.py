"""Compute the overrides of a sweep's trials, from a grid of lists or points of a search space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from launch.config.request import Request
from launch.config.wording import CONF
from launch.core.errors import UserError
from launch.core.key_values import hydra_value
from launch.schema import Parameter, Sweep

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def split(request: Request) -> tuple[list[str], list[list[str]]]:
    """Return the overrides that all trials share, and each trial's overrides. Raises UserError."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):  # glob(*) needs the loader
            loader = GlobalHydra.instance().config_loader()
            parsed = OverridesParser.create(loader).parse_overrides([*request])
            lists = []
            for override in parsed:
                if override.is_sweep_override():
                    if not override.is_discrete_sweep():
                        raise UserError(
                            f"{override.input_line}: a grid needs a list of values. To search a "
                            "range, use sweep=NAME; conf/sweep/ has examples."
                        )
                    values = list(override.sweep_string_iterator())
                    if not values:
                        raise UserError(f"{override.input_line}: the list is empty. Add a value.")
                    lists.append([f"{override.get_key_element()}={value}" for value in values])
    except HydraException as error:
        raise UserError(
            f"{str(error).splitlines()[0]}. Use key=value, or key=value,value,... for a grid."
        ) from error
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    return fixed, [list(trial) for trial in itertools.product(*lists)]


def check(sweep: Sweep) -> None:
    """Raise UserError if the space cannot be searched."""
    if not sweep.space or sweep.metric is None:
        raise UserError(
            "A search needs a parameter in sweep.space, and sweep.metric. "
            "See conf/sweep/sft_learning_rate.yaml."
        )
    keys = [parameter.key for parameter in sweep.space.values()]
    for name, parameter in sweep.space.items():
        bounds = [parameter.low, parameter.high]
        if None in bounds if parameter.values is None else bounds != [None, None]:
            raise UserError(f"sweep.space.{name}: set either values=[...] or both low and high.")
        try:
            distribution(parameter)
        except ValueError as error:
            raise UserError(f"sweep.space.{name}: {error}") from error
        for value in choices(parameter) or [hydra_value(parameter.low)]:
            Request((f"{parameter.key}={value}",)).checked()
        if keys.count(parameter.key) > 1:
            raise UserError(f"sweep.space: two parameters vary {parameter.key}. Remove one.")


def choices(parameter: Parameter) -> list[str] | None:
    """Return the parameter's list of values as strings; None for a range."""
    return None if parameter.values is None else [hydra_value(value) for value in parameter.values]


def combinations(sweep: Sweep) -> list[dict[str, str]] | None:
    """Return all points of a space of lists. Return None for ranges or more than num_trials."""
    lists = [values for p in sweep.space.values() if (values := choices(p)) is not None]
    if len(lists) < len(sweep.space) or math.prod(map(len, lists)) > sweep.num_trials:
        return None
    return [dict(zip(sweep.space, point, strict=True)) for point in itertools.product(*lists)]


def distribution(parameter: Parameter) -> BaseDistribution:
    """Return Optuna's distribution. Raises ValueError for an empty list or range.

    Values of a list become strings, because a value may itself be a list, which Optuna rejects.
    """
    from optuna import distributions  # takes a second, and only a search needs it

    if (values := choices(parameter)) is not None:
        return distributions.CategoricalDistribution(values)
    low, high = parameter.low or 0.0, parameter.high or 0.0
    if parameter.integer:
        return distributions.IntDistribution(math.ceil(low), math.floor(high), log=parameter.log)
    return distributions.FloatDistribution(low, high, log=parameter.log)


def overrides_of(sweep: Sweep, values: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a point. Strings come from choices() and are not quoted again."""
    return [
        f"{parameter.key}={value if isinstance(value := values[name], str) else hydra_value(value)}"
        for name, parameter in sweep.space.items()
    ]
