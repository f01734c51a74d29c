"""The trials of a sweep as overrides: a grid of the command line's own lists, or points of a search's space."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from launch.compose import CONF, freed
from launch.errors import UserError
from launch.schema import Parameter, Sweep

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

PLAIN_WORD = re.compile(r"[A-Za-z_][\w./-]*")
NOT_WORDS = ("true", "false", "null", "nan", "inf")  # unquoted they are something else


def split(overrides: list[str]) -> tuple[list[str], list[list[str]]]:
    """(the overrides that every trial shares, those that vary: one list for each trial). Raises UserError."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):  # glob(*) asks for the options of a group
            parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(overrides)
            lists = [_values(override) for override in parsed if override.is_sweep_override()]
    except HydraException as error:
        raise UserError(f"{str(error).splitlines()[0]}. An override of a sweep is key=value or key=value,value,... .") from error
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    return fixed, [list(trial) for trial in itertools.product(*lists)]


def _values(override: Override) -> list[str]:
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: a range has no end of values. A search takes ranges: sweep=NAME, as in conf/sweep/.")
    found = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not found:
        raise UserError(f"{override.input_line}: no value in it.")
    return found


def check(sweep: Sweep) -> None:
    """Raises UserError for a space that cannot be searched."""
    at = f"sweep={sweep.name}"
    if not sweep.space:
        raise UserError(f"{at}: sweep.space is empty. Give it a parameter, for example as in conf/sweep/sft_learning_rate.yaml.")
    if sweep.metric is None:
        raise UserError(f"{at}: sweep.metric has no value. Name a figure that the runs write, for example sweep.metric=loss.")
    if sweep.num_trials < 1:
        raise UserError(f"sweep.num_trials={sweep.num_trials}: out of range. Use: at least 1.")
    for name, parameter in sweep.space.items():
        _check_parameter(f"sweep.space.{name}", parameter)
        for value in choices(parameter) or [_text(parameter.low)]:
            freed([f"{parameter.key}={value}"])
    keys = [parameter.key for parameter in sweep.space.values()]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UserError(f"{at}: {', '.join(twice)} stands twice in sweep.space. Keep one.")


def _check_parameter(at: str, given: Parameter) -> None:
    if given.values is not None:
        if given.low is not None or given.high is not None:
            raise UserError(f"{at}: values and a range. Give one of the two.")
        if not given.values:
            raise UserError(f"{at}.values=[]: nothing to try. Give at least one value.")
        return
    if given.low is None or given.high is None:
        raise UserError(f"{at}: no values. Give values=[...], or low and high.")
    if not (math.isfinite(given.low) and math.isfinite(given.high) and given.low < given.high):
        raise UserError(f"{at}: low={given.low:g}, high={given.high:g}: an empty range. high must be above low.")
    if given.log and given.low <= 0:
        raise UserError(f"{at}: low={given.low:g} with log=true: a logarithm needs low above 0.")
    if given.integer and not (given.low.is_integer() and given.high.is_integer()):
        raise UserError(f"{at}: low={given.low:g}, high={given.high:g} with integer=true: both must be whole numbers.")


def choices(parameter: Parameter) -> list[str] | None:
    """The values of a list as texts; None for a range."""
    return None if parameter.values is None else [_text(value) for value in parameter.values]


def combinations(sweep: Sweep) -> list[dict[str, str]] | None:
    """Every point of a space of lists, where num_trials are enough for it; else None, and the sampler chooses."""
    lists = [choices(parameter) for parameter in sweep.space.values()]
    if any(values is None for values in lists) or math.prod(len(values or []) for values in lists) > sweep.num_trials:
        return None
    return [dict(zip(sweep.space, point, strict=True)) for point in itertools.product(*(values or [] for values in lists))]


def distributions(sweep: Sweep) -> dict[str, BaseDistribution]:
    """For Optuna, by the parameter's name. A list is of texts: Optuna keeps plain values only, and a value may be a list."""
    from optuna import distributions as kinds  # takes a second to import, and only a search needs it

    found: dict[str, BaseDistribution] = {}
    for name, parameter in sweep.space.items():
        values = choices(parameter)
        low, high = parameter.low or 0.0, parameter.high or 0.0
        if values is not None:
            found[name] = kinds.CategoricalDistribution(values)
        elif parameter.integer:
            found[name] = kinds.IntDistribution(int(low), int(high), log=parameter.log)
        else:
            found[name] = kinds.FloatDistribution(low, high, log=parameter.log)
    return found


def point(sweep: Sweep, values: Mapping[str, Any]) -> list[str]:
    """The overrides of one point of the space. A text is one of a list's, and stands as it is."""
    given = {name: values[name] for name in sweep.space}
    return [f"{sweep.space[name].key}={value if isinstance(value, str) else _text(value)}" for name, value in given.items()]


def _text(value: Any) -> str:
    """A value as an override says it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not (PLAIN_WORD.fullmatch(value) and value.lower() not in NOT_WORDS):
        return "'" + value.replace("'", "\\'") + "'"
    return str(value)
