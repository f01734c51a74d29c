"""Build tables and bars of one run: benchmark rows, tuning, speed, memory, step parts, profile."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from launch.core import json_files
from launch.reports.data import Points, Run, is_number, mapping, objects
from launch.reports.parts import (
    Bar,
    Bars,
    Block,
    Cell,
    Facts,
    Note,
    Notes,
    Piece,
    Pre,
    Table,
    cell,
    number,
    number_cell,
    percent,
    percent_cell,
    ratio,
)

WARM_UP = 3  # first lines, which a median leaves out: they compile and fill caches
MOST_KERNELS = 25
SHARES = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "communication_exposed": "communication, exposed",
    "other": "other kernels",
    "idle": "idle",
}
# Keys of metrics.jsonl that sum to step_s, and their names on a page.
STEP = {
    "train_s": "training",
    "generation_s": "generation",
    "sync_s": "weight sync",
    "reward_s": "rewards",
    "wait_s": "waiting",
}
# Keys that rows of a benchmark may have without a column in result.json.
UNNAMED_COLUMNS = ("published", "ratio", "error")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a benchmark or trials of a tuning; before its end, those logged so far."""
    if "rows" in run.result:
        return objects(run.result["rows"])
    if run.get("method", "kind") not in ("bench", "tune"):
        return []
    clock = ("step", "num_steps", "time_s")
    return [{k: v for k, v in row.items() if k not in clock} for row in run.metrics.rows]


def logged(run: Run, key: str) -> Points:
    """Return steps and values of a training's lines; a benchmark's rows are not a series."""
    return ([], []) if rows_of(run) else run.metrics.points(key)


def columns_of(run: Run) -> list[dict[str, Any]]:
    """Return {key, title, digits} of each column; columns without a title come last."""
    named = [c for c in objects(run.result.get("columns")) if isinstance(c.get("key"), str)]
    rows = rows_of(run)
    known = {"published_source", *(c["key"] for c in named)}
    keys = UNNAMED_COLUMNS if named else dict.fromkeys(key for row in rows for key in row)
    extra = [k for k in keys if k not in known and any(row.get(k) is not None for row in rows)]
    return [*named, *({"key": key} for key in extra)]


def title_of(column: dict[str, Any]) -> str:
    return str(column.get("title") or column["key"])


def digits_of(column: dict[str, Any]) -> int | None:
    digits = column.get("digits")
    return digits if type(digits) is int and 0 <= digits <= 12 else None


def benchmark(run: Run) -> list[Block]:
    if run.get("method", "kind") != "bench" and "benchmark" not in run.result:
        return []
    name = run.result.get("benchmark") or run.get("method", "name")
    place = run.result.get("device") or run.get("hardware", "name") or "this machine"
    blocks: list[Block] = [_rows(run, f"{name} on {place}"), _notes(run)]
    below = [str(line) for line in run.result.get("below") or []]
    if below:
        gate = f"{len(below)} row(s) below the gate fail_below={run.result.get('fail_below')}"
        blocks.insert(0, Note(f"{gate}: {'; '.join(below)}.", "bad"))
    return blocks


def _notes(run: Run) -> Notes:
    return Notes([str(note) for note in run.result.get("notes") or []])


def _rows(run: Run, caption: str) -> Block:
    """Return the table of rows, with the numbered sources of published figures under it."""
    rows, columns = rows_of(run), columns_of(run)
    if not rows:
        return Note("No row has been measured.", "warn")
    published = [str(row["published_source"]) for row in rows if row.get("published_source")]
    sources = list(dict.fromkeys(published))
    gate = run.result.get("fail_below")
    ratios = [row["ratio"] for row in rows if is_number(row.get("ratio"))]
    largest = max([1.0, *ratios])
    cells, marks = [], []
    for row in rows:
        is_below = is_number(gate) and is_number(row.get("ratio")) and row["ratio"] < gate
        marks.append("bad" if is_below or row.get("error") else "")
        cells.append([_cell(row, column, sources, largest, is_below) for column in columns])
    note = [f"[{n}] {source}" for n, source in enumerate(sources, start=1)]
    if any(row.get("ratio") is not None for row in rows):
        is_inverse = run.result.get("higher_is_better") is False
        over = "published over ours: more is better" if is_inverse else "ours over published"
        note.insert(0, f"ratio: {over}.")
    return Table(caption, [title_of(c) for c in columns], cells, marks, " ".join(note))


def _cell(
    row: dict[str, Any],
    column: dict[str, Any],
    sources: Sequence[str],
    largest: float,
    is_below: bool,
) -> Cell:
    key, value = column["key"], row.get(column["key"])
    if key == "error":
        return Cell(str(value or ""), mark="bad" if value else "")
    if key == "published" and is_number(value):
        source = row.get("published_source")
        mark = f" [{sources.index(str(source)) + 1}]" if source else ""
        return number_cell(number(value, digits_of(column)) + mark)
    if key == "ratio" and is_number(value):
        verdict, mark = (" below the gate", "bad") if is_below else ("", "")
        return Cell(f"{value:.2f}{verdict}", True, mark, max(0.0, value) / largest)
    if key.startswith("share") and is_number(value):
        return percent_cell(value)
    return cell(value, digits_of(column))


def tuning(run: Run) -> list[Block]:
    """Return the blocks of a tuning run: before and after, overrides, experiment file, trials."""
    if run.get("method", "kind") != "tune" and "tuning" not in run.result:
        return []
    before, after = (run.result.get(key) or {} for key in ("before", "after"))
    rows = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        change = f"{new / old:.3g}×" if is_number(old) and is_number(new) and old else ""
        rows.append([str(key), old, new, number_cell(change)])
    caption = f"Tuning of {run.result.get('tuning', 'this run')}"
    blocks: list[Block] = [Table(caption, ["figure", "before", "after", "after over before"], rows)]
    if overrides := run.result.get("overrides"):
        blocks.append(Pre("Overrides that apply it", " ".join(map(str, overrides))))
    if experiment := run.result.get("experiment"):
        blocks.append(Facts({"experiment written": str(experiment)}, code=True))
    return [*blocks, _rows(run, "Trials"), _notes(run)]


def _median(values: Sequence[float]) -> float:
    """Return the median, without the warm-up if there are enough values."""
    return statistics.median(values[WARM_UP:] if len(values) > 2 * WARM_UP else values)


def measured(
    run: Run, key: str, statistic: Callable[[Sequence[float]], float] = _median
) -> float | None:
    """Return a statistic of the logged steps; else the value in result.json; else None."""
    values = logged(run, key)[1]
    if not values and not rows_of(run) and is_number(run.result.get(key)):
        values = [float(run.result[key])]
    return statistic(values) if values else None


def peak_gb(run: Run) -> float | None:
    return measured(run, "memory_peak_gb", max)


def step_s(run: Run) -> float | None:
    """Return the median seconds from one step to the next, including saving and logging."""
    rows = [row for row in run.metrics.rows if is_number(row.get("time_s"))]
    seconds = [
        (b["time_s"] - a["time_s"]) / (b["step"] - a["step"])
        for a, b in zip(rows, rows[1:], strict=False)
        if b["step"] > a["step"]
    ]
    return _median(seconds) if seconds else None


def speed(run: Run) -> list[Block]:
    """Compare predicted and measured speed, and show where the time of a step goes."""
    if run.get("method", "kind") in ("bench", "tune"):
        return []
    planned = run.plan.get("speed") or {}
    compared = {
        "tokens per second": (planned.get("tokens_per_second"), measured(run, "tokens_per_second")),
        "seconds a step": (planned.get("step_s"), step_s(run)),
    }
    rows = [
        [title, predicted, actual, number_cell(ratio(actual, predicted))]
        for title, (predicted, actual) in compared.items()
        if is_number(predicted) or actual is not None
    ]
    note = f"Measured: medians of the logged steps, the first {WARM_UP} left out."
    if is_number(mean := run.result.get("tokens_per_second")):
        note += f" Over the whole run, its first steps included: {number(mean)} tokens/s."
    if planned.get("basis"):
        note += f" The prediction is based on: {planned['basis']}."
    columns = ["", "predicted", "measured", "measured of predicted"]
    has_measured = any(actual is not None for _, actual in compared.values())
    shown = rows if has_measured else []
    return [Table("Speed, predicted and measured", columns, shown, note=note), step_parts(run)]


def step_parts(run: Run) -> Bars:
    """Return bars of where a GRPO step spends its time and, with overlap, where the server does."""
    if run.get("method", "name") != "grpo" or not run.metrics.points("train_s")[1]:
        return Bars([])
    step = {key: _mean_of_steps(run, key) for key in ("step_s", *STEP, "server_s")}
    trainers = [Piece(name, step[key], idle=key == "wait_s") for key, name in STEP.items()]
    bars = [Bar("Trainers", trainers, step["step_s"], "s")]
    note = "Means of a step, measured on the first rank."
    if step["server_s"]:
        idle = max(0.0, step["step_s"] - step["server_s"] - step["sync_s"])
        server = [
            Piece("generation", step["server_s"]),
            Piece("weight sync", step["sync_s"]),
            Piece("idle", idle, idle=True),
        ]
        whole = max(step["step_s"], sum(piece.value for piece in server))
        bars.append(Bar("Generation server", server, whole, "s"))
        hidden = number(max(0.0, step["server_s"] - step["wait_s"]))
        note += f" {hidden} s of generation pass while the trainers train."
    return Bars(bars, note)


def _mean_of_steps(run: Run, key: str) -> float:
    """Return the mean over the steps after the warm-up.

    A line holds the mean of the steps since the line before. A median would mislead: if a
    generation serves several steps, one of these is long and the others are short.
    """
    rows = run.metrics.rows
    warm_up = min(WARM_UP, len(rows) // 3)
    before = [0, *(row["step"] for row in rows)]
    lines = [
        (row[key], row["step"] - last)
        for row, last in zip(rows, before, strict=False)
        if is_number(row.get(key))
    ][warm_up:]
    total = sum(steps for _, steps in lines)
    return sum(value * steps for value, steps in lines) / total if total else 0.0


def _memory_entries(run: Run) -> list[dict[str, Any]]:
    return [m for m in objects(run.plan.get("memory")) if is_number(m.get("total_gb"))]


def planned_memory(run: Run) -> dict[str, Any] | None:
    """Return the plan's entry for the trainers, whose memory memory_peak_gb measures."""
    kinds = {str(p.get("name")): str(p.get("kind")) for p in objects(run.plan.get("processes"))}
    for entry in _memory_entries(run):
        if kinds.get(str(entry.get("process"))) not in ("server", "prepare"):
            return entry
    return None


def memory(run: Run) -> list[Block]:
    """Show the predicted memory of each process, its capacity, and the trainers' measured peak."""
    peak, trainers = peak_gb(run), planned_memory(run)
    bars, rows = [], []
    for entry in _memory_entries(run):
        total, on_gpu = entry["total_gb"], entry.get("gpu") is not None
        parts = {str(k): v for k, v in mapping(entry.get("parts_gb")).items() if is_number(v)}
        capacity = entry["capacity_gb"] if is_number(entry.get("capacity_gb")) else total
        actual = peak if entry is trainers else None
        place = "GPU" if on_gpu else "host memory"
        title = f"{entry.get('process')}, {place}, of {number(round(capacity, 1))} GB"
        pieces = [Piece(name, size) for name, size in parts.items()]
        markers = {} if actual is None else {"measured": actual}
        whole = max(capacity, total, actual or 0.0) or 1.0
        bars.append(Bar(title, pieces, whole, "GB", markers))
        # torch's peak excludes the memory of the driver and of libraries.
        visible = total - (parts.get("context", 0.0) if on_gpu else 0.0)
        rows.append(
            [
                str(entry.get("process")),
                round(total, 3),
                round(capacity, 3),
                Cell("yes") if entry.get("fits") else Cell("no", mark="bad"),
                None if actual is None else round(actual, 3),
                number_cell(ratio(actual, visible)),
            ]
        )
    if not rows and peak is not None:
        measurement = {"measured": f"{number(round(peak, 3))} GB", "predicted": "not in plan.json"}
        return [Facts(measurement)]
    columns = ["process", "predicted GB", "capacity GB", "fits", "measured GB"]
    note = (
        "Measured: the peak of the first rank's allocator (on a CPU: of its process). On a GPU it "
        "does not include `context`."
    )
    if trainers and trainers.get("moment"):
        note += f" The prediction is that of the {trainers['moment']}."
    caption = "Memory of one GPU of each process"
    return [Bars(bars), Table(caption, [*columns, "measured of predicted"], rows, note=note)]


def profile(run: Run) -> list[Block]:
    """Show shares of the time, the slowest kernels, modules that compute in fp32, and the files."""
    folder = run.folder / "profile"
    blocks: list[Block] = []
    contents = {}
    for name in ("kernels", "fp32_modules", "memory"):
        content = json_files.read_json(folder / f"{name}.json")
        if content is None and (folder / f"{name}.json").exists():
            blocks.append(Note(f"profile/{name}.json cannot be read as a JSON object.", "warn"))
        contents[name] = content or {}
    kernels, fp32 = contents["kernels"], contents["fp32_modules"]
    blocks += _time_shares(kernels)
    columns = {"kernel": "name", "kind": "kind", "calls": "calls", "seconds": "time_s"}
    slowest = objects(kernels.get("kernels"))[:MOST_KERNELS]
    blocks.append(_by_time("Slowest kernels", columns, slowest))
    modules = objects(fp32.get("modules"))
    caption = "Modules that compute in fp32"
    if is_number(fp32.get("share")):
        caption += f", {percent(fp32['share'])} of the time"
    if is_number(fp32.get("products_share")):
        caption += f", {percent(fp32['products_share'])} in matrix products"
    columns = {"module": "name", "class": "class", "what": "what", "calls": "calls"}
    blocks.append(_by_time(caption, columns | {"seconds": "time_s"}, modules))
    if fp32 and not modules:
        blocks.append(Note("No module computes in fp32 unintentionally."))
    if memory_json := contents["memory"]:
        text = json.dumps(memory_json, indent=1)[:20_000]
        blocks.append(Pre("profile/memory.json", text, folded=True))
    paths = folder.iterdir() if folder.is_dir() else []
    names = sorted(path.name for path in paths if not path.name.startswith("."))
    if names:
        viewers = (
            "Open trace-*.json.gz in ui.perfetto.dev, memory.pickle in "
            "docs.pytorch.org/memory_viz: both read the file in the browser."
        )
        blocks.append(Note(f"In profile/: {', '.join(names)}. {viewers}"))
    return blocks


def _time_shares(kernels: dict[str, Any]) -> list[Block]:
    shares = {k: v for k, v in mapping(kernels.get("shares")).items() if is_number(v)}
    # Hidden communication overlaps kernels that are already counted.
    hidden = shares.pop("communication_hidden", 0.0)
    if not shares:
        return []
    pieces = [Piece(SHARES.get(k, k), 100 * v, k == "idle") for k, v in shares.items() if v > 0]
    whole = max(100.0, 100 * sum(shares.values()))
    note = ""
    if is_number(kernels.get("time_s")) and is_number(kernels.get("steps")):
        note = f"{number(kernels['steps'])} step(s), {number(kernels['time_s'])} s."
    if hidden:
        note += f" Communication hidden behind them: {percent(hidden)}."
    return [Bars([Bar("Shares of the time", pieces, whole, "%")], note)]


def _by_time(caption: str, columns: dict[str, str], items: list[dict[str, Any]]) -> Table:
    """Return a table of items and their shares of the time; `columns` maps titles to keys."""
    rows = []
    for item in items:
        share = item.get("share")
        bar = min(1.0, max(0.0, share)) if is_number(share) else None
        share_cell = Cell(percent_cell(share).text, is_number(share), share=bar)
        rows.append([*(item.get(key) for key in columns.values()), share_cell])
    return Table(caption, [*columns, "share"], rows)
