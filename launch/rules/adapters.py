"""Rules about adapters."""

from __future__ import annotations

from launch.core.errors import near
from launch.inputs.adapter_files import listed
from launch.rules.rule import Rule
from launch.schema import Adapter, Config
from launch.schema.shapes import LINEARS


def _no_layers(config: Config) -> bool:
    given = config.adapter.target_modules
    return given != Adapter.target_modules and not (
        isinstance(given, list) and given and set(map(str, given)) <= set(LINEARS)
    )


def _layers_refused(config: Config) -> str:
    """Return what is wrong with adapter.target_modules.

    PEFT reads a single name as a regular expression, and silently skips unknown names in a list.
    """
    given = config.adapter.target_modules
    what = f"adapter.target_modules={listed(given)}"
    if not given or not isinstance(given, (str, list)):
        return f"{what}: it names no linear layer"
    unknown = [name for name in _names(given) if name not in LINEARS]
    if unknown:
        return (
            f"{what}: no linear layer is named "
            f"{unknown[0]}.{near(unknown[0], (*LINEARS, Adapter.target_modules))}"
        )
    return f"{what}: it takes a list"


def _layers_to_give(config: Config) -> str:
    names = [name for name in _names(config.adapter.target_modules) if name in LINEARS]
    some = f"adapter.target_modules=[{','.join(names or ('q_proj', 'v_proj'))}]"
    return f"{some}, of {', '.join(LINEARS)}; or adapter.target_modules={Adapter.target_modules}"


def _names(given: object) -> list[str]:
    """Return the names in a value, which is a list or text with commas."""
    return [
        str(one).strip() for one in (given if isinstance(given, list) else str(given).split(","))
    ]


ADAPTER_RULES = [
    Rule("adapter_layers", _no_layers, _layers_refused, _layers_to_give),
]
