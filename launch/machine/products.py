"""Load the products of conf/hardware that hardware=auto can identify, and others without a file."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.core.errors import UserError
from launch.core.json_files import yaml_file
from launch.schema.host import Detect

HARDWARE = Path(__file__).parents[2] / "conf/hardware"
GPUS = ("amd", "nvidia")  # vendors


@dataclass(frozen=True)
class Product:
    """The facts that identify a product.

    `compute_units` and `detect.dies` count for the whole device, not a partition.
    """

    name: str
    gfx: str
    compute_units: int
    group: str | None  # group of conf/hardware
    detect: Detect


OTHERS = (
    # A die has the figures of the MI210.
    Product("AMD Instinct MI250 (one of its two dies)", "gfx90a", 104, "mi210", Detect([0x740C])),
    Product("AMD Instinct MI308X", "gfx942", 80, None, Detect([0x74A2, 0x74A8, 0x74B6], dies=4)),
)


@functools.cache
def products(folder: Path = HARDWARE) -> tuple[Product, ...]:
    """Return all products of GPUs. Raises UserError for a file without the facts that identify one.

    If several products of one group match a device equally, the first is used; if several groups
    do, the user must choose.
    """
    described = []
    for file in sorted(folder.glob("*.yaml")):
        values = _read(file)
        if values.get("vendor") not in GPUS:
            continue
        try:
            name, gfx, units = values["product"], values["gfx"], values["compute_units"]
            detect = Detect(**values.get("detect", {}))
            described.append(Product(name, gfx, units, values["name"], detect))
        except (KeyError, TypeError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Detect))
            raise UserError(
                f"{file}: hardware=auto identifies a GPU by product, gfx, compute_units, name and "
                f"detect ({fields}). {error!r}"
            ) from error
    return (*described, *OTHERS)


def _read(file: Path) -> dict[str, Any]:
    """Return a file merged over its includes. Hydra would take a tenth of a second per product."""
    values = yaml_file(file)
    under: dict[str, Any] = {}
    for included in values.pop("defaults", ()):
        if included != "_self_":
            under |= _read(file.parent / f"{included.partition('@')[0]}.yaml")
    return under | values
