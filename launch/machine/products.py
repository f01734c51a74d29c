"""Load the GPU products that hardware=auto can identify: conf/hardware and OTHERS."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.core.errors import UserError
from launch.core.json_files import yaml_file
from launch.schema.host import Detect

HARDWARE = Path(__file__).parents[2] / "conf/hardware"
GPU_VENDORS = ("amd", "nvidia")


@dataclass(frozen=True)
class Product:
    """The facts that identify a GPU product; they describe a complete GPU, not a partition."""

    name: str
    gfx: str
    compute_units: int
    group: str | None  # group of conf/hardware
    detect: Detect


OTHERS = (  # products without a file in conf/hardware
    # A die is equal to an MI210.
    Product("AMD Instinct MI250 (one of its two dies)", "gfx90a", 104, "mi210", Detect([0x740C])),
)


@functools.cache
def products(folder: Path = HARDWARE) -> tuple[Product, ...]:
    """Return the products of the files in `folder`, then OTHERS.

    Raises UserError for a GPU's file that lacks an identifying fact.
    """
    from_files = []
    for file in sorted(folder.glob("*.yaml")):
        values = _merged(file)
        if values.get("vendor") not in GPU_VENDORS:
            continue
        try:
            name, gfx, units = values["product"], values["gfx"], values["compute_units"]
            detect = Detect(**values.get("detect", {}))
            from_files.append(Product(name, gfx, units, values["name"], detect))
        except (KeyError, TypeError) as error:
            fields = ", ".join(field.name for field in dataclasses.fields(Detect))
            raise UserError(
                f"{file}: hardware=auto cannot identify this GPU ({error!r}). Set product, gfx, "
                f"compute_units, name and, if needed, detect ({fields})."
            ) from error
    return (*from_files, *OTHERS)


def _merged(file: Path) -> dict[str, Any]:
    """Return a file's values merged over its defaults list, as Hydra would merge them.

    Hydra takes a tenth of a second for each file.
    """
    values = yaml_file(file)
    base: dict[str, Any] = {}
    for default in values.pop("defaults", ()):
        if default != "_self_":
            base |= _merged(file.parent / f"{default.partition('@')[0]}.yaml")
    return base | values
