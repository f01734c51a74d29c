"""Print the table of recipes.tune.occupancy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from recipes.tune.amdgpu import ENOUGH_WORKGROUPS, Instructions, Occupancy, Resources

WIDE = 230  # columns if the output is not a terminal, so that no line wraps
LEGEND = f"""\
occupancy: waves that one SIMD holds / has places for; by ...: the limit of that resource alone.
waves: of one workgroup. VGPR: on gfx90a, gfx942 and gfx950 including AGPRs.
b128: accesses of 16 bytes a lane (dwordx4) / all, in the text.
spills: registers that went to memory. More warps, smaller blocks, fewer stages or a lower
waves_per_eu avoid them.
!: fewer than {ENOUGH_WORKGROUPS} workgroups, the least that AMD's guide recommends for an MI300X.
More occupancy promises no speed: measure."""


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


def show(rows: list[Row], versions: dict[str, str], saved: Path | None) -> None:
    """Print the table, the reasons for missing rows, and explanations of its terms."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    title = f"Compiled by {', '.join(f'{name} {version}' for name, version in versions.items())}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cells = [_cells(row) for row in rows]
    keys = dict.fromkeys(key for row in cells for key in row)
    # Empty columns are left out.
    headings = [key for key in keys if any(row.get(key) not in (None, "", 0) for row in cells)]
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in cells:
        table.add_row(*(str(row.get(heading) or "") for heading in headings))
    console.print(table)
    lines = []
    for row in rows:
        if row.error:
            options = "".join(f" {key}={value}" for key, value in row.options.items())
            lines.append(f"failed: {row.kernel} {row.arch}{options}: {row.error}")
    lines += [LEGEND, *([f"Assembly (.s) and .ttgir of each row: {saved}/"] if saved else [])]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _cells(row: Row) -> dict[str, object]:
    options, grid = row.options, "one per CU" if row.per_compute_unit else row.workgroups or ""
    cells: dict[str, object] = {
        "kernel": row.kernel,
        "arch": row.arch,
        "blocks": " ".join(f"{key}={size}" for key, size in options.items() if "BLOCK" in key),
        "warps": options.get("num_warps"),
        "stages": options.get("num_stages"),
        "waves_per_eu": options.get("waves_per_eu"),
        "nonkdim": options.get("matrix_instr_nonkdim"),
        "workgroups": f"{grid} !" if row.small_grid else grid,
    }
    if row.code:
        needs, fit, counts = row.code.resources, row.code.occupancy, row.code.instructions
        cells |= {
            "VGPR": needs.vgprs,
            "AGPR": needs.agprs,
            "SGPR": needs.sgprs,
            "spills": needs.spills,
            "scratch B": needs.scratch_bytes,
            "LDS B": needs.lds_bytes,
            "waves": needs.waves,
            "by VGPR": f"{fit.by_vgpr:g}",
            "by SGPR": f"{fit.by_sgpr:g}",
            "by LDS": f"{fit.by_lds:g}",
            "occupancy": f"{fit.waves:g}/{fit.max_waves}",
            "limit": " ".join(fit.limits),
            "matrix": matrix(counts.matrix),
            "loads b128": _wide(counts.global_loads),
            "LDS b128": _wide(counts.lds_loads, counts.lds_stores),
        }
    return cells


def matrix(counts: dict[str, int]) -> str:
    """Return kind, shapes and number of matrix instructions, such as `MFMA 32x32x8 48`."""
    kinds = sorted({name.split("_")[1].upper() for name in counts})
    shapes = sorted({part for name in counts for part in re.findall(r"\d+x\d+x\d+", name)})
    return " ".join([*kinds, *shapes, str(sum(counts.values()))]) if counts else ""


def _wide(*counts: dict[str, int]) -> str:
    """Return the numbers of 16-byte accesses per lane and of all accesses, such as `8/9`."""
    wide = sum(widths.get("b128", 0) for widths in counts)
    total = sum(sum(widths.values()) for widths in counts)
    return f"{wide}/{total}" if total else ""
