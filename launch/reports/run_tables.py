"""Build tables of one run: benchmark rows, tuning, data rows, speed, memory, profile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from launch.core import json_files
from launch.plan import data_cache
from launch.reports.parts import (
    TITLES,
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
    table,
)
from launch.reports.run_files import Points, Run, is_number

WARM_UP = 3  # first lines, which a median leaves out: they compile and fill caches
MOST_KERNELS = 25
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
    columns, rows = list(run.result.get("columns") or []), rows_of(run)
    known = [column["key"] for column in columns]
    keys = UNNAMED_COLUMNS if columns else dict.fromkeys(key for row in rows for key in row)
    extra = [k for k in keys if k not in known and any(row.get(k) is not None for row in rows)]
    return [*columns, *({"key": key} for key in extra)]


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
    marks = []
    for row in rows:
        is_below = is_number(gate) and is_number(row.get("ratio")) and row["ratio"] < gate
        marks.append("bad" if is_below or row.get("error") else "")
    note = ""
    if any(row.get("ratio") is not None for row in rows):
        is_inverse = run.result.get("higher_is_better") is False
        over = "published over ours: more is better" if is_inverse else "ours over published"
        note = f"ratio: {over}."
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
    """Return the blocks of a tuning run: before and after, overrides, experiment file, trials."""
    if not is_ours(run, "tune", "tuning"):
        return []
    before, after = (run.result.get(key) or {} for key in ("before", "after"))
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        change = f"{new / old:.3g}×" if is_number(old) and is_number(new) and old else ""
        rows.append({"figure": str(key), "before": old, "after": new})
        rows[-1]["after over before"] = Cell(change, True)
    blocks: list[Block] = [table(f"Tuning of {run.result.get('tuning', 'this run')}", rows)]
    if overrides := run.result.get("overrides"):
        blocks.append(Pre("Overrides that apply it", " ".join(map(str, overrides))))
    if experiment := run.result.get("experiment"):
        blocks.append(Facts({"experiment written": str(experiment)}))
    return [*blocks, *_rows(run, "Trials")]


def data_rows(run: Run) -> list[Block]:
    """Show how many rows a run trained on, their lengths, cuts and packing, from its data.json."""
    statistics_ = json_files.read_json(run.folder / "data.json")
    return [Pre("Rows", data_cache.describe_rows(statistics_))] if statistics_ else []


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
    rows = []
    for title, key, actual in (
        ("tokens per second", "tokens_per_second", measured(run, "tokens_per_second")),
        ("seconds per step", "step_s", step_s(run)),
    ):
        if actual is not None:
            share = Cell(ratio(actual, planned.get(key)), True)
            rows.append({"": title, "predicted": planned.get(key), "measured": actual})
            rows[-1]["measured of predicted"] = share
    note = f"Measured: medians of the logged steps, the first {WARM_UP} left out."
    if is_number(mean := run.result.get("tokens_per_second")):
        note += f" Over the whole run, its first steps included: {number(mean)} tokens/s."
    if planned.get("basis"):
        note += f" The prediction is based on: {planned['basis']}."
    return [table("Speed, predicted and measured", rows, note), step_parts(run)]


def step_parts(run: Run) -> Table:
    """Show where a GRPO step spends its time and, with overlap, where the server does.

    The figures are means over the steps after the warm-up. A median would mislead: if a generation
    serves several steps, one of these is long and the others are short.
    """
    rows, means = run.metrics.rows, {}
    if run.get("method", "name") != "grpo" or not run.metrics.points("train_s")[1]:
        return table("Parts of a step", [])
    before = [0, *(row["step"] for row in rows)]  # a line holds the mean since the line before
    for key in ("step_s", *TITLES["step"], "server_s"):
        lines = [
            (row[key], row["step"] - last)
            for row, last in zip(rows, before, strict=False)
            if is_number(row.get(key))
        ][min(WARM_UP, len(rows) // 3) :]
        total = sum(steps for _, steps in lines)
        means[key] = sum(value * steps for value, steps in lines) / total if total else 0.0
    parts = [("trainers", name, means[key]) for key, name in TITLES["step"].items()]
    note = "Means of a step, measured on the first rank."
    if server := means["server_s"]:
        idle = max(0.0, means["step_s"] - server - means["sync_s"])
        busy = {"generation": server, "weight sync": means["sync_s"], "idle": idle}
        parts += [("generation server", *part) for part in busy.items()]
        hidden = number(max(0.0, server - means["wait_s"]))
        note += f" {hidden} s of generation pass while the trainers train."
    whole = means["step_s"] or 1.0
    cells = (
        {"process": process, "part": part, "seconds": seconds}
        | {"share of the step": percent_cell(seconds / whole, bar=True)}
        for process, part, seconds in parts
    )
    return table("Parts of a step", cells, note)


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
            gb = Cell(number(round(size, 3)), True)
            parts.append({"process": process, "part": name, "GB": gb, "of capacity": share})
        # torch's peak excludes the memory of the driver and of libraries.
        on_gpu = entry["gpu"] is not None
        visible = total - (entry["parts_gb"].get("context", 0.0) if on_gpu else 0.0)
        row = {"process": process, "memory": "GPU" if on_gpu else "host memory"}
        row |= {"predicted GB": round(total, 3), "capacity GB": round(capacity, 3)}
        row["fits"] = Cell("yes") if entry["fits"] else Cell("no", mark="bad")
        if entry is trainers and peak is not None:
            row["measured GB"] = round(peak, 3)
            row["measured of predicted"] = Cell(ratio(peak, visible), True)
        rows.append(row)
    if not rows and peak is not None:
        measurement = {"measured": f"{number(round(peak, 3))} GB", "predicted": "not in plan.json"}
        return [Facts(measurement)]
    note = (
        "Measured: the peak of the first rank's allocator (on a CPU: of its process). On a GPU it "
        "does not include `context`."
    )
    if trainers and trainers.get("moment"):
        note += f" The prediction is that of the {trainers['moment']}."
    caption = "Memory of one GPU of each process"
    return [table(caption, rows, note), table("Its predicted parts", parts)]


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
        _by_time("Slowest kernels", "kind calls", (kernels.get("kernels") or [])[:MOST_KERNELS]),
        _by_time(caption, "class what calls", modules),
    ]
    if fp32 and not modules:
        blocks.append(Note("No module computes in fp32 unintentionally."))
    if names := sorted(path.name for path in folder.glob("[!.]*")):
        viewers = (
            "Open trace-*.json.gz in ui.perfetto.dev, memory.pickle in "
            "docs.pytorch.org/memory_viz: both read the file in the browser."
        )
        blocks.append(Note(f"In profile/: {', '.join(names)}. {viewers}"))
    return blocks


def _by_time(caption: str, keys: str, items: list[dict[str, Any]]) -> Table:
    """Return a table of items by name, with these keys and their shares of the time."""
    rows = (
        {key: item.get(key) for key in ("name", *keys.split())}
        | {"seconds": item.get("time_s"), "share": percent_cell(item.get("share"), bar=True)}
        for item in items
    )
    return table(caption, rows)
