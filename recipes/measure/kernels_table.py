"""Tabulate how profiled steps spend their time, from a torch trace.

Every instant belongs to one share: the running kernel's (if several run, the first in ORDER),
exposed communication's if only that runs, or `idle`. Communication during a computing kernel is
hidden and takes no extra time, so all shares but `communication_hidden` add up to 1.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ORDER = ("gemm", "attention", "memory_bound", "other")  # kernels that compute
# The first pattern that matches a kernel's name determines its kind. Attention precedes gemm,
# because its kernels also have cutlass or ck_tile in their names. Sources:
# tests/recipes/measure/test_kernels_table.py.
KINDS = (
    (
        "communication",
        r"nccl|rccl|mscclKernel|cross_device_reduce|multimem_all_|one_shot_all_reduce|"
        r"two_shot_all_reduce|c10d::|gloo:",
    ),
    (
        "attention",
        r"flash_|flash::|flashattn|fmha|attention|attn_fwd|attn_bwd|bwd_kernel_d[kq]|"
        r"bwd_preprocess|cudnn_generated\w*sdpa|triton_tem_fused\w*flex",
    ),
    # Reductions and sorts that belong to matrix products.
    ("memory_bound", r"splitKreduce|PostGSU|reduce_1Block|MoeSorting"),
    (
        "gemm",
        r"gemm|gemv|nvjet|cublas|Cijk_|hipblaslt|xmma|cutlass|wvSp?lit?K|flatmm|triton_tem_fused|"
        r"triton_mm|dot_kernel|mkldnn|aten::(mm|bmm|addmm_?|baddbmm_?|addbmm|mv|dot|matmul|linear|"
        r"_grouped_mm|_scaled_(grouped_)?mm|convolution|_addmm_activation)$",
    ),
    (
        "memory_bound",
        r"elementwise|reduce|norm|softmax|copy|memcpy|memset|fill|cat_|catarray|index|gather|"
        r"scatter|embedding|multi_tensor|foreach|adam|triton_(poi|red|per|for)|rope|rotary|silu|"
        r"swiglu|gelu|act_and_mul|cross_entropy|nll_loss|dropout|distribution|transpose|quant|sort|"
        r"scan|topk|cub::|rocprim|aten::",
    ),
)
PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS)
# Categories of GPU work in a Kineto trace.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = re.compile(r"ProfilerStep#\d+$")
PRINTED, WRITTEN = 15, 200  # rows printed, rows in kernels.json
TITLES = (
    ("GEMM", "gemm"),
    ("attention", "attention"),
    ("memory-bound", "memory_bound"),
    ("other", "other"),
    ("communication exposed", "communication_exposed"),
    ("idle", "idle"),
)


@dataclass(frozen=True)
class Interval:
    """An event from `start` to `end`, in microseconds of the trace's clock."""

    start: float
    end: float
    name: str


def kind(name: str) -> str:
    """Return a kernel's kind: gemm, attention, communication, memory_bound, or else other."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of kernels.json from the `traceEvents` of the profiled steps.

    In a trace without a GPU, operators on the CPU stand in for kernels.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [
        event
        for event in whole
        if event.get("cat") == "user_annotation" and STEP.match(event["name"])
    ]
    begin = min(float(step["ts"]) for step in steps)
    end = max(float(step["ts"]) + float(step["dur"]) for step in steps)
    kernels = [_interval(event) for event in whole if event.get("cat") in DEVICE]
    calls = ran = [cut for interval in kernels if (cut := _within(interval, begin, end))]
    if not kernels:
        calls = [
            _interval(event)
            for event in whole
            if event.get("cat") == "cpu_op" and begin <= float(event["ts"]) < end
        ]
        ran = innermost(whole, begin, end)
    number, time = Counter(call.name for call in calls), defaultdict[str, float](float)
    for interval in ran:
        time[interval.name] += interval.end - interval.start
    return {
        "time_s": (end - begin) / 1e6,
        "steps": len(steps),
        "device": "gpu" if kernels else "cpu",
        "shares": shares(ran, begin, end),
        # The longest time first. Concurrent kernels' shares can add up to more than 1.
        "kernels": [
            {
                "name": name,
                "kind": kind(name),
                "calls": number[name],
                "time_s": spent / 1e6,
                "share": spent / (end - begin),
            }
            for name, spent in sorted(time.items(), key=lambda item: -item[1])[:WRITTEN]
        ],
    }


def shares(ran: Iterable[Interval], begin: float, end: float) -> dict[str, float]:
    """Return the shares of the time from `begin` to `end`, by kind of kernel."""
    edges: list[tuple[float, int, str]] = []
    for interval in ran:
        name = kind(interval.name)
        edges += [(interval.start, 1, name), (interval.end, -1, name)]
    running: dict[str, int] = defaultdict(int)
    time: dict[str, float] = dict.fromkeys(
        (*ORDER, "communication_exposed", "communication_hidden", "idle"), 0.0
    )
    before = begin
    for at, change, name in sorted(edges):
        _account(time, running, at - before)
        before = at
        running[name] += change
    _account(time, running, end - before)
    return {name: spent / (end - begin) for name, spent in time.items()}


def _account(time: dict[str, float], running: dict[str, int], spent: float) -> None:
    computing = next((name for name in ORDER if running[name]), None)
    if computing:
        time[computing] += spent
    if running["communication"]:
        time["communication_hidden" if computing else "communication_exposed"] += spent
    elif not computing:
        time["idle"] += spent


def innermost(events: Iterable[dict[str, Any]], begin: float, end: float) -> list[Interval]:
    """Return the intervals in which each CPU operator was the innermost one of its thread."""
    threads: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("pid"), event.get("tid")].append(_interval(event))
    parts = []
    for intervals in threads.values():
        stack: list[Interval] = []
        at = begin
        for interval in sorted(intervals, key=lambda i: (i.start, -i.end)):
            while stack and stack[-1].end <= interval.start:
                done = stack.pop()
                parts.append(Interval(at, done.end, done.name))
                at = done.end
            if stack:
                parts.append(Interval(at, interval.start, stack[-1].name))
            stack.append(interval)
            at = interval.start
        while stack:
            done = stack.pop()
            parts.append(Interval(at, done.end, done.name))
            at = done.end
    return [cut for interval in parts if (cut := _within(interval, begin, end))]


def _interval(event: dict[str, Any]) -> Interval:
    return Interval(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])


def _within(interval: Interval, begin: float, end: float) -> Interval | None:
    start, stop = max(interval.start, begin), min(interval.end, end)
    return Interval(start, stop, interval.name) if stop > start else None


def text(table: dict[str, Any]) -> str:
    """Return the shares and the longest kernels as text."""
    share = table["shares"]
    shares_text = ", ".join(f"{title} {share[name]:.1%}" for title, name in TITLES)
    what = "kernels" if table["device"] == "gpu" else "operators on the CPU"
    lines = [f"profile: {table['steps']} steps, {table['time_s']:.4g} s; {shares_text}"]
    if share["communication_hidden"]:
        hidden = share["communication_hidden"]
        lines.append(f"communication hidden behind computation: {hidden:.1%}")
    lines.append(f"{'share':>7} {'calls':>7} {'ms':>10}  {'kind':<13}  {what}")
    for row in table["kernels"][:PRINTED]:
        name = row["name"] if len(row["name"]) <= 90 else row["name"][:87] + "..."
        lines.append(
            f"{row['share']:>7.1%} {row['calls']:>7} {row['time_s'] * 1e3:>10.3f}  "
            f"{row['kind']:<13}  {name}"
        )
    return "\n".join(lines)
