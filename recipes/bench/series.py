"""What every benchmark does around its measurements: a row for each case, kept as soon as it is measured, compared with what was
published, and shown as a table.

A benchmark lists its cases and says how one is measured:

    table = Table("gemm", figure="tflops", columns=[Column("shape", "m, n, k"), Column("tflops", "TFLOPS", digits=1)])
    return measure(config, args, table, cases, lambda case: {"tflops": ...})
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table as RichTable

from recipes.bench import published
from recipes.common import profiling
from recipes.common.device import device
from recipes.common.errors import UserError
from recipes.common.files import append
from recipes.common.names import Arguments
from recipes.common.program import Failed, Interrupted, is_main_rank, say, stop_asked

Row = dict[str, Any]
WIDTH = 150  # of the table: it is read in logs, too
OUT_OF_MEMORY = "out of memory"  # the `error` of a row that ran into it
# What a program that starts anew (recipes/bench/ranks.py) is told: the row that it was at, and why that failed; empty: for want of memory.
ROW, ROW_ERROR = "RECIPES_ROW", "RECIPES_ROW_ERROR"


@dataclass
class SeriesConfig(Arguments):
    """What each benchmark takes. `fail_below`: the least ratio to the published figure, below which the run fails (exit code 4).

    Raises UserError for a value out of range.
    """

    output_dir: str
    seed: int = 0
    use_cpu: bool = False
    fail_below: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fail_below is not None and self.fail_below <= 0:
            raise UserError(f"method.args.fail_below={self.fail_below}: a ratio above 0, as 0.9.")


@dataclass(frozen=True)
class Column:
    key: str  # of the row
    title: str  # with the unit
    digits: int | None = None  # behind the point; None: as it is


@dataclass(frozen=True)
class Table:
    """`figure`: the key that is compared with what was published, by the row's other keys."""

    benchmark: str
    columns: Sequence[Column]
    figure: str
    higher_is_better: bool = True
    notes: list[str] = field(default_factory=list)


def device_of(args: SeriesConfig) -> torch.device:
    """Return this rank's device. Raises UserError if there is no GPU."""
    if args.use_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU here. Use: smoke=true, which runs the benchmark's code on a CPU.")
    torch.cuda.set_device(device())
    return device()


def measure(config: DictConfig, args: SeriesConfig, table: Table, cases: Iterable[Row], work: Callable[[Row], Row]) -> dict[str, Any]:
    """Measure each case that this run has not measured before, or that failed then, and return the content of result.json.

    `work` takes a case and returns its figures; memory that runs out, and a UserError, become the row's `error`, and the series goes on.
    Raises Failed with the result where a figure is below the gate or no row has one, and Interrupted between two cases when a signal
    asked to stop.
    """
    return result(config, args, table, measure_rows(config, args, table, cases, work, []))


def measure_rows(
    config: DictConfig, args: SeriesConfig, table: Table, cases: Iterable[Row], work: Callable[[Row], Row], rows: list[Row]
) -> list[Row]:
    """The first half of `measure`, where rows depend on one another. `work` may look at `rows` while they are filled."""
    published.require(table.benchmark, config.hardware.name, table.figure, args.fail_below)
    cases = list(cases)
    if args.fail_below is not None:
        published.require_rows(table.benchmark, config.hardware.name, table.figure, args.fail_below, cases)
    path = Path(config.run_dir) / "metrics.jsonl"
    rows += kept(path, cases)
    ended = (int(os.environ[ROW]), os.environ.pop(ROW_ERROR)) if ROW_ERROR in os.environ else None
    # What failed for want of memory would do so again. A package, a tool or a driver may be there by now.
    again = [i for i, row in enumerate(rows) if row["error"] not in (None, OUT_OF_MEMORY) and (ended is None or i >= ended[0])]
    for i in again:
        say(f"tried again: {_name(table, rows[i])}, which failed: {rows[i]['error']}")
    left, began = [*again, *range(len(rows), len(cases))], time.monotonic() - max((row["time_s"] for row in rows), default=0)
    with profiling.session(config, max(1, len(left))) as profile:
        for i in left:
            if together(stop_asked()):
                raise Interrupted(rows=rows)
            os.environ[ROW] = str(i)
            known = {"error": ended[1] or OUT_OF_MEMORY} if ended and i == ended[0] else None
            row = {**cases[i], **(known or _finite(_attempt(cases[i], work))), "time_s": time.monotonic() - began}
            if together(row["error"] is not None and stop_asked()):  # the stop may be all that failed it: no row says so, the next run does
                raise Interrupted(rows=rows)
            if i < len(rows):
                rows[i] = row
                _write(path, rows, len(cases))
            else:
                rows.append(row)
                if is_main_rank():
                    append(path, {"step": i + 1, "num_steps": len(cases), **row})
            say(f"{i + 1}/{len(cases)}  {_line(table, row)}")
            profile.step()
    return rows


def _write(path: Path, rows: Sequence[Row], num_cases: int) -> None:
    """All of metrics.jsonl anew, at once: other ranks read it, too."""
    if is_main_rank():
        staged = path.with_name(f".{path.name}.tmp")
        staged.write_text("".join(json.dumps({"step": i, "num_steps": num_cases, **row}) + "\n" for i, row in enumerate(rows, 1)))
        staged.replace(path)


def result(config: DictConfig, args: SeriesConfig, table: Table, rows: list[Row], **own: Any) -> dict[str, Any]:
    """Rows beside published figures, printed; `own` are further keys of result.json.

    Raises Failed where the gate is asked for and a figure is below it, and where no row has one.
    """
    hardware = "cpu" if config.get("smoke") else config.hardware.name  # a smoke run's figures are a CPU's, whatever it stands for
    compared = published.compare(rows, table.benchmark, hardware, table.figure, table.higher_is_better, args.fail_below)
    notes = [*table.notes, *compared.notes]
    notes += [f"{_name(table, row)}: {', '.join(row['not_finite'])} came out as inf or nan." for row in rows if row.get("not_finite")]
    content = {
        **own,
        "benchmark": table.benchmark,
        "columns": [asdict(column) for column in table.columns],
        "figure": table.figure,
        "higher_is_better": table.higher_is_better,
        "rows": compared.rows,
        "notes": notes,
        "fail_below": args.fail_below,
        "below": compared.below,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not args.use_cpu else "CPU",
    }
    if is_main_rank():
        show(table, compared.rows, hardware, notes)
    if rows and all(row["error"] for row in rows):
        raise Failed(f"no row could be measured; the first: {_name(table, rows[0])}: {rows[0]['error']}", **content)
    if compared.below:
        raise Failed(f"below method.args.fail_below={args.fail_below:g} of what was published: {'; '.join(compared.below)}", **content)
    return content


def show(table: Table, rows: Sequence[Row], hardware: str, lines: Sequence[str]) -> None:
    """The table, and under it why rows failed, and `lines`."""
    console = Console(width=WIDTH)
    console.print(rich_table(table, rows, hardware))
    failed = [f"{_name(table, row)}: {row['error']}" for row in rows if row["error"]]
    for line in [*failed, *lines]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def kept(path: Path, cases: Sequence[Row]) -> list[Row]:
    """Rows that an interrupted run has measured, as long as they are the first of these cases; others are dropped from the file."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.is_file() else []
    rows: list[Row] = []
    for line, case in zip(lines, cases, strict=False):
        if not line.endswith("\n"):  # cut off in the middle of being written
            break
        row = _row(line)
        if row is None:  # a disk that was full, or a node that lost its power
            say(f"{path.name}: line {len(rows) + 1} is no row: measured anew from there")
            break
        if any(row.get(key) != value for key, value in case.items()):
            break
        rows.append({key: value for key, value in row.items() if key not in ("step", "num_steps")})
    if len(rows) < len(lines):
        _write(path, rows, len(cases))
    if rows:
        say(f"{len(rows)} of {len(cases)} were measured before the interruption")
    return rows


def _row(line: str) -> Row | None:
    """None for a line that is no row, whatever has become of it."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "error" in row and isinstance(row.get("time_s"), (int, float)) else None


def together(flag: bool) -> bool:
    """Whether it is true on any rank: all of them go on, or none does."""
    if not dist.is_initialized():
        return flag
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    shared = torch.tensor(int(flag), device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return bool(shared)


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raises UserError, which becomes the row's error, where torch has no kernel for a case or cannot compile one: a RuntimeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(f"{what}: {(str(error).strip() or type(error).__name__).splitlines()[0]}") from error


def _attempt(case: Row, work: Callable[[Row], Row]) -> Row:
    """The figures of a case, or why there are none."""
    try:
        return {**work(case), "error": None}
    except torch.OutOfMemoryError:
        error = OUT_OF_MEMORY
    except UserError as refused:
        error = str(refused)
    if torch.cuda.is_available():
        gc.collect()  # a backward pass that broke off holds its tensors in cycles
        torch.cuda.empty_cache()  # for the next case
    return {"error": error}


def _finite(figures: Row) -> Row:
    """None for figures that are no numbers, as the loss of a training that went astray; JSON has none. `not_finite` names them."""
    bad = [key for key, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**figures, **dict.fromkeys(bad), "not_finite": bad} if bad else figures


def _line(table: Table, row: Row) -> str:
    cells = [f"{column.title} {_cell(row.get(column.key), column.digits)}" for column in table.columns if row.get(column.key) is not None]
    return "  ".join([*cells, *([row["error"]] if row["error"] else [])])


def _name(table: Table, row: Row) -> str:
    """What tells a row from the others: its columns that are no figures."""
    return " ".join(str(row[column.key]) for column in table.columns if column.digits is None and row.get(column.key) is not None)


def _cell(value: object, digits: int | None) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) and digits is not None else str(value)


def rich_table(table: Table, rows: Sequence[Row], hardware: str) -> RichTable:
    shown = RichTable(title=table.benchmark, title_justify="left")
    for column in table.columns:
        shown.add_column(column.title, justify="left" if column.digits is None else "right")
    with_published = any(row.get("published") is not None for row in rows)
    if with_published:
        shown.add_column(f"published {hardware}", justify="right")
        shown.add_column("ratio", justify="right")
    for row in rows:
        cells = [_cell(row.get(column.key), column.digits) for column in table.columns]
        if row["error"]:
            at = next(i for i, column in enumerate(table.columns) if column.key == table.figure)
            cells[at] = "failed"
        if with_published:
            cells += [_cell(row.get("published"), None), _cell(row.get("ratio"), 2)]
        shown.add_row(*cells)
    return shown
