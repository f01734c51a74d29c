"""Tabulate how profiled steps spend their time, from a torch trace.

Each instant counts toward one share: the running kernel's (if several run, the first in ORDER),
`communication_exposed` if only communication runs, or `idle`. Communication during a computing
kernel takes no extra time, so all shares except `communication_hidden` add up to 1.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

ORDER = ("gemm", "attention", "memory_bound", "other")  # kernels that compute
# The first pattern that matches a kernel's name determines its kind. Attention precedes gemm,
# because names of attention kernels also contain cutlass or ck_tile. Sources:
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
SHARES = (*ORDER, "communication_exposed", "communication_hidden", "idle")
EXPOSED = {"communication": "communication_exposed"}
Event = dict[str, Any]  # of a trace; times in microseconds
Interval = tuple[float, float, str]  # start, end and name of a kernel


def kind(name: str) -> str:
    """Return a kernel's kind: gemm, attention, communication, memory_bound, or else other."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")


def summary(events: Iterable[Event]) -> dict[str, Any]:
    """Return the content of kernels.json from the `traceEvents` of the profiled steps.

    Without a GPU, operators on the CPU are counted instead of kernels. The time of an operator
    excludes nested operators.
    """
    complete_events = [event for event in events if event.get("ph") == "X"]
    steps = [
        e for e in complete_events if e.get("cat") == "user_annotation" and STEP.match(e["name"])
    ]
    begin, last = min(float(step["ts"]) for step in steps), max(map(end, steps))
    inside = [
        event for event in complete_events if end(event) > begin and float(event["ts"]) < last
    ]
    kernels = [event for event in inside if event.get("cat") in DEVICE]
    calls = kernels or [event for event in inside if event.get("cat") == "cpu_op"]
    intervals = [(max(float(e["ts"]), begin), min(end(e), last), e["name"]) for e in calls]
    spent = [stop - start for start, stop, _ in intervals]
    if not kernels:
        place = {id(event): n for n, event in enumerate(calls)}
        for event, enclosing in nested(calls):
            if enclosing is not None:
                spent[place[id(enclosing)]] -= min(end(event), last) - max(
                    float(event["ts"]), begin
                )
    counts, time = Counter(name for *_, name in intervals), defaultdict[str, float](float)
    for (*_, name), microseconds in zip(intervals, spent, strict=True):
        time[name] += microseconds
    if kernels:
        by_kind = shares(intervals, begin, last)
    else:
        by_kind = dict.fromkeys(SHARES, 0.0)
        # Threads run in parallel, so their total time may exceed the duration of the steps.
        total = max(sum(spent), last - begin)
        for name, microseconds in time.items():
            by_kind[EXPOSED.get(kind(name), kind(name))] += microseconds / total
        by_kind["idle"] = 1 - sum(by_kind.values())
    return {
        "time_s": (last - begin) / 1e6,
        "steps": len(steps),
        "device": "gpu" if kernels else "cpu",
        "shares": by_kind,
        # The longest time first. Concurrent kernels' shares can add up to more than 1.
        "kernels": [
            {
                "name": name,
                "kind": kind(name),
                "calls": counts[name],
                "time_s": microseconds / 1e6,
                "share": microseconds / (last - begin),
            }
            for name, microseconds in sorted(time.items(), key=lambda item: -item[1])[:WRITTEN]
        ],
    }


def shares(intervals: Iterable[Interval], begin: float, last: float) -> dict[str, float]:
    """Return the shares of the time from `begin` to `last`, by kind of kernel."""
    edges = [(last, 0, "other")]
    for start, stop, name in intervals:
        edges += [(start, 1, kind(name)), (stop, -1, kind(name))]
    running, time, before = Counter[str](), dict.fromkeys(SHARES, 0.0), begin
    for at, change, name in sorted(edges):
        computing = next((kind for kind in ORDER if running[kind]), None)
        if computing:
            time[computing] += at - before
        if running["communication"]:
            time["communication_hidden" if computing else "communication_exposed"] += at - before
        elif not computing:
            time["idle"] += at - before
        before = at
        running[name] += change
    return {name: spent / (last - begin) for name, spent in time.items()}


def nested(events: Iterable[Event]) -> Iterator[tuple[Event, Event | None]]:
    """Yield the events of each thread in order, with their innermost enclosing event or None."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.get("pid"), event.get("tid")].append(event)
    for ordered in threads.values():
        stack: list[Event] = []
        for event in sorted(ordered, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            while stack and end(stack[-1]) <= float(event["ts"]):
                stack.pop()
            yield event, stack[-1] if stack else None
            stack.append(event)


def end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def text(table: dict[str, Any]) -> str:
    """Return the shares and the longest kernels as text."""
    shares_text = ", ".join(
        f"{name.replace('_', ' ')} {share:.1%}" for name, share in table["shares"].items()
    )
    title = "kernels" if table["device"] == "gpu" else "operators on the CPU"
    lines = [f"profile: {table['steps']} steps, {table['time_s']:.4g} s; {shares_text}"]
    lines.append(f"{'share':>7} {'calls':>7} {'ms':>10}  {'kind':<13}  {title}")
    for row in table["kernels"][:PRINTED]:
        name = row["name"] if len(row["name"]) <= 90 else row["name"][:87] + "..."
        lines.append(
            f"{row['share']:>7.1%} {row['calls']:>7} {row['time_s'] * 1e3:>10.3f}  "
            f"{row['kind']:<13}  {name}"
        )
    return "\n".join(lines)
