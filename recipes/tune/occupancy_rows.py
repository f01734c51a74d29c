"""Judge a compiled kernel, and print the table of recipes.tune.occupancy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from recipes.tune.amdgpu import (
    ARCHITECTURES,
    ENOUGH_WORKGROUPS,
    Instructions,
    Occupancy,
    Resources,
    count_instructions,
    occupancy,
    read_resources,
)

if TYPE_CHECKING:  # both need Triton
    from recipes.tune.compile import Compiled
    from recipes.tune.kernels import Launch

# Keys of resources, occupancy and instructions that the table shows; format=json has all of them.
SHOWN = """
    vgprs agprs sgprs vgpr_spills sgpr_spills scratch_bytes lds_bytes by_vgpr by_sgpr by_lds waves
    max_waves limits matrix global_loads
""".split()
WIDE = 230  # columns if the output is not a terminal, so that no line wraps
LEGEND = f"""\
waves: held by one SIMD, of max_waves; by_...: if only that resource limited them (docs/kernels.md).
vgprs: on gfx90a, gfx942 and gfx950 including AGPRs. b128: accesses of 16 bytes a lane.
Spilled registers go to memory. More warps, smaller blocks, fewer stages or a lower waves_per_eu
avoid them. !: fewer than {ENOUGH_WORKGROUPS} workgroups, the least that AMD's guide recommends for
an MI300X. More occupancy promises no speed: measure."""


@dataclass(frozen=True)
class Code:
    """Describe a compiled kernel."""

    resources: Resources
    occupancy: Occupancy
    instructions: Instructions


@dataclass(frozen=True)
class Row:
    """Describe one kernel, compiled for one architecture with one set of options.

    If there is no `code`, `error` is the reason.
    """

    kernel: str
    arch: str
    options: dict[str, int]
    workgroups: int | None
    per_compute_unit: bool
    seconds: float
    error: str | None = None
    code: Code | None = None

    @property
    def small_grid(self) -> bool:
        """Return whether the grid has fewer workgroups than AMD's guide recommends."""
        return self.per_compute_unit or (
            self.workgroups is not None and self.workgroups < ENOUGH_WORKGROUPS
        )

    @property
    def rank(self) -> tuple[Any, ...]:
        """Return a sort key: no errors, no spills, high occupancy, wide loads, few registers."""
        if not self.code:
            return (2,)
        needs, loads = self.code.resources, self.code.instructions.global_loads
        wide = loads.get("b128", 0) / max(sum(loads.values()), 1)
        return (bool(needs.spills), -self.code.occupancy.waves, -wide, needs.vgprs)


def row_of(launch: Launch, arch: str, compiled: Compiled) -> Row:
    # Omit switches such as debug
    options = {key: value for key, value in launch.options.items() if type(value) is int}
    grid = (launch.workgroups, launch.per_compute_unit)
    row = Row(launch.name, arch, launch.blocks | options, *grid, compiled.seconds, compiled.error)
    if compiled.error:
        return row
    needs = read_resources(compiled.isa, compiled.lds_bytes)
    fit = occupancy(ARCHITECTURES[arch], needs)
    if not fit.workgroups:
        limits = " and ".join(fit.limits)
        return replace(row, error=f"cannot start: a workgroup needs more {limits} than there is")
    return replace(row, code=Code(needs, fit, count_instructions(compiled.isa)))


def show(rows: list[Row], versions: dict[str, str], saved: Path | None) -> None:
    """Print the table, the reasons for missing rows, and an explanation of the terms."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    title = f"Compiled by {', '.join(f'{name} {version}' for name, version in versions.items())}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cells = [_cells(row) for row in rows]
    # Empty columns are left out.
    headings = list(dict.fromkeys(key for row in cells for key, text in row.items() if text))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in cells:
        table.add_row(*(row.get(heading, "") for heading in headings))
    console.print(table)
    failures = [
        f"failed: {row.kernel} {row.arch} {_text(row.options)}: {row.error}"
        for row in rows
        if row.error
    ]
    files = [f"Assembly (.s) and .ttgir of each row: {saved}/"] if saved else []
    lines = "\n".join([*failures, LEGEND, *files])
    console.print(lines, markup=False, highlight=False, soft_wrap=True)


def _cells(row: Row) -> dict[str, str]:
    grid = "one per CU" if row.per_compute_unit else row.workgroups
    cells = {"kernel": row.kernel, "arch": row.arch, **row.options}
    cells["grid"] = f"{grid} !" if row.small_grid else grid
    for part in asdict(row.code).values() if row.code else ():
        cells |= {key: part[key] for key in SHOWN if key in part}
    return {key: _text(value) for key, value in cells.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={number}" for key, number in value.items())
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value or "")
