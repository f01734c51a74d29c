"""Tables and bars of one run: benchmark rows beside published ones, tuning, speed and memory beside the plan, a step's parts, a profile."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from launch.files import rundir
from launch.reports.data import Points, Run, is_number, objects, table
from launch.reports.parts import Bar, Bars, Cell, Facts, Note, Notes, Piece, Pre, Table, cell, number, percent

WARM_UP = 3  # first lines that a median leaves out: kernels are compiled and caches filled in them
MOST_KERNELS = 25
SHARES = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "communication_exposed": "communication, exposed",
    "other": "other kernels",
    "idle": "idle",
}
# Keys of metrics.jsonl that sum to step_s, with what a page calls them.
STEP = {"train_s": "training", "generation_s": "generation", "sync_s": "weight sync", "reward_s": "rewards", "wait_s": "waiting"}
# Keys that every row of a benchmark may have, with what they are called where result.json names no column for them.
SAID_OF_ROWS = {"published": "published", "ratio": "ratio", "error": "error"}


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Rows of a benchmark or trials of a tuning; of one that has not ended those that metrics.jsonl has."""
    if "rows" in run.result:
        return objects(run.result["rows"])
    if run.get("method", "kind") not in ("bench", "tune"):
        return []
    return [{k: v for k, v in row.items() if k not in ("step", "num_steps", "time_s")} for row in run.metrics.rows]


def logged(run: Run, key: str) -> Points:
    """Steps and values of a training's lines; none of rows, which are no series."""
    return ([], []) if rows_of(run) else run.metrics.points(key)


def columns_of(run: Run) -> list[dict[str, Any]]:
    """{key, title, digits} of each column; those that rows have and result.json does not name come last."""
    named = [c for c in objects(run.result.get("columns")) if isinstance(c.get("key"), str)]
    rows = rows_of(run)
    known = {c["key"] for c in named}
    keys = SAID_OF_ROWS if named else dict.fromkeys(key for row in rows for key in row if key != "published_source")
    return [*named, *({"key": key} for key in keys if key not in known and any(row.get(key) is not None for row in rows))]


def title_of(column: dict[str, Any]) -> str:
    return str(column.get("title") or SAID_OF_ROWS.get(column["key"]) or column["key"])


def digits_of(column: dict[str, Any]) -> int | None:
    digits = column.get("digits")
    return digits if isinstance(digits, int) and not isinstance(digits, bool) and 0 <= digits <= 12 else None


def benchmark(run: Run) -> list[Any]:
    if run.get("method", "kind") != "bench" and "benchmark" not in run.result:
        return []
    name = run.result.get("benchmark") or run.get("method", "name")
    blocks: list[Any] = _rows(run, f"{name} on {run.result.get('device') or run.get('hardware', 'name') or 'this machine'}")
    below = [str(line) for line in run.result.get("below") or []]
    if below:
        gate = f"{len(below)} row(s) below the gate fail_below={run.result.get('fail_below')}: {'; '.join(below)}."
        blocks.insert(0, Note(gate, "bad"))
    notes = [str(note) for note in run.result.get("notes") or []]
    return [*blocks, *([Notes(notes)] if notes else [])]


def _rows(run: Run, caption: str) -> list[Any]:
    """The table of rows, with the sources of published figures numbered under it."""
    rows, columns = rows_of(run), columns_of(run)
    if not rows:
        return [Note("No row has been measured.", "warn")]
    sources = list(dict.fromkeys(str(row["published_source"]) for row in rows if row.get("published_source")))
    gate = run.result.get("fail_below")
    largest = max([1.0, *(row["ratio"] for row in rows if is_number(row.get("ratio")))])
    shown, marks = [], []
    for row in rows:
        is_below = is_number(gate) and is_number(row.get("ratio")) and row["ratio"] < gate
        marks.append("bad" if is_below or row.get("error") else "")
        shown.append([_cell(row, column, sources, largest, is_below) for column in columns])
    higher = "" if run.result.get("higher_is_better") is not False else " (published over ours: more is better)"
    ratio = [f"ratio: ours over published{higher}."] if any(row.get("ratio") is not None for row in rows) else []
    note = " ".join([*ratio, *(f"[{n}] {source}" for n, source in enumerate(sources, start=1))])
    return [Table(caption, [title_of(c) for c in columns], shown, marks, note.replace("ours over published (published", "(published"))]


def _cell(row: dict[str, Any], column: dict[str, Any], sources: Sequence[str], largest: float, is_below: bool) -> Cell:
    key, value = column["key"], row.get(column["key"])
    if key == "error":
        return Cell(str(value) if value else "", mark="bad" if value else "")
    if key == "published" and is_number(value):
        source = row.get("published_source")
        mark = f" [{sources.index(str(source)) + 1}]" if source else ""
        return Cell(number(value, digits_of(column)) + mark, number=True)
    if key == "ratio" and is_number(value):
        return Cell(f"{value:.2f}" + (" below the gate" if is_below else ""), True, "bad" if is_below else "", max(0.0, value) / largest)
    if key.startswith("share") and is_number(value):
        return Cell(percent(value), number=True)
    return cell(value, digits_of(column))


def tuning(run: Run) -> list[Any]:
    """Before, after, the overrides that apply it, the experiment that was written, the trials."""
    if run.get("method", "kind") != "tune" and "tuning" not in run.result:
        return []
    before, after = (run.result.get(key) or {} for key in ("before", "after"))
    rows = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        change = f"{new / old:.3g}×" if is_number(old) and is_number(new) and old else ""
        rows.append([Cell(key), cell(old), cell(new), Cell(change, number=bool(change))])
    blocks: list[Any] = (
        [Table(f"Tuning of {run.result.get('tuning', 'this run')}", ["figure", "before", "after", "after over before"], rows)]
        if rows
        else []
    )
    if run.result.get("overrides"):
        blocks.append(Pre("The overrides that apply it", " ".join(map(str, run.result["overrides"]))))
    if run.result.get("experiment"):
        blocks.append(Facts({"experiment that was written": str(run.result["experiment"])}, code=True))
    return [*blocks, *_rows(run, "Trials"), *([Notes([str(n) for n in run.result["notes"]])] if run.result.get("notes") else [])]


def measured(run: Run, key: str) -> float | None:
    """The median of the logged steps after the warm-up; where none logs it what result.json says."""
    values = logged(run, key)[1]
    if values:
        return statistics.median(values[WARM_UP:] if len(values) > 2 * WARM_UP else values)
    found = None if rows_of(run) else run.result.get(key)
    return float(found) if is_number(found) else None


def step_s(run: Run) -> float | None:
    """Seconds from one step to the next, saving and logging included: the median of what the lines' clock says."""
    rows = [row for row in run.metrics.rows if is_number(row.get("time_s"))]
    apart = [(b["time_s"] - a["time_s"]) / (b["step"] - a["step"]) for a, b in zip(rows, rows[1:], strict=False) if b["step"] > a["step"]]
    return statistics.median(apart[WARM_UP:] if len(apart) > 2 * WARM_UP else apart) if apart else None


def speed(run: Run) -> list[Any]:
    """Predicted beside measured, and where the time of a step goes."""
    if run.get("method", "kind") in ("bench", "tune"):
        return []
    planned = run.plan.get("speed") or {}
    rows = []
    for title, was, found in (
        ("tokens per second", planned.get("tokens_per_second"), measured(run, "tokens_per_second")),
        ("seconds a step", planned.get("step_s"), step_s(run)),
    ):
        if is_number(was) or found is not None:
            ratio = percent(found / was) if is_number(was) and was and found is not None else ""
            rows.append([Cell(title), cell(was), cell(found), Cell(ratio, number=bool(ratio))])
    mean = run.result.get("tokens_per_second")
    over = f" Over the whole run, its first steps included: {number(mean)} tokens/s." if is_number(mean) else ""
    basis = f" The prediction rests on: {planned['basis']}." if planned.get("basis") else ""
    note = f"Measured: medians of the logged steps, the first {WARM_UP} left out.{over}{basis}"
    has_figures = any(row[2].number for row in rows)
    blocks: list[Any] = (
        [Table("Speed, predicted and measured", ["", "predicted", "measured", "measured of predicted"], rows, note=note)]
        if has_figures
        else []
    )
    return [*blocks, *step_parts(run)]


def step_parts(run: Run) -> list[Any]:
    """Return where the seconds of GRPO's step go; with overlap also what the server does meanwhile."""
    if run.get("method", "name") != "grpo" or not run.metrics.points("train_s")[1]:
        return []
    step = {key: _mean_of_steps(run, key) for key in ("step_s", *STEP, "server_s")}
    trainers = [Piece(name, step[key], idle=key == "wait_s") for key, name in STEP.items()]
    bars, note = [Bar("Trainers", trainers, step["step_s"], "s")], "Means of a step, measured on the first rank."
    if step["server_s"]:
        idle = max(0.0, step["step_s"] - step["server_s"] - step["sync_s"])
        server = [Piece("generation", step["server_s"]), Piece("weight sync", step["sync_s"]), Piece("idle", idle, idle=True)]
        bars.append(Bar("Generation server", server, max(step["step_s"], sum(piece.value for piece in server)), "s"))
        note += f" {number(max(0.0, step['server_s'] - step['wait_s']))} s of generation pass while the trainers train."
    return [Bars(bars, note)]


def _mean_of_steps(run: Run, key: str) -> float:
    """Return the mean over the steps after the warm-up: a line has the mean of those since the line before.

    Not the median: where a generation serves several steps, one of these is long and the others are short.
    """
    rows = run.metrics.rows
    warm_up = min(WARM_UP, len(rows) // 3)
    before = [0, *(row["step"] for row in rows)]
    lines = [(row[key], row["step"] - last) for row, last in zip(rows, before, strict=False) if is_number(row.get(key))][warm_up:]
    total = sum(steps for _, steps in lines)
    return sum(value * steps for value, steps in lines) / total if total else 0.0


def planned_memory(run: Run) -> dict[str, Any] | None:
    """The plan's entry of what trains: that is what memory_peak_gb is measured in."""
    kinds = {str(p.get("name")): str(p.get("kind")) for p in objects(run.plan.get("processes"))}
    entries = [m for m in objects(run.plan.get("memory")) if is_number(m.get("total_gb"))]
    return next((m for m in entries if kinds.get(str(m.get("process"))) not in ("server", "prepare")), None)


def peak_gb(run: Run) -> float | None:
    values = logged(run, "memory_peak_gb")[1]
    found = max(values) if values else None if rows_of(run) else run.result.get("memory_peak_gb")
    return float(found) if is_number(found) else None


def memory(run: Run) -> list[Any]:
    """Each process's parts against the capacity; the trainer's with what was measured."""
    entries = [m for m in objects(run.plan.get("memory")) if is_number(m.get("total_gb"))]
    peak, trained = peak_gb(run), planned_memory(run)
    bars, rows = [], []
    for entry in entries:
        parts = {str(k): v for k, v in table(entry.get("parts_gb")).items() if is_number(v)}
        capacity = entry["capacity_gb"] if is_number(entry.get("capacity_gb")) else entry["total_gb"]
        found = peak if entry is trained else None
        markers = {"measured": found} if found is not None else {}
        whole = max(capacity, entry["total_gb"], found or 0.0) or 1.0
        title = f"{entry.get('process')}, {'GPU' if entry.get('gpu') is not None else 'host memory'}, of {number(round(capacity, 1))} GB"
        bars.append(Bar(title, [Piece(name, size) for name, size in parts.items()], whole, "GB", markers))
        # torch's peak does not see what the driver and the libraries hold.
        seen = entry["total_gb"] - (parts.get("context", 0.0) if entry.get("gpu") is not None else 0.0)
        ratio = percent(found / seen) if found is not None and seen else ""
        fits = "yes" if entry.get("fits") else "no"
        cells = [cell(round(entry["total_gb"], 3)), cell(round(capacity, 3)), Cell(fits, mark="" if entry.get("fits") else "bad")]
        rows.append([Cell(str(entry.get("process"))), *cells, cell(None if found is None else round(found, 3)), Cell(ratio, bool(ratio))])
    if not rows:
        return [Facts({"measured": f"{number(round(peak, 3))} GB", "predicted": "no plan.json says"})] if peak is not None else []
    columns = ["process", "predicted GB", "capacity GB", "fits", "measured GB", "measured of predicted"]
    moment = f" The prediction is that of the {trained['moment']}." if trained and trained.get("moment") else ""
    note = "Measured: the most that the first rank's allocator held (on a CPU: that its process held); `context` is outside of it on a GPU."
    return [Bars(bars), Table("Memory of one GPU of each process", columns, rows, note=note + moment)]


def profile(run: Run) -> list[Any]:
    """Shares of the time, the kernels that take most of it, modules that compute in fp32, and where the traces are."""
    folder = run.folder / "profile"
    contents = {name: rundir.read_json(folder / f"{name}.json") for name in ("kernels", "fp32_modules", "memory")}
    blocks: list[Any] = [
        Note(f"profile/{name}.json cannot be read as a JSON object.", "warn")
        for name, content in contents.items()
        if content is None and (folder / f"{name}.json").exists()
    ]
    kernels, fp32, held = (content or {} for content in contents.values())
    shares = {k: v for k, v in table(kernels.get("shares")).items() if is_number(v)}
    alone = {k: v for k, v in shares.items() if k != "communication_hidden"}  # it runs beside others, which are counted
    if alone:
        pieces = [Piece(SHARES.get(k, k), 100 * v, idle=k == "idle") for k, v in alone.items() if v > 0]
        hidden = (
            f" Communication hidden behind them: {percent(shares['communication_hidden'])}." if shares.get("communication_hidden") else ""
        )
        window = (
            f"{number(kernels['steps'])} step(s), {number(kernels['time_s'])} s."
            if is_number(kernels.get("time_s")) and is_number(kernels.get("steps"))
            else ""
        )
        blocks.append(Bars([Bar("Shares of the time", pieces, max(100.0, 100 * sum(alone.values())), "%")], window + hidden))
    found = objects(kernels.get("kernels"))[:MOST_KERNELS]
    if found:
        rows = [[Cell(str(k.get("name"))), cell(k.get("kind")), cell(k.get("calls")), cell(k.get("time_s")), _share(k)] for k in found]
        blocks.append(Table("Kernels that take most", ["kernel", "kind", "calls", "seconds", "share"], rows))
    modules = objects(fp32.get("modules"))
    if modules:
        rows = [
            [Cell(str(m.get("name"))), cell(m.get("class")), cell(m.get("what")), cell(m.get("calls")), cell(m.get("time_s")), _share(m)]
            for m in modules
        ]
        share = f", {percent(fp32['share'])} of the time" if is_number(fp32.get("share")) else ""
        share += f", {percent(fp32['products_share'])} in matrix products" if is_number(fp32.get("products_share")) else ""
        blocks.append(Table(f"Modules that compute in fp32{share}", ["module", "class", "what", "calls", "seconds", "share"], rows))
    elif fp32:
        blocks.append(Note("No module computes in fp32 that was not told to."))
    if held:
        blocks.append(Pre("profile/memory.json", json.dumps(held, indent=1)[:20_000], folded=True))
    files = sorted(f.name for f in folder.iterdir() if not f.name.startswith(".")) if folder.is_dir() else []
    if files:
        how = "Open trace-*.json.gz in ui.perfetto.dev, memory.pickle in docs.pytorch.org/memory_viz: both read the file in the browser."
        blocks.append(Note(f"In profile/: {', '.join(files)}. {how}"))
    return blocks


def _share(row: dict[str, Any]) -> Cell:
    share = row.get("share")
    return Cell(percent(share), number=True, share=min(1.0, max(0.0, share))) if is_number(share) else cell(None)
