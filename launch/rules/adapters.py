"""Rows of check.py's table about adapters."""

from __future__ import annotations

from launch.errors import near
from launch.planner.shapes import LINEARS
from launch.rules.rule import Rule
from launch.schema import Adapter, Config


def _adapter_keys(config: Config) -> list[str]:
    """Keys of an adapter that were given a value although there is none."""
    keys = ("alpha", "dropout", "target_modules", "rslora", "dora", "path")
    return [key for key in keys if config.adapter.name == "none" and getattr(config.adapter, key) != getattr(Adapter, key)]


def _no_layers(config: Config) -> bool:
    given = config.adapter.target_modules
    return given != Adapter.target_modules and not (isinstance(given, list) and given and set(map(str, given)) <= set(LINEARS))


def _layers_refused(config: Config) -> str:
    """PEFT would read a name by itself as a regular expression, and a list of other names would leave layers out without a word."""
    given = config.adapter.target_modules
    what = f"adapter.target_modules={listed(given)}"
    if not given or not isinstance(given, (str, list)):
        return f"{what}: it names no linear layer"
    unknown = [name for name in _names(given) if name not in LINEARS]
    if unknown:
        return f"{what}: no linear layer is named {unknown[0]}.{near(unknown[0], (*LINEARS, Adapter.target_modules))}"
    return f"{what}: it takes a list"


def _layers_to_give(config: Config) -> str:
    names = [name for name in _names(config.adapter.target_modules) if name in LINEARS]
    some = f"adapter.target_modules=[{','.join(names or ('q_proj', 'v_proj'))}]"
    return f"{some}, of {', '.join(LINEARS)}; or adapter.target_modules={Adapter.target_modules}"


def _names(given: object) -> list[str]:
    """Those that a value means: a list, or names with commas between."""
    return [str(one).strip() for one in (given if isinstance(given, list) else str(given).split(","))]


def listed(given: object) -> str:
    return f"[{','.join(map(str, given))}]" if isinstance(given, list) else str(given)


ADAPTER_RULES = [
    Rule(
        "adapter_without_training",
        lambda c: c.adapter.name != "none" and c.method.kind != "trainer" and not c.method.takes_adapter,
        lambda c: f"adapter={c.adapter.name} with method={c.method.name}: it trains none, and would ignore it",
        lambda c: "adapter=none, with model.path=<the training's run>/model, which holds the adapter merged",
    ),
    Rule(
        "adapter_rank",
        lambda c: (c.adapter.name == "none") != (c.adapter.rank is None),
        lambda c: f"adapter.rank={c.adapter.rank} with adapter={c.adapter.name}",
        lambda c: "adapter=lora adapter.rank=N, or adapter=none",
    ),
    Rule(
        "adapter_keys",
        lambda c: bool(_adapter_keys(c)),
        lambda c: f"adapter.{_adapter_keys(c)[0]} under adapter=none: it would be ignored",
        lambda c: "adapter=lora",
    ),
    Rule(
        "adapter_dropout",
        lambda c: not 0 <= c.adapter.dropout < 1,
        lambda c: f"adapter.dropout={c.adapter.dropout:g}: it is the share of an adapter's input that is dropped",
        lambda c: "0 up to, but not, 1",
    ),
    Rule("adapter_layers", _no_layers, _layers_refused, _layers_to_give),
]
