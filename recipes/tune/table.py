"""The table of recipes.tune.occupancy on a terminal or in a file, and the progress before it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes.tune.amdgpu import ENOUGH_WORKGROUPS

if TYPE_CHECKING:
    from recipes.tune.occupancy import Code, Row

WIDE = 230  # columns of a table that goes into a file: no line is broken


@contextlib.contextmanager
def progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while kernels compile. Drawn when one ends, not by a thread: the compiling processes are forked from this one."""
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        yield on_progress


def show(rows: list[Row], versions: dict[str, str], saved: Path | None) -> None:
    """The table, why what is missing in it is missing, and what its words mean."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    columns = [column for column in COLUMNS if column.always or any(_value(column, one) not in ("", "0") for one in rows)]
    title = f"Compiled by {', '.join(f'{name} {version}' for name, version in versions.items())}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    swept = len({(one.kernel, one.arch) for one in rows}) < len(rows)

    def section(one: Row) -> tuple[str, ...]:
        return (one.kernel, one.arch) if swept else (one.kernel,)

    for column in columns:
        table.add_column(column.heading, justify=column.justify, overflow="fold")
    for index, one in enumerate(rows):
        ends = index + 1 < len(rows) and section(rows[index + 1]) != section(one)
        table.add_row(*(_value(column, one) for column in columns), end_section=ends)
    console.print(table)
    lines = [*_failures(rows), *_legend(rows)]
    if saved:
        lines.append(f"Assembly (.s) and .ttgir of each row: {saved}/")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Column:
    heading: str
    of_row: Callable[[Row], object] | None = None
    of_code: Callable[[Code], object] | None = None
    justify: Literal["left", "right"] = "right"
    always: bool = True  # else only where some row has more to show than 0 or nothing


COLUMNS = (
    _Column("kernel", lambda one: one.kernel, justify="left"),
    _Column("arch", lambda one: one.arch, justify="left"),
    _Column(
        "blocks", lambda one: " ".join(f"{key}={size}" for key, size in one.options.items() if "BLOCK" in key), justify="left", always=False
    ),
    _Column("warps", lambda one: one.options.get("num_warps", ""), always=False),
    _Column("stages", lambda one: one.options.get("num_stages", ""), always=False),
    _Column("waves_per_eu", lambda one: one.options.get("waves_per_eu", ""), always=False),
    _Column("nonkdim", lambda one: one.options.get("matrix_instr_nonkdim", ""), always=False),
    _Column("VGPR", of_code=lambda code: code.resources.vgprs),
    _Column("AGPR", of_code=lambda code: code.resources.agprs, always=False),
    _Column("SGPR", of_code=lambda code: code.resources.sgprs),
    _Column("spills", of_code=lambda code: code.resources.spills),
    _Column("scratch B", of_code=lambda code: code.resources.scratch_bytes, always=False),
    _Column("LDS B", of_code=lambda code: code.resources.lds_bytes),
    _Column("waves", of_code=lambda code: code.resources.waves),
    _Column("by VGPR", of_code=lambda code: f"{code.occupancy.by_vgpr:g}"),
    _Column("by SGPR", of_code=lambda code: f"{code.occupancy.by_sgpr:g}"),
    _Column("by LDS", of_code=lambda code: f"{code.occupancy.by_lds:g}"),
    _Column("occupancy", of_code=lambda code: f"{code.occupancy.waves:g}/{code.occupancy.max_waves}"),
    _Column("limit", of_code=lambda code: " ".join(code.occupancy.limits), justify="left", always=False),
    _Column("matrix", of_code=lambda code: _matrix(code.instructions.matrix), justify="left"),
    _Column("loads b128", of_code=lambda code: _wide(code.instructions.global_loads)),
    _Column("LDS b128", of_code=lambda code: _wide(code.instructions.lds_loads, code.instructions.lds_stores)),
    _Column("workgroups", lambda one: _grid(one), always=False),
)


def _value(column: _Column, one: Row) -> str:
    if column.of_row:
        return str(column.of_row(one))
    assert column.of_code
    if one.code:
        return str(column.of_code(one.code))
    return "failed" if column.heading == "occupancy" else ""


def _matrix(counts: dict[str, int]) -> str:
    """`MFMA 32x32x8 48`: the kind, the shapes, and how many instructions there are."""
    kinds = sorted({name.split("_")[1].upper() for name in counts})
    shapes = sorted({part for name in counts for part in re.findall(r"\d+x\d+x\d+", name)})
    return " ".join([*kinds, *shapes, str(sum(counts.values()))]) if counts else "none"


def _wide(*counts: dict[str, int]) -> str:
    """`8/9`: those of 16 bytes a lane at one address, and all."""
    return f"{sum(one.get('b128', 0) for one in counts)}/{sum(sum(one.values()) for one in counts)}" if any(counts) else "none"


def _grid(one: Row) -> str:
    grid = "one per CU" if one.per_compute_unit else str(one.workgroups or "")
    return f"{grid} !" if one.small_grid else grid


def _failures(rows: list[Row]) -> list[str]:
    """Each reason once, with what it is the reason of."""
    reasons: dict[str, list[str]] = {}
    for one in rows:
        if one.error:
            options = "".join(f" {key}={value}" for key, value in one.options.items())
            reasons.setdefault(one.error, []).append(f"{one.kernel} {one.arch}{options}")
    return [f"failed: {reason}\n    {'; '.join(which)}" for reason, which in reasons.items()]


def _legend(rows: list[Row]) -> list[str]:
    lines = [
        "occupancy: waves that one SIMD holds / has places for; by ...: what one resource alone would allow; waves: of one workgroup.",
        "VGPR: on gfx90a, gfx942 and gfx950 with the AGPRs in it. b128: accesses of 16 bytes a lane (dwordx4) / all, in the text.",
        "More occupancy promises no speed: measure.",
    ]
    if any(one.small_grid for one in rows):
        lines.append(f"!: fewer than {ENOUGH_WORKGROUPS} workgroups, which AMD's workload guide asks for to fill an MI300X.")
    if any(one.code and one.code.resources.spills for one in rows):
        lines.append("spills: registers that went to memory. More warps, smaller blocks, fewer stages or a lower waves_per_eu avoid them.")
    return lines
