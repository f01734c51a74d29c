"""What the time of profiled steps went into, from the events of a torch trace: shares by interval arithmetic, and a table of kernels.

Every instant of the profiled steps belongs to one share: to the kernel that runs then (where several do, to the first of ORDER), to
communication where it runs alone (exposed), to `idle` where nothing runs. Communication beside a computing kernel is hidden: it costs
no time of its own, so it is stated and not added. All shares but `communication_hidden` add up to 1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ORDER = ("gemm", "attention", "memory_bound", "other")  # of kernels that compute
# The first row whose pattern is found in a kernel's name says its kind. Attention stands before gemm: its kernels are built from
# cutlass and ck_tile too. Names that the patterns were made for, with their sources: tests/unit/test_kernels_table.py.
KINDS = (
    ("communication", r"nccl|rccl|mscclKernel|cross_device_reduce|multimem_all_|one_shot_all_reduce|two_shot_all_reduce|c10d::|gloo:"),
    (
        "attention",
        r"flash_|flash::|flashattn|fmha|attention|attn_fwd|attn_bwd|bwd_kernel_d[kq]|bwd_preprocess|cudnn_generated\w*sdpa|triton_tem_fused\w*flex",
    ),
    ("memory_bound", r"splitKreduce|PostGSU|reduce_1Block|MoeSorting"),  # parts of matrix products that add and sort
    (
        "gemm",
        r"gemm|gemv|nvjet|cublas|Cijk_|hipblaslt|xmma|cutlass|wvSp?lit?K|flatmm|triton_tem_fused|triton_mm|dot_kernel|mkldnn|"
        r"aten::(mm|bmm|addmm_?|baddbmm_?|addbmm|mv|dot|matmul|linear|_grouped_mm|_scaled_(grouped_)?mm|convolution|_addmm_activation)$",
    ),
    (
        "memory_bound",
        r"elementwise|reduce|norm|softmax|copy|memcpy|memset|fill|cat_|catarray|index|gather|scatter|embedding|multi_tensor|foreach|adam|"
        r"triton_(poi|red|per|for)|rope|rotary|silu|swiglu|gelu|act_and_mul|cross_entropy|nll_loss|dropout|distribution|transpose|quant|"
        r"sort|scan|topk|cub::|rocprim|aten::",
    ),
)
PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what runs on a GPU in a trace of Kineto
STEP = re.compile(r"ProfilerStep#\d+$")
SHOWN, KEPT = 15, 200  # rows printed, rows in kernels.json
TOLD = (
    ("GEMM", "gemm"),
    ("attention", "attention"),
    ("memory-bound", "memory_bound"),
    ("other", "other"),
    ("communication exposed", "communication_exposed"),
    ("idle", "idle"),
)


@dataclass(frozen=True)
class Interval:
    """What ran from `start` to `end`, in microseconds of the trace's clock."""

    start: float
    end: float
    name: str


def kind(name: str) -> str:
    """gemm, attention, communication, memory_bound, or other for a name that no pattern knows."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The content of kernels.json, from `traceEvents` of the profiled steps.

    Of the operators on the CPU in place of kernels where the trace has no GPU in it. Raises ValueError where no step was profiled.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in whole if event.get("cat") == "user_annotation" and STEP.match(event["name"])]
    if not steps:
        raise ValueError("the trace holds no whole step")
    begin, end = min(float(e["ts"]) for e in steps), max(float(e["ts"]) + float(e["dur"]) for e in steps)
    ran = [_interval(event) for event in whole if event.get("cat") in DEVICE]
    on_gpu = bool(ran)
    calls = ran = [cut for interval in ran if (cut := _within(interval, begin, end))]
    if not on_gpu:
        calls = [_interval(event) for event in whole if event.get("cat") == "cpu_op" and begin <= float(event["ts"]) < end]
        ran = innermost(whole, begin, end)
    return {
        "time_s": (end - begin) / 1e6,
        "steps": len(steps),
        "device": "gpu" if on_gpu else "cpu",
        "shares": shares(ran, begin, end),
        "kernels": _table(ran, calls, end - begin),
    }


def shares(ran: Iterable[Interval], begin: float, end: float) -> dict[str, float]:
    """Share of the time from `begin` to `end` for each of ORDER, communication exposed and hidden, and idle."""
    edges: list[tuple[float, int, str]] = []
    for interval in ran:
        name = kind(interval.name)
        edges += [(interval.start, 1, name), (interval.end, -1, name)]
    running: dict[str, int] = defaultdict(int)
    time: dict[str, float] = dict.fromkeys((*ORDER, "communication_exposed", "communication_hidden", "idle"), 0.0)
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
    """On a CPU an operator calls others: the parts of time in which each was the innermost one, of every thread."""
    threads: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("pid"), event.get("tid")].append(_interval(event))
    found = []
    for intervals in threads.values():
        stack: list[Interval] = []
        at = begin
        for interval in sorted(intervals, key=lambda i: (i.start, -i.end)):
            while stack and stack[-1].end <= interval.start:
                done = stack.pop()
                found.append(Interval(at, done.end, done.name))
                at = done.end
            if stack:
                found.append(Interval(at, interval.start, stack[-1].name))
            stack.append(interval)
            at = interval.start
        while stack:
            done = stack.pop()
            found.append(Interval(at, done.end, done.name))
            at = done.end
    return [cut for interval in found if (cut := _within(interval, begin, end))]


def _interval(event: dict[str, Any]) -> Interval:
    return Interval(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])


def _within(interval: Interval, begin: float, end: float) -> Interval | None:
    start, stop = max(interval.start, begin), min(interval.end, end)
    return Interval(start, stop, interval.name) if stop > start else None


def _table(ran: list[Interval], calls: list[Interval], window: float) -> list[dict[str, Any]]:
    """By name, the longest first. `share` is of the steps' time; kernels that run side by side add up to more than was spent."""
    number: dict[str, int] = defaultdict(int)
    time: dict[str, float] = defaultdict(float)
    for call in calls:
        number[call.name] += 1
    for interval in ran:
        time[interval.name] += interval.end - interval.start
    rows = [
        {"name": name, "kind": kind(name), "calls": number[name], "time_s": spent / 1e6, "share": spent / window}
        for name, spent in sorted(time.items(), key=lambda item: -item[1])
    ]
    return rows[:KEPT]


def text(found: dict[str, Any]) -> str:
    """The shares and the longest kernels, as they are printed."""
    share = found["shares"]
    told = ", ".join(f"{title} {share[name]:.1%}" for title, name in TOLD)
    what = "kernels" if found["device"] == "gpu" else "operators on the CPU"
    lines = [f"profile: {found['steps']} steps, {found['time_s']:.4g} s; {told}"]
    if share["communication_hidden"]:
        lines.append(f"communication hidden behind computation: {share['communication_hidden']:.1%}")
    lines.append(f"{'share':>7} {'calls':>7} {'ms':>10}  {'kind':<13}  {what}")
    for row in found["kernels"][:SHOWN]:
        name = row["name"] if len(row["name"]) <= 90 else row["name"][:87] + "..."
        lines.append(f"{row['share']:>7.1%} {row['calls']:>7} {row['time_s'] * 1e3:>10.3f}  {row['kind']:<13}  {name}")
    return "\n".join(lines)
