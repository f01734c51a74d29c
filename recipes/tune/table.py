"""The table of recipes.tune.occupancy on a terminal or in a file, and the progress before it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
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
    from recipes.tune.occupancy import Row

WIDE = 190  # columns of a table that goes into a file: no line is broken


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
    groups = Counter((one.kernel, one.arch) for one in rows)
    for column in columns:
        table.add_column(column.heading, justify=column.justify, overflow="fold")
    for index, one in enumerate(rows):
        following = rows[index + 1] if index + 1 < len(rows) else one
        ends = (
            (following.kernel, following.arch) != (one.kernel, one.arch)
            if groups.most_common(1)[0][1] > 1
            else following.kernel != one.kernel
        )
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
    text: Callable[[Row], object]
    justify: Literal["left", "right"] = "right"
    always: bool = False  # shown even where it is 0 or empty in every row
    compiled: bool = True  # only of what has compiled


def _occupancy(one: Row) -> str:
    assert one.occupancy
    return f"{one.occupancy.waves:g}/{one.occupancy.max_waves}"


COLUMNS = (
    _Column("kernel", lambda one: one.kernel, "left", always=True, compiled=False),
    _Column("arch", lambda one: one.arch, "left", always=True, compiled=False),
    _Column("warps", lambda one: one.options.get("num_warps", ""), compiled=False),
    _Column("stages", lambda one: one.options.get("num_stages", ""), compiled=False),
    _Column("waves_per_eu", lambda one: one.options.get("waves_per_eu", ""), compiled=False),
    _Column("nonkdim", lambda one: one.options.get("matrix_instr_nonkdim", ""), compiled=False),
    _Column("VGPR", lambda one: one.resources.vgprs, always=True),
    _Column("AGPR", lambda one: one.resources.agprs),
    _Column("SGPR", lambda one: one.resources.sgprs, always=True),
    _Column("spills", lambda one: one.resources.spills, always=True),
    _Column("scratch B", lambda one: one.resources.scratch_bytes),
    _Column("LDS B", lambda one: one.resources.lds_bytes, always=True),
    _Column("waves", lambda one: one.resources.waves, always=True),
    _Column("by VGPR", lambda one: f"{one.occupancy.by_vgpr:g}", always=True),
    _Column("by SGPR", lambda one: f"{one.occupancy.by_sgpr:g}", always=True),
    _Column("by LDS", lambda one: f"{one.occupancy.by_lds:g}", always=True),
    _Column("occupancy", _occupancy, always=True),
    _Column("limit", lambda one: " ".join(one.occupancy.limits), "left"),
    _Column("matrix", lambda one: _matrix(one.instructions.matrix), "left"),
    _Column("loads b128", lambda one: _wide(one.instructions.global_loads), always=True),
    _Column("LDS b128", lambda one: _wide(one.instructions.lds_loads + one.instructions.lds_stores), always=True),
    _Column("workgroups", lambda one: _grid(one), compiled=False),
)


def _value(column: _Column, one: Row) -> str:
    if column.compiled and one.error:
        return "failed" if column.heading == "occupancy" else ""
    return str(column.text(one))


def _matrix(counts: Counter[str]) -> str:
    """`MFMA 32x32x8 48`: the kind, the shapes, and how many instructions there are."""
    kinds = sorted({name.split("_")[1].upper() for name in counts})
    shapes = sorted({part for name in counts for part in re.findall(r"\d+x\d+x\d+", name)})
    return " ".join([*kinds, *shapes, str(counts.total())]) if counts else ""


def _wide(counts: Counter[str]) -> str:
    """`8/9`: those of 16 bytes a lane in one address, and all."""
    return f"{counts['b128']}/{counts.total()}" if counts else ""


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
        "occupancy: waves that one SIMD holds, of those it has places for; by ...: what one resource alone would allow; waves: of one workgroup.",
        "VGPR: on gfx90a, gfx942 and gfx950 with the AGPRs in it. b128: accesses of 16 bytes a lane (dwordx4), of all; loops are not multiplied.",
        "More occupancy promises no speed: measure.",
    ]
    if any(one.small_grid for one in rows):
        lines.append(f"!: fewer than {ENOUGH_WORKGROUPS} workgroups, which AMD's workload guide asks for to fill an MI300X.")
    if any(one.resources and one.resources.spills for one in rows):
        lines.append("spills: registers that went to memory. More warps, smaller blocks, fewer stages or a lower waves_per_eu avoid them.")
    return lines
