"""Which modules compute in fp32 although the run computes in 16 bits, and what share of the time that costs.

A matrix product in fp32 takes 8 to 16 times as long as in bf16 on GPUs with matrix units; a norm in fp32 costs next to nothing and is
meant so. So the cost is stated, of matrix products and of everything else apart.

The trace of the profiled steps tells it: `Ranges` marks each module's forward pass, `record_shapes` notes the dtypes of every operator,
and an operator of a backward pass carries the number of the one that it belongs to.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recipes.common.kernels_table import DEVICE, kind

MARK = "module: "
PRODUCTS, REST = "matrix products", "norms and the like"
SHOWN, KEPT = 10, 100
Event = dict[str, Any]


class Ranges:
    """Marks `module: <name> <class>` around the forward pass of every module of a model, while they are there."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model, self.open = model, threading.local()  # checkpointing recomputes in the thread of the backward pass
        self.handles: list[Any] = []

    def add(self) -> None:
        for name, module in self.model.named_modules() if self.model is not None else ():
            # Layers are alike: one row for all of them.
            mark = f"{MARK}{re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', name) or '(whole model)'} {type(module).__name__}"
            self.handles.append(module.register_forward_pre_hook(lambda *_, mark=mark: self._enter(mark)))
            self.handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _enter(self, mark: str) -> None:
        entered = torch.profiler.record_function(mark)
        entered.__enter__()
        self.open.stack = [*getattr(self.open, "stack", []), entered]

    def _leave(self) -> None:
        self.open.stack.pop().__exit__(None, None, None)


def summary(events: Iterable[Event], time_s: float) -> dict[str, Any]:
    """The content of fp32_modules.json: `share` of the `time_s` that the profiled steps took, `products_share` of matrix products only."""
    whole = [event for event in events if event.get("ph") == "X"]
    operators = _operators(whole)
    cost = _costs(whole, operators)
    forward = {op["sequence"]: op["module"] for op in operators if op["sequence"] is not None and op["module"] and not op["backward"]}
    calls: dict[tuple[str, str], int] = defaultdict(int)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for operator in operators:
        module = operator["module"] or (forward.get(operator["sequence"]) if operator["backward"] else None)
        if module is None or not operator["fp32"] or operator["wrapper"] or not cost.get(operator["id"]):
            continue  # of no module: the optimizer, whose weights are meant to be fp32
        what = PRODUCTS if _is_product(operator) else REST
        calls[module, what] += 1
        spent[module, what] += cost[operator["id"]]
    rows = []
    for (module, what), microseconds in sorted(spent.items(), key=lambda item: -item[1]):
        name, _, class_name = module.rpartition(" ")
        seconds = microseconds / 1e6
        row = {"name": name, "class": class_name, "what": what, "calls": calls[module, what]}
        rows.append({**row, "time_s": seconds, "share": seconds / time_s})
    products = sum(row["share"] for row in rows if row["what"] == PRODUCTS)
    return {"modules": rows[:KEPT], "share": sum(row["share"] for row in rows), "products_share": products}


def _operators(events: list[Event]) -> list[dict[str, Any]]:
    """Each operator with the innermost module and the innermost backward node around it, and its own time on its thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" or (event.get("cat") == "user_annotation" and event["name"].startswith(MARK)):
            threads[event["pid"], event["tid"]].append(event)
    found = []
    for ordered in threads.values():
        stack: list[tuple[float, dict[str, Any]]] = []
        for event in sorted(ordered, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            while stack and stack[-1][0] <= float(event["ts"]):
                stack.pop()
            around = stack[-1][1] if stack else {"module": None, "sequence": None, "backward": False, "own": 0.0, "wrapper": False}
            node = _node(event, around)
            if node["id"] is not None:
                found.append(node)
                around["own"] -= float(event["dur"])
                # aten::linear takes fp32 under autocast and calls itself with 16 bits.
                around["wrapper"] = around["wrapper"] or _is_product(node)
            stack.append((float(event["ts"]) + float(event["dur"]), node))
    return found


def _node(event: Event, around: dict[str, Any]) -> dict[str, Any]:
    """An operator, or the mark of a module: then without an id. Its time is that of operators in it too, which take theirs off."""
    if event.get("cat") != "cpu_op":
        return {**around, "id": None, "module": event["name"].removeprefix(MARK), "sequence": None, "backward": False}
    args = event.get("args", {})
    node = {
        **around,
        "name": event["name"],
        "id": args.get("External id"),
        "own": float(event["dur"]),
        "fp32": _fp32(args),
        "wrapper": False,
    }
    if args.get("Sequence number") is not None:
        node |= {"sequence": args["Sequence number"], "backward": bool(args.get("Fwd thread id"))}
    return node


def _is_product(operator: dict[str, Any]) -> bool:
    return kind(operator["name"]) in ("gemm", "attention")


def _fp32(args: dict[str, Any]) -> bool:
    """Whether every tensor of numbers that goes in is fp32: of a cast from or to 16 bits one is not."""
    floats = {name for name in args.get("Input type", []) if name in ("float", "double", "c10::BFloat16", "c10::Half")}
    return floats == {"float"}


def _costs(events: list[Event], operators: list[dict[str, Any]]) -> dict[Any, float]:
    """Microseconds of each operator by its id: of the kernels that it launched, or its own where the trace has no GPU in it."""
    kernels = [event for event in events if event.get("cat") in DEVICE]
    cost: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        cost[kernel.get("args", {}).get("External id")] += float(kernel["dur"])
    return cost if kernels else {operator["id"]: operator["own"] for operator in operators}


def text(found: dict[str, Any], precision: str) -> str:
    if not found["modules"]:
        return f"fp32 under precision={precision}: no module computes in it"
    lines = [
        f"fp32 under precision={precision}: {found['share']:.1%} of the time, {found['products_share']:.1%} in matrix products",
        f"{'share':>7} {'calls':>7}  {'what':<18}  module",
    ]
    rows = found["modules"][:SHOWN]
    return "\n".join([*lines, *(f"{r['share']:>7.1%} {r['calls']:>7}  {r['what']:<18}  {r['name']} ({r['class']})" for r in rows)])
