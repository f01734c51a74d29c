"""Measure a series of cases, save a row for each, and compare it with published figures.

A benchmark lists its cases and passes a function that measures one case:

    table = Table("gemm", "shape tflops", figure="tflops")
    return measure(config, args, table, grid(shape=shapes), lambda case: {"tflops": ...})

conf/method/bench/<name>.yaml has the command that starts it.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table as RichTable

from launch.core.errors import UserError
from launch.core.json_files import read_metrics, write_text
from recipes.bench import published
from recipes.bench.consensus import RankFailedAlone, gather_results
from recipes.bench.timing import free_leftovers
from recipes.measure import profiling
from recipes.rank.device import device
from recipes.rank.program import Failed, Interrupted, give_up, is_main_rank, say, stop_requested

Row = dict[str, Any]
WIDTH = 150  # columns of the printed table; fixed, because logs have no terminal width
COLUMNS = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text())
OUT_OF_MEMORY = "out of memory"  # `error` of a row whose case ran out of memory


@dataclass
class SeriesConfig:
    """Arguments of every benchmark.

    `fail_below`: the run fails (exit code 4) if a row's figure, divided by the published figure, is
    below this ratio. launch/rules/method.py rejects lists of values that cannot work.
    """

    output_dir: str
    seed: int = 0
    use_cpu: bool = False
    fail_below: float | None = None


@dataclass(frozen=True)
class Column:
    key: str  # key of a row
    title: str  # with the unit
    digits: int | None = None  # number of decimals; None if the column is part of the row's name


@dataclass(frozen=True)
class Table:
    """A benchmark's table. `figure` is the column that is compared with published figures."""

    benchmark: str
    keys: str  # keys of the columns, separated by spaces; columns.yaml has their titles
    figure: str
    higher_is_better: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[Column]:
        return [Column(key, *COLUMNS.get(key, [key])) for key in self.keys.split()]

    def name(self, row: Row) -> str:
        """Return a row's name, made of the values of all columns without decimals."""
        names = [row.get(column.key) for column in self.columns if column.digits is None]
        return " ".join(str(name) for name in names if name is not None)

    def content(self, rows: Sequence[Row], notes: Sequence[str]) -> Row:
        """Return the part of result.json that describes a table. The reports read it."""
        return {
            "columns": [asdict(column) for column in self.columns],
            "figure": self.figure,
            "higher_is_better": self.higher_is_better,
            "rows": list(rows),
            "notes": list(notes),
        }


def device_of(args: SeriesConfig) -> torch.device:
    """Return this rank's device. Raise UserError if there is no GPU."""
    require_gpu(args)
    if args.use_cpu:
        return torch.device("cpu")
    torch.cuda.set_device(device())
    return device()


def require_gpu(args: SeriesConfig) -> None:
    if not args.use_cpu and not torch.cuda.is_available():
        raise UserError(
            "torch does not see a GPU. To run the benchmark's code on a CPU, use smoke=true."
        )


def grid(**axes: Iterable[Any]) -> list[Row]:
    """Return a case for each combination of values; the last axis varies fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def rate(tflops: float, config: DictConfig, dtype: str | None = None) -> Row:
    """Return `tflops`, and its share of the GPU's peak in `dtype` if conf/hardware has one."""
    peak = config.hardware.peak_tflops.get(dtype or config.precision.compute)
    return {"tflops": tflops, "share_of_peak": tflops / peak if peak else None}


def measure(
    config: DictConfig,
    args: SeriesConfig,
    table: Table,
    cases: Iterable[Row],
    work: Callable[[Row], Row],
    complete: Callable[[list[Row]], Row | None] = lambda rows: None,
    skip: Callable[[Row, list[Row]], str | None] = lambda case, rows: None,
) -> dict[str, Any]:
    """Measure the cases, print them next to published figures, and return result.json's content.

    `work` and `skip` are passed to `measure_rows`. `complete` runs after the last case. It may add
    columns and notes, and returns additional keys for result.json. Raise Failed if a figure is
    below the gate or every case failed, and Interrupted after a signal.
    """
    rows = measure_rows(config, args, table, cases, work, skip)
    additional_keys = complete(rows) or {}
    # A smoke run measures the CPU, even if configured for a GPU.
    hardware = "cpu" if config.get("smoke") else config.hardware.name
    rows, notes, below = published.compare(
        rows, table.benchmark, hardware, table.figure, table.higher_is_better, args.fail_below
    )
    notes = [*table.notes, *notes]
    notes += [
        f"{table.name(row)}: {', '.join(row['not_finite'])} became inf or nan."
        for row in rows
        if row.get("not_finite")
    ]
    on_gpu = torch.cuda.is_available() and not args.use_cpu
    content = {
        **additional_keys,
        **table.content(rows, notes),
        "benchmark": table.benchmark,
        "fail_below": args.fail_below,
        "below": below,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
    }
    if is_main_rank():
        show(table, rows, hardware, notes)
    if all(row["error"] for row in rows):
        first = f"{table.name(rows[0])}: {rows[0]['error']}"
        raise Failed(f"all cases failed. The first: {first}", **content)
    if below:
        gate = f"method.args.fail_below={args.fail_below:g}: {len(below)} row(s) below the gate"
        raise Failed(f"{gate}: {'; '.join(below)}", **content)
    return content


def measure_rows(
    config: DictConfig,
    args: SeriesConfig,
    table: Table,
    cases: Iterable[Row],
    work: Callable[[Row], Row],
    skip: Callable[[Row, list[Row]], str | None] = lambda case, rows: None,
) -> list[Row]:
    """Measure the cases that have no row yet or failed, and return a row for each case.

    `work` measures a case and returns its figures; `attempt` turns its errors into rows. `skip`
    takes a case and all earlier rows, and returns a reason not to measure the case, or None. The
    seed is reset before every case. Raise Interrupted after a signal.
    """
    cases = list(cases)
    if not cases:
        raise UserError(f"{table.benchmark}: no case can be measured. {' '.join(table.notes)}")
    published.require(table.benchmark, config.hardware.name, table.figure, args.fail_below, cases)
    path = Path(config.run_dir) / "metrics.jsonl"
    rows = earlier_rows(path, cases)
    # Retry failed rows, because a package or driver may be fixed by now, unless memory ran out.
    pending = [i for i, row in enumerate(rows) if row["error"] not in (None, OUT_OF_MEMORY)]
    for i in pending:
        say(f"retrying {table.name(rows[i])}, which failed: {rows[i]['error']}")
    pending += range(len(rows), len(cases))
    start = time.monotonic() - max((row["time_s"] for row in rows), default=0)

    def add(i: int, figures: Row) -> None:
        rows[i : i + 1] = [{**cases[i], **figures, "time_s": time.monotonic() - start}]

    with profiling.session(config, max(1, len(pending))) as profile:
        for i in pending:
            if any(gather_results(stop_requested)):  # all ranks must stop at the same case
                raise Interrupted(rows=rows)
            if reason := skip(cases[i], rows[:i]):
                figures: Row = {"error": f"not measured: {reason}"}
            else:
                torch.manual_seed(args.seed)
                free_leftovers()
                try:
                    figures = attempt(cases[i], work)
                except RankFailedAlone as failure:  # save the row so that a resumed run skips it
                    add(i, {"error": str(failure) or OUT_OF_MEMORY})
                    write_rows(path, rows, len(cases))
                    give_up(config, f"only this rank failed: {rows[i]['error']}")
            # A signal may have caused this failure, so the resumed run measures the case again.
            failed = figures["error"] is not None
            if any(gather_results(lambda failed=failed: failed and stop_requested())):
                raise Interrupted(rows=rows)
            add(i, figures)
            if is_main_rank():
                write_rows(path, rows, len(cases))
            cells = [(c.title, _cell(rows[i].get(c.key), c.digits)) for c in table.columns]
            words = [f"{title} {cell}" for title, cell in cells if cell]
            say("  ".join([f"{i + 1}/{len(cases)}", *words, figures["error"] or ""]).rstrip())
            profile.step()
    return rows


def attempt(case: Row, work: Callable[[Row], Row]) -> Row:
    """Measure a case, and return its figures with an `error` that is None on success.

    UserError and running out of memory become the `error`. With a single rank, so do RuntimeError
    and OSError. JSON does not allow inf or nan, so these figures become None and their keys are
    listed in `not_finite`.
    """
    try:
        figures = work(case)
    except torch.OutOfMemoryError:
        return {"error": OUT_OF_MEMORY}
    except UserError as failure:
        return {"error": str(failure)}
    except (RuntimeError, OSError) as failure:
        # If only this rank failed, continuing would make it wait for the others forever.
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise
        return {"error": (str(failure).strip() or type(failure).__name__).splitlines()[0]}
    floats = {key: value for key, value in figures.items() if isinstance(value, float)}
    infinite = [key for key, value in floats.items() if not math.isfinite(value)]
    not_finite = {"not_finite": infinite} if infinite else {}
    return {**figures, **dict.fromkeys(infinite), **not_finite, "error": None}


def skip_larger(key: str, *same: str) -> Callable[[Row, list[Row]], str | None]:
    """Return a `skip` function for `measure_rows`.

    It skips a case if a row with a smaller `key` and equal `same` keys ran out of memory.
    """

    def skip(case: Row, rows: list[Row]) -> str | None:
        for row in rows:
            is_alike = all(row[name] == case[name] for name in same)
            if is_alike and row["error"] == OUT_OF_MEMORY and row[key] < case[key]:
                return f"{key} {row[key]} already ran out of memory"
        return None

    return skip


def parse_output(
    argv: Sequence[str],
    parse: Callable[[str], Any],
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Run a program and return its stdout, parsed by `parse`.

    Raise UserError if the program takes longer than `timeout_s` or `parse` returns nothing.
    """
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
        figures = parse(done.stdout)
        last = "".join((done.stderr or done.stdout).strip().splitlines()[-1:]) or "no output"
        reason = f"no figures (exit code {done.returncode}): {last}"
    except subprocess.TimeoutExpired:
        figures, reason = None, f"still running after {timeout_s:g} s"
    if not figures:
        raise UserError(f"{argv[0]}: {reason}")
    return figures


def write_rows(path: Path, rows: Sequence[Row], num_cases: int) -> None:
    """Replace metrics.jsonl atomically, because other ranks read it too."""
    lines = ({"step": i, "num_steps": num_cases, **row} for i, row in enumerate(rows, 1))
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def show(table: Table, rows: Sequence[Row], hardware: str, lines: Sequence[str]) -> None:
    """Print the table, the errors of failed rows, and `lines`."""
    rich_table = RichTable(title=table.benchmark, title_justify="left")
    columns = table.columns
    if any(row.get("published") is not None for row in rows):  # printed with all its digits
        columns += [Column("published", f"published {hardware}"), Column("ratio", "ratio", 2)]
    for column in columns:
        rich_table.add_column(column.title, justify="left" if column.digits is None else "right")
    for row in rows:
        cells = {**row, **({table.figure: "failed"} if row["error"] else {})}
        rich_table.add_row(*(_cell(cells.get(column.key), column.digits) for column in columns))
    console = Console(width=WIDTH)
    console.print(rich_table)
    failures = [f"{table.name(row)}: {row['error']}" for row in rows if row["error"]]
    for line in [*failures, *lines]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def earlier_rows(path: Path, cases: Sequence[Row]) -> list[Row]:
    """Return the rows that an interrupted run has written for the first cases.

    Stop at the first line that a crash truncated or that belongs to another case. That line and all
    later ones are removed from the file, and their cases are measured again.
    """
    rows: list[Row] = []
    lines = read_metrics(path)
    for line, case in zip(lines, cases, strict=False):
        is_row = isinstance(line, dict) and {"error", "time_s"} <= line.keys()
        if not is_row or any(line.get(key) != value for key, value in case.items()):
            break
        rows.append({key: line[key] for key in line if key not in ("step", "num_steps")})
    if is_main_rank() and path.is_file():
        write_rows(path, rows, len(cases))
    if rows:
        say(f"resuming: {len(rows)} of {len(cases)} cases were measured before the interruption")
    return rows


def _cell(value: object, digits: int | None) -> str:
    if value is None:
        return ""
    if digits is None or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.{digits}f}"
