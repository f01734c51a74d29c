"""One rank of a collective benchmark under one set of environment variables: recipes/bench/collectives.py starts it anew for each set.

RCCL and NCCL read most of their variables once in a process and keep them (NCCL's src/misc/param.cc: a static cache for each), so that
nothing but a fresh process has another value. A case comes as a line of JSON on stdin, its figures go as one to the descriptor of --reply.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist

from recipes.bench.timing import steps_ms

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SUMS = ("all_reduce", "reduce_scatter")
# Values of the check. 8 bits of mantissa hold every sum over up to 64 ranks of numbers below 5, and every number below 101.
SUMMED_BELOW, MOVED_BELOW = 5, 101
# torch 2.13 gave these two other names.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
BLOCK = 1 << 24  # elements that are filled or compared at once, beside the buffers themselves


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of method=bench/collectives; recipes.bench.collectives starts it.")
    parser.add_argument("--reply", type=int, required=True, help="descriptor that answers are written to")
    parser.add_argument("--timeout-s", type=float, required=True, help="of each collective")
    parser.add_argument("--ranks", type=int, nargs="+", required=True, help="numbers of ranks that are asked for")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    with os.fdopen(given.reply, "w") as reply:
        try:
            serve(given, reply)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            _answer(reply, {"error": " ".join(dict.fromkeys([f"{type(error).__name__}: {lines[0]}", *lines[-1:]]))})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort one interpreter in six that ends by itself (recipes/common/program.py)


def serve(given: argparse.Namespace, reply: TextIO) -> None:
    device = torch.device("cpu") if given.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if given.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=given.timeout_s))
    groups = {ranks: dist.new_group(range(ranks)) if ranks < dist.get_world_size() else None for ranks in given.ranks}
    for line in sys.stdin:
        case = json.loads(line)
        _answer(reply, measured(case, groups[case["ranks"]], device))


def measured(case: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    """`ms` of one call on the slowest rank and `wrong`, the elements that are not what they must be; or the `error` of any rank.

    Every rank takes part; one that is not among the first `ranks` waits for the others.
    """
    taking_part = dist.get_rank() < case["ranks"]
    collective, short = None, False
    try:
        collective = Collective(case, group, device) if taking_part else None
    except torch.OutOfMemoryError:
        short = True
    if highest(short):  # before anyone waits for a rank that has no buffers
        del collective
        return {"error": "out of memory"}
    wrong = ms = 0.0
    if collective is not None:
        wrong = collective.wrong()
        collective.prepare()
        highest_of_group(group)  # all begin at once
        ms = steps_ms(collective.call, device, case["warmup"], case["repetitions"])
    del collective
    if device.type == "cuda":
        torch.cuda.empty_cache()  # buffers of the next size stand alone
    return {"ms": highest(ms), "wrong": int(highest(wrong))}


class Collective:
    """One operation on its buffers. `bytes` is the size that nccl-tests counts: what one rank holds of the whole array."""

    def __init__(self, case: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.op, self.ranks, self.rank = case["op"], case["ranks"], dist.get_rank()
        dtype = DTYPES[case["dtype"]]
        self.chunk = case["bytes"] // dtype.itemsize // self.ranks
        whole, chunk = self.chunk * self.ranks, self.chunk
        inputs = {"all_gather": chunk}.get(self.op, whole)
        outputs = {"reduce_scatter": chunk}.get(self.op, whole)
        self.input = torch.empty(inputs, dtype=dtype, device=device)
        self.output = self.input if self.op in ("all_reduce", "broadcast") else torch.empty(outputs, dtype=dtype, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(self.output, group=group),
            "all_gather": lambda: GATHER(self.output, self.input, group=group),
            "reduce_scatter": lambda: SCATTER(self.output, self.input, group=group),
            "all_to_all": lambda: dist.all_to_all_single(self.output, self.input, group=group),
            "broadcast": lambda: dist.broadcast(self.output, 0, group=group),
        }
        self.call = calls[self.op]

    def wrong(self) -> int:
        """Elements of one call's result that are not exactly what they must be, over whole buffers."""
        for part, index in blocks(self.input):
            part.copy_(self._sent(index, self.rank))
        if self.output is not self.input:
            self.output.fill_(-1)  # the allocator may give memory that still holds the right result of a call before
        self.call()
        return int(sum((part != self._expected(index)).sum() for part, index in blocks(self.output)))

    def prepare(self) -> None:
        """Values to be timed with: normal ones; zeros where each call adds to what the last one left."""
        if self.op == "all_reduce":
            self.output.zero_()
        else:
            self.input.normal_()

    def _sent(self, index: torch.Tensor, rank: torch.Tensor | int) -> torch.Tensor:
        """What stands at these places of a rank's input: no two neighbours, and no two ranks, have the same."""
        return (index + rank) % (SUMMED_BELOW if self.op in SUMS else MOVED_BELOW)

    def _expected(self, index: torch.Tensor) -> torch.Tensor:
        source, within = index // self.chunk, index % self.chunk
        if self.op in SUMS:
            at = index + (self.rank * self.chunk if self.op == "reduce_scatter" else 0)
            return sum((self._sent(at, rank) for rank in range(self.ranks)), torch.zeros_like(index)).to(self.output.dtype)
        if self.op == "all_gather":
            return self._sent(within, source).to(self.output.dtype)
        if self.op == "all_to_all":
            return self._sent(self.rank * self.chunk + within, source).to(self.output.dtype)
        return self._sent(index, 0).to(self.output.dtype)


def blocks(buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a buffer, each with the places it stands at: eight bytes a place, so not all at once."""
    for at in range(0, len(buffer), BLOCK):
        yield buffer[at : at + BLOCK], torch.arange(at, min(at + BLOCK, len(buffer)), device=buffer.device)


def highest(value: float) -> float:
    """Over all ranks, by gloo: the GPU does nothing."""
    return _highest(value, None)


def highest_of_group(group: dist.ProcessGroup | None) -> None:
    _highest(0.0, group)


def _highest(value: float, group: dist.ProcessGroup | None) -> float:
    shared = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return float(shared)


def _answer(reply: TextIO, content: dict[str, Any]) -> None:
    reply.write(json.dumps(content) + "\n")
    reply.flush()


if __name__ == "__main__":
    main()
