"""Build the tables of one run: benchmark, tuning, data rows, speed, memory and profile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from launch.core import json_files
from launch.core.json_files import is_number
from launch.plan import data_cache
from launch.reports.formats import TITLES, number, percent, ratio
from launch.reports.parts import Block, Cell, Facts, Note, Pre, Table, cell, percent_cell, table
from launch.reports.run_files import Points, Run

WARM_UP = 3  # first logged lines, which are slow because they compile and fill caches
MAX_KERNELS = 25
# Keys that rows of a benchmark may have without an entry in `columns` of result.json.
UNLISTED_COLUMNS = ("published", "published_source", "ratio", "error")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a benchmark or the trials of a tuning run so far, or []."""
    if "rows" in run.result:
        return list(run.result["rows"] or [])
    if run.get("method", "kind") not in ("bench", "tune"):
        return []
    clock = ("step", "num_steps", "time_s")
    return [{k: v for k, v in row.items() if k not in clock} for row in run.metrics.rows]


def logged(run: Run, key: str) -> Points:
    """Return the steps and values of a key; nothing for a benchmark, whose rows are not steps."""
    return ([], []) if rows_of(run) else run.metrics.points(key)


def columns_of(run: Run) -> list[dict[str, Any]]:
    """Return {key, title, digits} of each column; last come columns that are not in result.json."""
    columns, rows = list(run.result.get("columns") or []), rows_of(run)
    listed = [column["key"] for column in columns]
    keys = UNLISTED_COLUMNS if columns else dict.fromkeys(key for row in rows for key in row)
    others = [k for k in keys if k not in listed and any(row.get(k) is not None for row in rows)]
    return [*columns, *({"key": key} for key in others)]


def title_of(column: dict[str, Any]) -> str:
    return str(column.get("title") or column["key"])


def benchmark(run: Run) -> list[Block]:
    """Return the rows of a benchmark and its values below the gate; [] for other runs."""
    if run.get("method", "kind") != "bench" and "benchmark" not in run.result:
        return []
    name = run.result.get("benchmark") or run.get("method", "name")
    place = run.result.get("device") or run.get("hardware", "name") or "this machine"
    gate, below = run.result.get("fail_below"), run.result.get("below") or []
    notes = [Note(f"Below the gate fail_below={gate}: {line}.", "bad") for line in below]
    return [*notes, *_rows(run, f"{name} on {place}")]


def _rows(run: Run, caption: str) -> list[Block]:
    """Return a table of the rows, and the notes of the benchmark or tuning run."""
    rows, columns, gate = rows_of(run), columns_of(run), run.result.get("fail_below")
    if not rows:
        return [Note("No row has been measured.", "warn")]
    marks = []
    for row in rows:
        is_below = is_number(gate) and is_number(row.get("ratio")) and row["ratio"] < gate
        marks.append("bad" if is_below or row.get("error") else "")
    note = ""
    if any(row.get("ratio") is not None for row in rows):
        is_inverse = run.result.get("higher_is_better") is False
        quotient = "published figure / ours" if is_inverse else "our figure / the published one"
        note = f"ratio: {quotient}. Higher is better."
    cells = ({title_of(column): _cell(row, column) for column in columns} for row in rows)
    notes = (Note(str(line)) for line in run.result.get("notes") or [])
    return [table(caption, cells, note, marks), *notes]


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
    """Return a tuning run's gain, overrides, experiment file and trials; [] for other runs."""
    if run.get("method", "kind") != "tune" and "tuning" not in run.result:
        return []
    before, after = (run.result.get(key) or {} for key in ("before", "after"))
    rows = [
        {"figure": str(key), "before": before.get(key), "after": after.get(key)}
        | {"after over before": Cell(ratio(after.get(key), before.get(key), "{:.3g}×"), True)}
        for key in dict.fromkeys([*before, *after])
    ]
    blocks: list[Block] = [table(f"Tuning of {run.result.get('tuning', 'this run')}", rows)]
    if overrides := run.result.get("overrides"):
        blocks.append(Pre("Overrides that apply the result", " ".join(map(str, overrides))))
    if experiment := run.result.get("experiment"):
        blocks.append(Facts({"experiment written": str(experiment)}))
    return [*blocks, *_rows(run, "Trials")]


def data_rows(run: Run) -> list[Block]:
    """Return the number, lengths, truncation and packing of a run's rows, from its data.json."""
    stats = json_files.read_json(run.folder / "data.json")
    return [Pre("Rows", data_cache.describe_rows(stats))] if stats else []


def _median(values: Sequence[float]) -> float:
    """Return the median, without the warm-up if there are more values than twice its length."""
    return statistics.median(values[WARM_UP:] if len(values) > 2 * WARM_UP else values)


def measured(
    run: Run, key: str, statistic: Callable[[Sequence[float]], float] = _median
) -> float | None:
    """Return a statistic of the logged values of a key.

    Without such values, return the value in result.json, or None.
    """
    values = logged(run, key)[1]
    if not values and not rows_of(run) and is_number(run.result.get(key)):
        values = [float(run.result[key])]
    return statistic(values) if values else None


def peak_gb(run: Run) -> float | None:
    """Return the trainers' peak memory in GB."""
    return measured(run, "memory_peak_gb", max)


def step_s(run: Run) -> float | None:
    """Return the median seconds of a step, including saving and logging."""
    rows = [row for row in run.metrics.rows if is_number(row.get("time_s"))]
    seconds = [
        (b["time_s"] - a["time_s"]) / (b["step"] - a["step"])
        for a, b in zip(rows, rows[1:], strict=False)
        if b["step"] > a["step"]
    ]
    return _median(seconds) if seconds else None


def speed(run: Run) -> list[Block]:
    """Return tables of predicted and measured speed, and of the parts of a GRPO step."""
    if run.get("method", "kind") in ("bench", "tune"):
        return []
    planned = run.plan.get("speed") or {}
    rows = []
    for title, key, actual in (
        ("tokens per second", "tokens_per_second", measured(run, "tokens_per_second")),
        ("seconds per step", "step_s", step_s(run)),
    ):
        if actual is not None:
            share = Cell(ratio(actual, planned.get(key)), True)
            rows.append({"": title, "predicted": planned.get(key), "measured": actual})
            rows[-1]["measured of predicted"] = share
    note = f"Measured speeds are medians of the logged steps after the first {WARM_UP}."
    if is_number(mean := run.result.get("tokens_per_second")):
        note += f" The mean of all steps is {number(mean)} tokens/s."
    if planned.get("basis"):
        note += f" The prediction is based on: {planned['basis']}."
    return [table("Speed, predicted and measured", rows, note), step_parts(run)]


def step_parts(run: Run) -> Table:
    """Return a table of how the trainers and the server of GRPO spend the time of a step.

    The values are means over the steps after the warm-up. Medians would be wrong, because a
    generation can serve several steps, but only one includes its time.
    """
    rows, means = run.metrics.rows, {}
    if run.get("method", "name") != "grpo" or not run.metrics.points("train_s")[1]:
        return table("Parts of a step", [])
    previous_steps = [0, *(row["step"] for row in rows)]
    for key in ("step_s", *TITLES["step"], "server_s"):
        # A line has the mean over the steps since the previous line, so weight it by their number.
        lines = [
            (row[key], row["step"] - previous)
            for row, previous in zip(rows, previous_steps, strict=False)
            if is_number(row.get(key))
        ][min(WARM_UP, len(rows) // 3) :]
        total = sum(steps for _, steps in lines)
        means[key] = sum(value * steps for value, steps in lines) / total if total else 0.0
    parts = [("trainers", name, means[key]) for key, name in TITLES["step"].items()]
    note = "Means of a step, measured on the first rank."
    if server := means["server_s"]:
        idle = max(0.0, means["step_s"] - server - means["sync_s"])
        server_parts = {"generation": server, "weight sync": means["sync_s"], "idle": idle}
        parts += [("generation server", *part) for part in server_parts.items()]
        overlap = number(max(0.0, server - means["wait_s"]))
        note += f" {overlap} s of generation overlap with training."
    step = means["step_s"] or 1.0
    cells = (
        {"process": process, "part": part, "seconds": seconds}
        | {"share of the step": percent_cell(seconds / step, bar=True)}
        for process, part, seconds in parts
    )
    return table("Parts of a step", cells, note)


def planned_memory(run: Run) -> dict[str, Any] | None:
    """Return the plan's memory of the trainers, which is comparable to memory_peak_gb."""
    kinds = {p["name"]: p["kind"] for p in run.plan.get("processes") or []}
    others = ("server", "prepare")
    entries = (m for m in run.plan.get("memory") or [] if kinds.get(m["process"]) not in others)
    return next(entries, None)


def memory(run: Run) -> list[Block]:
    """Return tables of each process's predicted memory, with the trainers' measured peak."""
    peak, trainers = peak_gb(run), planned_memory(run)
    parts, rows = [], []
    for entry in run.plan.get("memory") or []:
        process, total, capacity = (entry[key] for key in ("process", "total_gb", "capacity_gb"))
        for name, size in entry["parts_gb"].items():
            share = percent_cell(size / capacity, bar=True)
            gb = Cell(number(round(size, 3)), True)
            parts.append({"process": process, "part": name, "GB": gb, "of capacity": share})
        on_gpu = entry["gpu"] is not None
        # torch's peak does not include `context`, the memory of the driver and of libraries.
        comparable = total - (entry["parts_gb"].get("context", 0.0) if on_gpu else 0.0)
        row = {"process": process, "memory": "GPU" if on_gpu else "host memory"}
        row |= {"predicted GB": round(total, 3), "capacity GB": round(capacity, 3)}
        row["fits"] = Cell("yes") if entry["fits"] else Cell("no", mark="bad")
        if entry is trainers and peak is not None:
            row["measured GB"] = round(peak, 3)
            row["measured of predicted"] = Cell(ratio(peak, comparable), True)
        rows.append(row)
    note = (
        "Measured: on a GPU, the peak of the first rank's allocator, which does not include "
        "`context`; on a CPU, the peak of its process."
    )
    if trainers and trainers.get("moment"):
        note += f" The prediction is for the {trainers['moment']}."
    caption = "Memory of one GPU of each process"
    return [table(caption, rows, note), table("Parts of the predicted memory", parts)]


def profile(run: Run) -> list[Block]:
    """Return tables of the profiled time by kind, kernel and fp32 module, and list the files."""
    folder = run.folder / "profile"
    kernels, fp32 = (
        json_files.read_json(folder / f"{name}.json") or {} for name in ("kernels", "fp32_modules")
    )
    note = f"{kernels.get('steps')} step(s), {cell(kernels.get('time_s')).text} s."
    shares = dict(kernels.get("shares") or {})
    # Hidden communication runs at the same time as kernels whose time is already in the shares.
    if hidden := shares.pop("communication_hidden", 0.0):
        note += f" Communication that overlaps with computation: {percent(hidden)}."
    rows = (
        {"kind": TITLES["shares"].get(key, key), "share": percent_cell(share, bar=True)}
        for key, share in shares.items()
    )
    caption = "Modules that compute in fp32"
    for key, place in (("share", "of the time"), ("products_share", "in matrix products")):
        caption += f", {percent(fp32[key])} {place}" if is_number(fp32.get(key)) else ""
    modules = fp32.get("modules") or []
    blocks: list[Block] = [
        table("Shares of the time", rows, note),
        _by_time("Slowest kernels", "kind calls", (kernels.get("kernels") or [])[:MAX_KERNELS]),
        _by_time(caption, "class what calls", modules),
    ]
    if fp32 and not modules:
        blocks.append(Note("No module computes in fp32 unintentionally."))
    if names := sorted(path.name for path in folder.glob("[!.]*")):
        viewers = (
            "Open trace-*.json.gz in ui.perfetto.dev and memory.pickle in "
            "docs.pytorch.org/memory_viz. Both read the file in the browser."
        )
        blocks.append(Note(f"Files in profile/: {', '.join(names)}. {viewers}"))
    return blocks


def _by_time(caption: str, keys: str, items: list[dict[str, Any]]) -> Table:
    """Return a table of items: name, the given keys, seconds and share of the time."""
    rows = (
        {key: item.get(key) for key in ("name", *keys.split())}
        | {"seconds": item.get("time_s"), "share": percent_cell(item.get("share"), bar=True)}
        for item in items
    )
    return table(caption, rows)
