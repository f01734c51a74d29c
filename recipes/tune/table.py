"""Print the table of recipes.tune.occupancy, and its progress bar."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes.tune.amdgpu import ENOUGH_WORKGROUPS, Instructions, Occupancy, Resources

WIDE = 230  # columns if the output is not a terminal, so that no line wraps


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


@contextlib.contextmanager
def progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that redraws a bar on stderr, to be called whenever a kernel is done.

    There is no refreshing thread, because the compiling processes are forked from this one.
    """
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not (shown and console.is_terminal),
    ) as bar:
        task = bar.add_task("", total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        yield on_progress


def show(rows: list[Row], versions: dict[str, str], saved: Path | None) -> None:
    """Print the table, the reasons for missing rows, and explanations of its terms."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    title = f"Compiled by {', '.join(f'{name} {version}' for name, version in versions.items())}"
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    cells = [_cells(row) for row in rows]
    headings = [
        heading
        for heading in cells[0]
        if heading not in OPTIONAL or any(row[heading] not in ("", "0") for row in cells)
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in LEFT else "right", overflow="fold")
    swept = len({(row.kernel, row.arch) for row in rows}) < len(rows)
    sections = [(row.kernel, row.arch if swept else "") for row in rows]
    for row_cells, section, following in zip(
        cells, sections, [*sections[1:], sections[-1]], strict=True
    ):
        table.add_row(*(row_cells[h] for h in headings), end_section=section != following)
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.error:
            options = "".join(f" {key}={value}" for key, value in row.options.items())
            reasons.setdefault(row.error, []).append(f"{row.kernel} {row.arch}{options}")
    lines = [f"failed: {reason}\n    {'; '.join(kernels)}" for reason, kernels in reasons.items()]
    lines += _legend(rows)
    if saved:
        lines.append(f"Assembly (.s) and .ttgir of each row: {saved}/")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


LEFT = ("kernel", "arch", "blocks", "limit", "matrix")
# Columns shown only if some row has a value other than 0 or nothing.
OPTIONAL = (
    *("blocks", "warps", "stages", "waves_per_eu", "nonkdim", "AGPR", "scratch B", "limit"),
    "workgroups",
)


def _cells(row: Row) -> dict[str, str]:
    options, grid = row.options, "one per CU" if row.per_compute_unit else row.workgroups or ""
    before = {
        "kernel": row.kernel,
        "arch": row.arch,
        "blocks": " ".join(f"{key}={size}" for key, size in options.items() if "BLOCK" in key),
        "warps": options.get("num_warps", ""),
        "stages": options.get("num_stages", ""),
        "waves_per_eu": options.get("waves_per_eu", ""),
        "nonkdim": options.get("matrix_instr_nonkdim", ""),
    }
    code = dict.fromkeys(CODE, "") | {"occupancy": "failed"}
    if row.code:
        code = {heading: value(row.code) for heading, value in CODE.items()}
    after = {"workgroups": f"{grid} !" if row.small_grid else grid}
    return {heading: str(value) for heading, value in {**before, **code, **after}.items()}


CODE: dict[str, Callable[[Code], object]] = {
    "VGPR": lambda code: code.resources.vgprs,
    "AGPR": lambda code: code.resources.agprs,
    "SGPR": lambda code: code.resources.sgprs,
    "spills": lambda code: code.resources.spills,
    "scratch B": lambda code: code.resources.scratch_bytes,
    "LDS B": lambda code: code.resources.lds_bytes,
    "waves": lambda code: code.resources.waves,
    "by VGPR": lambda code: f"{code.occupancy.by_vgpr:g}",
    "by SGPR": lambda code: f"{code.occupancy.by_sgpr:g}",
    "by LDS": lambda code: f"{code.occupancy.by_lds:g}",
    "occupancy": lambda code: f"{code.occupancy.waves:g}/{code.occupancy.max_waves}",
    "limit": lambda code: " ".join(code.occupancy.limits),
    "matrix": lambda code: matrix(code.instructions.matrix),
    "loads b128": lambda code: _wide(code.instructions.global_loads),
    "LDS b128": lambda code: _wide(code.instructions.lds_loads, code.instructions.lds_stores),
}


def matrix(counts: dict[str, int]) -> str:
    """Return kind, shapes and number of matrix instructions, such as `MFMA 32x32x8 48`."""
    kinds = sorted({name.split("_")[1].upper() for name in counts})
    shapes = sorted({part for name in counts for part in re.findall(r"\d+x\d+x\d+", name)})
    return " ".join([*kinds, *shapes, str(sum(counts.values()))]) if counts else "none"


def _wide(*counts: dict[str, int]) -> str:
    """Return the numbers of 16-byte accesses per lane and of all accesses, such as `8/9`."""
    if not any(counts):
        return "none"
    wide = sum(widths.get("b128", 0) for widths in counts)
    return f"{wide}/{sum(sum(widths.values()) for widths in counts)}"


def _legend(rows: list[Row]) -> list[str]:
    lines = [
        "occupancy: waves that one SIMD holds / has places for; by ...: what one resource alone "
        "would allow; waves: of one workgroup.",
        "VGPR: on gfx90a, gfx942 and gfx950 with the AGPRs in it. b128: accesses of 16 bytes a "
        "lane (dwordx4) / all, in the text.",
        "More occupancy promises no speed: measure.",
    ]
    if any(row.small_grid for row in rows):
        lines.append(
            f"!: fewer than {ENOUGH_WORKGROUPS} workgroups, the least that AMD's workload guide "
            "recommends for an MI300X."
        )
    if any(row.code and row.code.resources.spills for row in rows):
        lines.append(
            "spills: registers that went to memory. More warps, smaller blocks, fewer stages or a "
            "lower waves_per_eu avoid them."
        )
    return lines
