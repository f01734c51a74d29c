"""Build tables of one run: benchmark rows, tuning, speed, memory, parts of a step, profile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from launch.core import json_files
from launch.reports.parts import (
    Block,
    Cell,
    Facts,
    Note,
    Pre,
    Table,
    cell,
    number,
    percent,
    percent_cell,
    ratio,
)
from launch.reports.run_files import Points, Run, is_number

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
UNNAMED_COLUMNS = ("published", "published_source", "ratio", "error")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a benchmark or trials of a tuning; before its end, those logged so far."""
    if "rows" in run.result:
        return list(run.result["rows"] or [])
    if run.get("method", "kind") not in ("bench", "tune"):
        return []
    clock = ("step", "num_steps", "time_s")
    return [{k: v for k, v in row.items() if k not in clock} for row in run.metrics.rows]


def logged(run: Run, key: str) -> Points:
    """Return steps and values of a training's lines; a benchmark's rows are not a series."""
    return ([], []) if rows_of(run) else run.metrics.points(key)


def columns_of(run: Run) -> list[dict[str, Any]]:
    """Return {key, title, digits} of each column; columns without a title come last."""
    named, rows = list(run.result.get("columns") or []), rows_of(run)
    known = [column["key"] for column in named]
    keys = UNNAMED_COLUMNS if named else dict.fromkeys(key for row in rows for key in row)
    extra = [k for k in keys if k not in known and any(row.get(k) is not None for row in rows)]
    return [*named, *({"key": key} for key in extra)]


def title_of(column: dict[str, Any]) -> str:
    return str(column.get("title") or column["key"])


def is_ours(run: Run, kind: str, key: str) -> bool:
    """Return whether a run is a benchmark or a tuning, by its method or what it has written."""
    return run.get("method", "kind") == kind or key in run.result


def benchmark(run: Run) -> list[Block]:
    if not is_ours(run, "bench", "benchmark"):
        return []
    name = run.result.get("benchmark") or run.get("method", "name")
    place = run.result.get("device") or run.get("hardware", "name") or "this machine"
    gate, below = run.result.get("fail_below"), run.result.get("below") or []
    notes = [Note(f"Below the gate fail_below={gate}: {line}.", "bad") for line in below]
    return [*notes, *_rows(run, f"{name} on {place}")]


def _rows(run: Run, caption: str) -> list[Block]:
    """Return the table of rows, and the notes of the benchmark or tuning."""
    rows, columns, gate = rows_of(run), columns_of(run), run.result.get("fail_below")
    if not rows:
        return [Note("No row has been measured.", "warn")]
    cells, marks = [], []
    for row in rows:
        is_below = is_number(gate) and is_number(row.get("ratio")) and row["ratio"] < gate
        marks.append("bad" if is_below or row.get("error") else "")
        cells.append([_cell(row, column) for column in columns])
    note = ""
    if any(row.get("ratio") is not None for row in rows):
        is_inverse = run.result.get("higher_is_better") is False
        over = "published over ours: more is better" if is_inverse else "ours over published"
        note = f"ratio: {over}."
    table = Table(caption, [title_of(c) for c in columns], cells, marks, note)
    return [table, *(Note(str(line)) for line in run.result.get("notes") or [])]


def _cell(row: dict[str, Any], column: dict[str, Any]) -> Cell:
    key, value = column["key"], row.get(column["key"])
    if key.startswith("share"):
        return percent_cell(value)
    if key == "ratio" and is_number(value):
        return Cell(f"{value:.2f}", True, share=min(1.0, max(0.0, value)))
    if key in ("error", "published_source") and value is None:
        return Cell("")
    return cell(value, column.get("digits"))


def tuning(run: Run) -> list[Block]:
    """Return the blocks of a tuning run: before and after, overrides, experiment file, trials."""
    if not is_ours(run, "tune", "tuning"):
        return []
    before, after = (run.result.get(key) or {} for key in ("before", "after"))
    rows = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        change = f"{new / old:.3g}×" if is_number(old) and is_number(new) and old else ""
        rows.append([str(key), old, new, Cell(change, True)])
    caption = f"Tuning of {run.result.get('tuning', 'this run')}"
    blocks: list[Block] = [Table(caption, ["figure", "before", "after", "after over before"], rows)]
    if overrides := run.result.get("overrides"):
        blocks.append(Pre("Overrides that apply it", " ".join(map(str, overrides))))
    if experiment := run.result.get("experiment"):
        blocks.append(Facts({"experiment written": str(experiment)}))
    return [*blocks, *_rows(run, "Trials")]


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
        [title, predicted, actual, Cell(ratio(actual, predicted), True)]
        for title, (predicted, actual) in compared.items()
        if is_number(predicted) or actual is not None
    ]
    note = f"Measured: medians of the logged steps, the first {WARM_UP} left out."
    if is_number(mean := run.result.get("tokens_per_second")):
        note += f" Over the whole run, its first steps included: {number(mean)} tokens/s."
    if planned.get("basis"):
        note += f" The prediction is based on: {planned['basis']}."
    columns = ["", "predicted", "measured", "measured of predicted"]
    if all(actual is None for _, actual in compared.values()):
        rows = []
    return [Table("Speed, predicted and measured", columns, rows, note=note), step_parts(run)]


def step_parts(run: Run) -> Table:
    """Show where a GRPO step spends its time and, with overlap, where the server does.

    The figures are means over the steps after the warm-up. A median would mislead: if a generation
    serves several steps, one of these is long and the others are short.
    """
    rows, means = run.metrics.rows, {}
    caption, columns = "Parts of a step", ["process", "part", "seconds", "share of the step"]
    if run.get("method", "name") != "grpo" or not run.metrics.points("train_s")[1]:
        return Table(caption, columns, [])
    before = [0, *(row["step"] for row in rows)]  # a line holds the mean since the line before
    for key in ("step_s", *STEP, "server_s"):
        lines = [
            (row[key], row["step"] - last)
            for row, last in zip(rows, before, strict=False)
            if is_number(row.get(key))
        ][min(WARM_UP, len(rows) // 3) :]
        total = sum(steps for _, steps in lines)
        means[key] = sum(value * steps for value, steps in lines) / total if total else 0.0
    parts = [("trainers", name, means[key]) for key, name in STEP.items()]
    note = "Means of a step, measured on the first rank."
    if server := means["server_s"]:
        idle = max(0.0, means["step_s"] - server - means["sync_s"])
        busy = {"generation": server, "weight sync": means["sync_s"], "idle": idle}
        parts += [("generation server", *part) for part in busy.items()]
        hidden = number(max(0.0, server - means["wait_s"]))
        note += f" {hidden} s of generation pass while the trainers train."
    whole = means["step_s"] or 1.0
    cells = [[*part, percent_cell(part[-1] / whole, bar=True)] for part in parts]
    return Table(caption, columns, cells, note=note)


def planned_memory(run: Run) -> dict[str, Any] | None:
    """Return the plan's entry for the trainers, whose memory memory_peak_gb measures."""
    kinds = {p["name"]: p["kind"] for p in run.plan.get("processes") or []}
    others = ("server", "prepare")
    entries = (m for m in run.plan.get("memory") or [] if kinds.get(m["process"]) not in others)
    return next(entries, None)


def memory(run: Run) -> list[Block]:
    """Show the predicted memory of each process, its capacity, and the trainers' measured peak."""
    peak, trainers = peak_gb(run), planned_memory(run)
    parts, rows = [], []
    for entry in run.plan.get("memory") or []:
        process, total, capacity = (entry[key] for key in ("process", "total_gb", "capacity_gb"))
        for name, size in entry["parts_gb"].items():
            share = percent_cell(size / capacity, bar=True)
            parts.append([process, name, Cell(number(round(size, 3)), True), share])
        # torch's peak excludes the memory of the driver and of libraries.
        visible = total
        if entry["gpu"] is not None:
            visible -= entry["parts_gb"].get("context", 0.0)
        actual = peak if entry is trainers else None
        fits = Cell("yes") if entry["fits"] else Cell("no", mark="bad")
        place = "host memory" if entry["gpu"] is None else "GPU"
        rows.append([process, place, round(total, 3), round(capacity, 3), fits])
        rows[-1] += [actual and round(actual, 3), Cell(ratio(actual, visible), True)]
    if not rows and peak is not None:
        measurement = {"measured": f"{number(round(peak, 3))} GB", "predicted": "not in plan.json"}
        return [Facts(measurement)]
    columns = ["process", "memory", "predicted GB", "capacity GB", "fits", "measured GB"]
    note = (
        "Measured: the peak of the first rank's allocator (on a CPU: of its process). On a GPU it "
        "does not include `context`."
    )
    if trainers and trainers.get("moment"):
        note += f" The prediction is that of the {trainers['moment']}."
    caption = "Memory of one GPU of each process"
    return [
        Table(caption, [*columns, "measured of predicted"], rows, note=note),
        Table("Its predicted parts", ["process", "part", "GB", "of capacity"], parts),
    ]


def profile(run: Run) -> list[Block]:
    """Show shares of the time, the slowest kernels, modules that compute in fp32, and the files."""
    folder = run.folder / "profile"
    kernels, fp32 = (
        json_files.read_json(folder / f"{name}.json") or {} for name in ("kernels", "fp32_modules")
    )
    note = f"{kernels.get('steps')} step(s), {cell(kernels.get('time_s')).text} s."
    shares = dict(kernels.get("shares") or {})
    # Hidden communication overlaps kernels that are already counted.
    if hidden := shares.pop("communication_hidden", 0.0):
        note += f" Communication hidden behind them: {percent(hidden)}."
    rows = [[SHARES.get(key, key), percent_cell(share, bar=True)] for key, share in shares.items()]
    blocks: list[Block] = [Table("Shares of the time", ["kind", "share"], rows, note=note)]
    columns = {"kernel": "name", "kind": "kind", "calls": "calls", "seconds": "time_s"}
    slowest = (kernels.get("kernels") or [])[:MOST_KERNELS]
    blocks.append(_by_time("Slowest kernels", columns, slowest))
    caption = "Modules that compute in fp32"
    for key, place in (("share", "of the time"), ("products_share", "in matrix products")):
        caption += f", {percent(fp32[key])} {place}" if is_number(fp32.get(key)) else ""
    columns = {"module": "name", "class": "class", "what": "what", "calls": "calls"}
    modules = fp32.get("modules") or []
    blocks.append(_by_time(caption, columns | {"seconds": "time_s"}, modules))
    if fp32 and not modules:
        blocks.append(Note("No module computes in fp32 unintentionally."))
    names = sorted(path.name for path in folder.glob("[!.]*"))
    if names:
        viewers = (
            "Open trace-*.json.gz in ui.perfetto.dev, memory.pickle in "
            "docs.pytorch.org/memory_viz: both read the file in the browser."
        )
        blocks.append(Note(f"In profile/: {', '.join(names)}. {viewers}"))
    return blocks


def _by_time(caption: str, columns: dict[str, str], items: list[dict[str, Any]]) -> Table:
    """Return a table of items and their shares of the time; `columns` maps titles to keys."""
    rows = [
        [*(item.get(key) for key in columns.values()), percent_cell(item.get("share"), bar=True)]
        for item in items
    ]
    return Table(caption, [*columns, "share"], rows)
