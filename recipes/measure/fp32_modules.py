"""Find modules that compute in fp32 although the run computes in a lower precision.

On GPUs with matrix units, a matrix product takes 8 to 16 times as long in fp32 as in bf16. Norms in
fp32 are intended and cheap, so the time of matrix products is reported separately.

In the trace, `ModuleRanges` marks each module's forward pass, and `record_shapes` adds dtypes. An
operator of a backward pass has the sequence number of its forward operator.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recipes.measure.kernels_table import DEVICE, Event, kind, nested

MARK = "module: "
PRODUCTS, REST = "matrix products", "norms and the like"
PRINTED, WRITTEN = 10, 100
OUTERMOST = {"module": None, "sequence": None, "backward": False, "self_us": 0.0, "wrapper": False}


class ModuleRanges:
    """Mark the forward pass of each module of a model as `module: <name> <class>`."""

    def __init__(self, model: nn.Module | None) -> None:
        # Checkpointing recomputes in the thread of the backward pass, so each thread has a stack.
        self.model, self.local = model, threading.local()
        self.handles: list[Any] = []

    def add(self) -> None:
        for name, module in self.model.named_modules() if self.model is not None else ():
            # All layers share one name.
            name = re.sub(r"(?<=[.])[0-9]+(?=[.]|$)", "*", name) or "(whole model)"
            mark = f"{MARK}{name} {type(module).__name__}"
            self.handles += [
                module.register_forward_pre_hook(lambda *_, mark=mark: self.enter(mark)),
                module.register_forward_hook(
                    lambda *_: self.local.stack.pop().__exit__(None, None, None), always_call=True
                ),
            ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def enter(self, mark: str) -> None:
        module_range = torch.profiler.record_function(mark)
        module_range.__enter__()
        self.local.stack = [*getattr(self.local, "stack", []), module_range]


def summary(events: Iterable[Event], time_s: float) -> dict[str, Any]:
    """Return the content of fp32_modules.json. Shares are relative to the steps' `time_s`."""
    complete_events = [event for event in events if event.get("ph") == "X"]
    operators = _operators(complete_events)
    kernels = [event for event in complete_events if event.get("cat") in DEVICE]
    # Operator -> microseconds of its kernels, or of the operator itself without a GPU.
    cost: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        cost[kernel.get("args", {}).get("External id")] += float(kernel["dur"])
    if not kernels:
        cost |= {operator["id"]: operator["self_us"] for operator in operators}
    forward = {
        op["sequence"]: op["module"]
        for op in operators
        if op["sequence"] is not None and op["module"] and not op["backward"]
    }
    calls: dict[tuple[str, str], int] = defaultdict(int)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for operator in operators:
        module = operator["module"]
        if not module and operator["backward"]:
            module = forward.get(operator["sequence"])
        has_cost = operator["fp32"] and not operator["wrapper"] and cost.get(operator["id"])
        # Operators outside modules belong to the optimizer, whose fp32 weights are intended.
        if not module or not has_cost:
            continue
        group = PRODUCTS if _is_product(operator) else REST
        calls[module, group] += 1
        spent[module, group] += cost[operator["id"]]
    rows = []
    for (module, group), microseconds in sorted(spent.items(), key=lambda item: -item[1]):
        name, _, class_name = module.rpartition(" ")
        seconds = microseconds / 1e6
        row = {"name": name, "class": class_name, "what": group, "calls": calls[module, group]}
        rows.append({**row, "time_s": seconds, "share": seconds / time_s})
    products = sum(row["share"] for row in rows if row["what"] == PRODUCTS)
    return {
        "modules": rows[:WRITTEN],
        "share": sum(row["share"] for row in rows),
        "products_share": products,
    }


def _operators(events: list[Event]) -> list[dict[str, Any]]:
    """Return the operators with their innermost module, backward node and exclusive time."""
    nodes: dict[int, dict[str, Any]] = {}
    for event, enclosing in nested(
        event
        for event in events
        if event.get("cat") == "cpu_op"
        or (event.get("cat") == "user_annotation" and event["name"].startswith(MARK))
    ):
        outer = nodes[id(enclosing)] if enclosing else dict(OUTERMOST)
        if event["cat"] != "cpu_op":  # a module's range
            module = event["name"].removeprefix(MARK)
            mark = {"id": None, "module": module, "sequence": None, "backward": False}
            nodes[id(event)] = {**outer, **mark}
            continue
        args = event.get("args", {})
        floats = {"float", "double", "c10::BFloat16", "c10::Half"}
        node = {
            **outer,
            "name": event["name"],
            "id": args.get("External id"),
            "self_us": float(event["dur"]),  # nested operators' time is subtracted later
            "fp32": floats & set(args.get("Input type", [])) == {"float"},  # false for casts
            "wrapper": False,
        }
        if (sequence := args.get("Sequence number")) is not None:
            node |= {"sequence": sequence, "backward": bool(args.get("Fwd thread id"))}
        nodes[id(event)] = node
        if node["id"] is not None:
            outer["self_us"] -= float(event["dur"])
            # Under autocast, aten::linear gets fp32 inputs and calls itself with 16-bit inputs.
            outer["wrapper"] = outer["wrapper"] or _is_product(node)
    return [node for node in nodes.values() if node["id"] is not None]


def _is_product(operator: dict[str, Any]) -> bool:
    return kind(operator["name"]) in ("gemm", "attention")


def text(table: dict[str, Any], precision: str) -> str:
    if not table["modules"]:
        return f"fp32 under precision={precision}: no module computes in fp32"
    lines = [
        f"fp32 under precision={precision}: {table['share']:.1%} of the time, "
        f"{table['products_share']:.1%} in matrix products",
        f"{'share':>7} {'calls':>7}  {'what':<18}  module",
    ]
    lines += [
        f"{row['share']:>7.1%} {row['calls']:>7}  {row['what']:<18}  {row['name']} ({row['class']})"
        for row in table["modules"][:PRINTED]
    ]
    return "\n".join(lines)
