"""Tabulate GPU memory at its peak by the Python line that allocated it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from recipes.measure.telemetry import fragmentation

PRINTED = 15
LIBRARIES = ("/torch/", "/accelerate/")  # show their callers instead


def summary(
    snapshot: dict[str, Any], stats: dict[str, int], device: int = 0, max_events: int | None = None
) -> dict[str, Any]:
    """Return the content of memory.json. Sizes are in units of 1e9 bytes.

    The arguments come from torch.cuda.memory._snapshot() and memory_stats(). `before_gb` was
    allocated before the history begins. In a trainer, these are the weights. If `history_is_cut`,
    the recorder has dropped events beyond `max_events`, so `before_gb` is too high.
    """
    traces = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    live, peak = _at_peak(traces)
    lines: dict[str, list[int]] = defaultdict(list)
    for size, frames in live:
        # The innermost Python line outside LIBRARIES, or else the innermost one.
        python = [frame for frame in frames if frame["filename"].endswith(".py")]
        callers = [f for f in python if not any(part in f["filename"] for part in LIBRARIES)]
        line = "no Python line (backward)"
        for frame in (callers or python)[:1]:
            file = "/".join(frame["filename"].split("/")[-3:])
            line = f"{file}:{frame['line']} {frame['name']}"
        lines[line].append(size)
    largest = sorted(lines.items(), key=lambda item: -sum(item[1]))[:PRINTED]
    peak_bytes = stats.get("allocated_bytes.all.peak", 0)
    return {
        "allocated_peak_gb": peak_bytes / 1e9,
        "reserved_peak_gb": stats.get("reserved_bytes.all.peak", 0) / 1e9,
        "before_gb": max(0, peak_bytes - peak) / 1e9,
        "history_is_cut": max_events is not None and len(traces) >= max_events,
        "fragmentation": fragmentation(stats),
        # How often the cache was emptied for lack of memory. Each time costs a synchronization.
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
        "num_ooms": stats.get("num_ooms", 0),
        "at_peak": [
            {"line": line, "blocks": len(sizes), "gb": sum(sizes) / 1e9} for line, sizes in largest
        ],
    }


def _at_peak(traces: list[dict[str, Any]]) -> tuple[list[tuple[int, list[dict[str, Any]]]], int]:
    """Return (size, stack) of each block in use at the history's peak, and the peak in bytes."""
    in_use = peak = num_entries = 0
    sizes: dict[int, int] = {}
    for number, entry in enumerate(traces):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            in_use += entry["size"]
        elif entry["action"] == "free_completed":
            in_use -= sizes.pop(entry["addr"], 0)  # 0 for a block from before the history
        if in_use > peak:
            peak, num_entries = in_use, number + 1
    live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for entry in traces[:num_entries]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = (entry["size"], entry.get("frames", []))
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    return list(live.values()), peak


def text(table: dict[str, Any]) -> str:
    lines = [
        f"memory: at its peak {table['allocated_peak_gb']:.2f} GB allocated "
        f"({table['before_gb']:.2f} GB before recording), {table['reserved_peak_gb']:.2f} GB "
        f"reserved; fragmentation {table['fragmentation']:.1%}"
    ]
    if table["history_is_cut"]:
        lines.append("the history is full, so the oldest allocations are missing from the table")
    lines.append(f"{'GB':>9} {'blocks':>7}  allocated by (in use at the peak)")
    lines += [f"{row['gb']:>9.3f} {row['blocks']:>7}  {row['line']}" for row in table["at_peak"]]
    return "\n".join(lines)
