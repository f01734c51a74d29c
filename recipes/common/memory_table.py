"""What holds the memory of a GPU at its fullest moment, from torch's snapshot: by the line of Python that allocated it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

SHOWN = 15
LIBRARIES = ("/torch/", "/accelerate/")  # their lines say less than that of whoever called them


def summary(snapshot: dict[str, Any], stats: dict[str, int], device: int = 0, most_events: int | None = None) -> dict[str, Any]:
    """The content of memory.json, from torch.cuda.memory._snapshot() and memory_stats(). Sizes in units of 1e9 bytes.

    `before_gb` is what was there before the history begins: the weights, in a trainer. `history_is_cut`: the recorder keeps no more than
    `most_events`, so that the history begins in the middle, and `before_gb` holds more than the weights.
    """
    traces = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    live, peak = _at_peak(traces)
    lines: dict[str, list[int]] = defaultdict(list)
    for size, frames in live:
        lines[_line(frames)].append(size)
    largest = sorted(lines.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    reserved = stats.get("reserved_bytes.all.current", 0)
    at_most = stats.get("allocated_bytes.all.peak", 0)
    return {
        "allocated_peak_gb": at_most / 1e9,
        "reserved_peak_gb": stats.get("reserved_bytes.all.peak", 0) / 1e9,
        "before_gb": max(0, at_most - peak) / 1e9,
        "history_is_cut": most_events is not None and len(traces) >= most_events,
        "fragmentation": stats.get("inactive_split_bytes.all.current", 0) / reserved if reserved else 0.0,
        "num_alloc_retries": stats.get("num_alloc_retries", 0),  # the cache was emptied to find room: each one costs a synchronization
        "num_ooms": stats.get("num_ooms", 0),
        "at_peak": [{"line": line, "blocks": len(sizes), "gb": sum(sizes) / 1e9} for line, sizes in largest],
    }


def _at_peak(traces: list[dict[str, Any]]) -> tuple[list[tuple[int, list[dict[str, Any]]]], int]:
    """(size, stack) of each block that the history allocated and that lived when these held most, and that many bytes."""
    held = most = at = 0
    sizes: dict[int, int] = {}
    for number, entry in enumerate(traces):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            held += entry["size"]
        elif entry["action"] == "free_completed":
            held -= sizes.pop(entry["addr"], 0)  # 0: of a block from before the history
        if held > most:
            most, at = held, number + 1
    live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for entry in traces[:at]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = (entry["size"], entry.get("frames", []))
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    return list(live.values()), most


def _line(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is no library's of LIBRARIES; of what has none, as a backward pass, whatever is there."""
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = next((frame for frame in python if not any(part in frame["filename"] for part in LIBRARIES)), None)
    frame = own or next(iter(python), None)
    return f"{'/'.join(frame['filename'].split('/')[-3:])}:{frame['line']} {frame['name']}" if frame else "no line of Python (backward)"


def text(found: dict[str, Any]) -> str:
    lines = [
        f"memory: {found['allocated_peak_gb']:.2f} GB allocated at most, {found['reserved_peak_gb']:.2f} GB reserved, "
        f"{found['before_gb']:.2f} GB from before, fragmentation {found['fragmentation']:.1%}",
        *(["the history was full: what was allocated before its last events counts as from before"] if found["history_is_cut"] else []),
        f"{'GB':>9} {'blocks':>7}  allocated by (what lived at the fullest moment)",
    ]
    return "\n".join([*lines, *(f"{row['gb']:>9.3f} {row['blocks']:>7}  {row['line']}" for row in found["at_peak"])])
