"""Tabulate GPU memory at its peak by the Python line that allocated it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from recipes.measure.telemetry import fragmentation

PRINTED = 15
LIBRARIES = ("/torch/", "/accelerate/")  # show their callers instead


def summary(
    snapshot: dict[str, Any], stats: dict[str, int], device: int = 0, most_events: int | None = None
) -> dict[str, Any]:
    """Return the content of memory.json. Sizes are in units of 1e9 bytes.

    The arguments come from torch.cuda.memory._snapshot() and memory_stats(). `before_gb` was
    allocated before the history begins; in a trainer, these are the weights. If `history_is_cut`,
    the recorder has dropped events beyond `most_events`, so `before_gb` includes more.
    """
    traces = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    live, peak = _at_peak(traces)
    lines: dict[str, list[int]] = defaultdict(list)
    for size, frames in live:
        # The innermost Python line outside LIBRARIES, or else the innermost one.
        python = [frame for frame in frames if frame["filename"].endswith(".py")]
        own = [f for f in python if not any(part in f["filename"] for part in LIBRARIES)]
        line = "no line of Python (backward)"
        for frame in (own or python)[:1]:
            file = "/".join(frame["filename"].split("/")[-3:])
            line = f"{file}:{frame['line']} {frame['name']}"
        lines[line].append(size)
    largest = sorted(lines.items(), key=lambda item: -sum(item[1]))[:PRINTED]
    at_most = stats.get("allocated_bytes.all.peak", 0)
    return {
        "allocated_peak_gb": at_most / 1e9,
        "reserved_peak_gb": stats.get("reserved_bytes.all.peak", 0) / 1e9,
        "before_gb": max(0, at_most - peak) / 1e9,
        "history_is_cut": most_events is not None and len(traces) >= most_events,
        "fragmentation": fragmentation(stats),
        # How often the cache was emptied to make room, which costs a synchronization each time.
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
        "num_ooms": stats.get("num_ooms", 0),
        "at_peak": [
            {"line": line, "blocks": len(sizes), "gb": sum(sizes) / 1e9} for line, sizes in largest
        ],
    }


def _at_peak(traces: list[dict[str, Any]]) -> tuple[list[tuple[int, list[dict[str, Any]]]], int]:
    """Return (size, stack) of each block allocated at the history's peak, and the peak's bytes."""
    in_use = most = at = 0
    sizes: dict[int, int] = {}
    for number, entry in enumerate(traces):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            in_use += entry["size"]
        elif entry["action"] == "free_completed":
            in_use -= sizes.pop(entry["addr"], 0)  # 0 for a block from before the history
        if in_use > most:
            most, at = in_use, number + 1
    live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for entry in traces[:at]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = (entry["size"], entry.get("frames", []))
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    return list(live.values()), most


def text(table: dict[str, Any]) -> str:
    lines = [
        f"memory: {table['allocated_peak_gb']:.2f} GB allocated at most, "
        f"{table['reserved_peak_gb']:.2f} GB reserved, {table['before_gb']:.2f} GB from before, "
        f"fragmentation {table['fragmentation']:.1%}"
    ]
    if table["history_is_cut"]:
        lines.append("the history was full: earlier allocations count as made before recording")
    lines.append(f"{'GB':>9} {'blocks':>7}  allocated by (alive at the peak)")
    lines += [f"{row['gb']:>9.3f} {row['blocks']:>7}  {row['line']}" for row in table["at_peak"]]
    return "\n".join(lines)
