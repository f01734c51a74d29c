"""Turn compiled kernels into rows, and print the table of recipes.tune.occupancy."""

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

# Fields of Code's parts that the table shows; format=json has all fields.
COLUMNS = """
    vgprs agprs sgprs vgpr_spills sgpr_spills scratch_bytes lds_bytes by_vgpr by_sgpr by_lds waves
    max_waves limits matrix global_loads
""".split()
DEFAULT_STAGES = 2  # HIPOptions of Triton 3.7
WIDTH = 230  # characters per line if the output is not a terminal, so that no line wraps
LEGEND = f"""\
waves: waves that fit on one SIMD, of max_waves. by_...: waves if only that resource limited them
(docs/kernels.md). vgprs: including AGPRs on gfx90a, gfx942 and gfx950. b128: accesses of 16 bytes
per lane. !: the grid has fewer than {ENOUGH_WORKGROUPS} workgroups, the minimum that AMD's guide
recommends for an MI300X. waits: instructions that wait for all accesses
to memory, of all that wait.
guide_stages: num_stages that AMD's guide recommends, if it differs: 2 for one matrix product, 1 for
none or several. time_us: median on the GPU that is present.
Spilled registers are stored in memory. To avoid spills, use more warps, smaller blocks, fewer
stages or a lower waves_per_eu. Higher occupancy does not guarantee more speed, so measure it."""


@dataclass(frozen=True)
class Code:
    """The properties of a compiled kernel."""

    resources: Resources
    occupancy: Occupancy
    instructions: Instructions


@dataclass(frozen=True)
class Row:
    """One kernel, compiled for one architecture with one set of options.

    If the compilation failed, `code` is None and `error` is the reason.
    """

    kernel: str
    arch: str
    options: dict[str, int]
    workgroups: int | None
    per_compute_unit: bool
    seconds: float
    error: str | None = None
    code: Code | None = None
    guide_num_stages: int | None = None  # recommended by AMD's guide
    time_us: float | None = None

    @property
    def small_grid(self) -> bool:
        """Return whether the grid has fewer workgroups than AMD's guide recommends."""
        return self.per_compute_unit or (
            self.workgroups is not None and self.workgroups < ENOUGH_WORKGROUPS
        )

    @property
    def rank(self) -> tuple[Any, ...]:
        """Return a sort key. Timed rows come first and errors last, then rows without spills.

        Ties are resolved by high occupancy, then wide loads, then few registers.
        """
        if not self.code:
            return (2,)
        if self.time_us is not None:
            return (-1, self.time_us)
        needs, loads = self.code.resources, self.code.instructions.global_loads
        wide = loads.get("b128", 0) / max(sum(loads.values()), 1)
        return (bool(needs.spills), -self.code.occupancy.waves, -wide, needs.vgprs)


def row_of(launch: Launch, arch: str, compiled: Compiled) -> Row:
    # Leave out boolean options, such as debug.
    options = {key: value for key, value in launch.options.items() if type(value) is int}
    grid = (launch.workgroups, launch.per_compute_unit)
    row = Row(launch.name, arch, launch.blocks | options, *grid, compiled.seconds, compiled.error)
    if compiled.error:
        return row
    row = replace(row, guide_num_stages=2 if compiled.dots == 1 else 1)
    needs = read_resources(compiled.isa, compiled.lds_bytes)
    fit = occupancy(ARCHITECTURES[arch], needs)
    if not fit.workgroups:
        limits = " and ".join(fit.limits)
        return replace(row, error=f"cannot start: one workgroup exceeds the available {limits}")
    return replace(row, code=Code(needs, fit, count_instructions(compiled.isa)))


def show(rows: list[Row], versions: dict[str, str], saved: Path | None) -> None:
    """Print the table, the errors of failed kernels, a legend, and the folder of saved files."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    title = f"Compiled by {', '.join(f'{name} {version}' for name, version in versions.items())}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cells = [table_cells(row) for row in rows]
    # Leave out empty columns.
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
    files = [f"Saved the assembly (.s) and .ttgir of each row in {saved}/"] if saved else []
    lines = "\n".join([*failures, LEGEND, *files])
    console.print(lines, markup=False, highlight=False, soft_wrap=True)


def table_cells(row: Row) -> dict[str, str]:
    grid = "one per CU" if row.per_compute_unit else row.workgroups
    cells = {"kernel": row.kernel, "arch": row.arch, **row.options}
    cells["grid"] = f"{grid} !" if row.small_grid else grid
    cells["time_us"] = row.time_us
    if row.code:
        waits = row.code.instructions.waits
        complete = sum(number for name, number in waits.items() if name.endswith("(0)"))
        cells["waits"] = f"{complete}/{sum(waits.values())}"
    if row.options.get("num_stages", DEFAULT_STAGES) != row.guide_num_stages:
        cells["guide_stages"] = row.guide_num_stages
    for part in asdict(row.code).values() if row.code else ():
        cells |= {key: part[key] for key in COLUMNS if key in part}
    return {key: _text(value) for key, value in cells.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={number}" for key, number in value.items())
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value or "")
