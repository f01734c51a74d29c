"""Products that hardware=auto tells apart: those that conf/hardware describes, and devices without a file of their own."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.errors import UserError
from launch.schema.host import Detect

HARDWARE = Path(__file__).parents[2] / "conf/hardware"
GPUS = ("amd", "nvidia")  # vendors


@dataclass(frozen=True)
class Product:
    """What tells a product from others. `compute_units` and `detect.dies` are of the whole device: a partition has fewer of both."""

    name: str
    gfx: str
    compute_units: int
    group: str | None  # of conf/hardware
    detect: Detect


OTHERS = (
    Product("AMD Instinct MI250 (one of its two dies)", "gfx90a", 104, "mi210", Detect([0x740C])),  # figures of a die are the MI210's
    Product("AMD Instinct MI308X", "gfx942", 80, None, Detect([0x74A2, 0x74A8, 0x74B6], dies=4)),
)


@functools.cache
def products(folder: Path = HARDWARE) -> tuple[Product, ...]:
    """Of GPUs. Where several of one group fit a device equally, the first is meant; of several groups none, and the user names one. Raises
    UserError for a file that lacks what they are told by."""
    described = [_product(file, values) for file in sorted(folder.glob("*.yaml")) if (values := _read(file)).get("vendor") in GPUS]
    return (*described, *OTHERS)


def _product(file: Path, values: dict[str, Any]) -> Product:
    try:
        return Product(values["product"], values["gfx"], values["compute_units"], values["name"], Detect(**values.get("detect", {})))
    except KeyError as error:
        raise UserError(f"{file}: it has no {error.args[0]}, by which hardware=auto knows a GPU.") from error
    except TypeError as error:
        raise UserError(f"{file}: detect takes {', '.join(field.name for field in dataclasses.fields(Detect))}.") from error


def _read(file: Path) -> dict[str, Any]:
    """A file over those that it includes. Composing it with Hydra would take a tenth of a second, for each product."""
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    under: dict[str, Any] = {}
    for included in values.pop("defaults", ()):
        if included != "_self_":
            under |= _read(file.parent / f"{included.partition('@')[0]}.yaml")
    return under | values
