"""Find modules that compute in fp32 in a run with 16-bit computation, and their cost.

A matrix product in fp32 takes 8 to 16 times as long as in bf16 on GPUs with matrix units; a norm in
fp32 is intended and cheap. So the costs of matrix products are reported separately.

`Ranges` marks each module's forward pass in the trace, `record_shapes` records dtypes, and an
operator of a backward pass carries the sequence number of its forward operator.
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
OUTERMOST = {"module": None, "sequence": None, "backward": False, "own": 0.0, "wrapper": False}


class Ranges:
    """Mark the forward pass of each module of a model as `module: <name> <class>`."""

    def __init__(self, model: nn.Module | None) -> None:
        # Checkpointing recomputes in the thread of the backward pass, so the stack is per thread.
        self.model, self.open = model, threading.local()
        self.handles: list[Any] = []

    def add(self) -> None:
        for name, module in self.model.named_modules() if self.model is not None else ():
            # All layers share one row.
            name = re.sub(r"(?<=[.])[0-9]+(?=[.]|$)", "*", name) or "(whole model)"
            mark = f"{MARK}{name} {type(module).__name__}"
            self.handles += [
                module.register_forward_pre_hook(lambda *_, mark=mark: self.enter(mark)),
                module.register_forward_hook(
                    lambda *_: self.open.stack.pop().__exit__(None, None, None), always_call=True
                ),
            ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def enter(self, mark: str) -> None:
        entered = torch.profiler.record_function(mark)
        entered.__enter__()
        self.open.stack = [*getattr(self.open, "stack", []), entered]


def summary(events: Iterable[Event], time_s: float) -> dict[str, Any]:
    """Return the content of fp32_modules.json, with shares of the steps' `time_s`."""
    whole = [event for event in events if event.get("ph") == "X"]
    operators = _operators(whole)
    kernels = [event for event in whole if event.get("cat") in DEVICE]
    # Microseconds by operator: that of its kernels, or its own without a GPU.
    cost: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        cost[kernel.get("args", {}).get("External id")] += float(kernel["dur"])
    if not kernels:
        cost |= {operator["id"]: operator["own"] for operator in operators}
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
        spends = operator["fp32"] and not operator["wrapper"] and cost.get(operator["id"])
        # Operators outside modules belong to the optimizer, whose fp32 weights are intended.
        if not module or not spends:
            continue
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
    return {
        "modules": rows[:WRITTEN],
        "share": sum(row["share"] for row in rows),
        "products_share": products,
    }


def _operators(events: list[Event]) -> list[dict[str, Any]]:
    """Return operators with their innermost module and backward node, and their own time."""
    nodes: dict[int, dict[str, Any]] = {}
    for event, around in nested(
        event
        for event in events
        if event.get("cat") == "cpu_op"
        or (event.get("cat") == "user_annotation" and event["name"].startswith(MARK))
    ):
        outer = nodes[id(around)] if around else dict(OUTERMOST)
        if event["cat"] != "cpu_op":  # the mark of a module
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
            "own": float(event["dur"]),  # operators inside it later subtract theirs
            "fp32": floats & set(args.get("Input type", [])) == {"float"},  # a cast has two dtypes
            "wrapper": False,
        }
        if (sequence := args.get("Sequence number")) is not None:
            node |= {"sequence": sequence, "backward": bool(args.get("Fwd thread id"))}
        nodes[id(event)] = node
        if node["id"] is not None:
            outer["own"] -= float(event["dur"])
            # Under autocast aten::linear gets fp32 inputs and calls itself with 16-bit inputs.
            outer["wrapper"] = outer["wrapper"] or _is_product(node)
    return [node for node in nodes.values() if node["id"] is not None]


def _is_product(operator: dict[str, Any]) -> bool:
    return kind(operator["name"]) in ("gemm", "attention")


def text(table: dict[str, Any], precision: str) -> str:
    if not table["modules"]:
        return f"fp32 under precision={precision}: no module computes in it"
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
