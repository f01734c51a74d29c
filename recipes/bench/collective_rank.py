"""Measure collectives as one rank of bench/collectives, with one set of environment variables.

recipes/bench/collectives.py starts a new process for each set, because RCCL and NCCL read most
variables only once per process (NCCL caches them in src/misc/param.cc). The process receives cases
and sends results through the connection whose descriptor is in its argument.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from recipes.bench.timing import steps_ms
from recipes.rank.device import DTYPES

SUMS = ("all_reduce", "reduce_scatter")
# Limits of the values that check results. bf16 has 8 bits of mantissa, so it represents exactly
# every integer below 101, and every sum over up to 64 ranks of integers below 5.
SUMMED_BELOW, MOVED_BELOW = 5, 101
# torch 2.13 renamed these two.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
BLOCK = 1 << 24  # elements that are filled or compared at once, to limit memory


def main(connection: Connection, ranks: list[int], timeout_s: float, use_cpu: bool) -> None:
    try:
        device = torch.device("cpu")
        if not use_cpu:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        backend = "gloo" if use_cpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        groups = {n: dist.new_group(range(n)) if n < dist.get_world_size() else None for n in ranks}
        while True:
            case = connection.recv()
            connection.send(measure_case(case, groups[case["ranks"]], device))
    except EOFError:  # there are no more cases
        pass
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        ends = dict.fromkeys([f"{type(error).__name__}: {lines[0]}", *lines[-1:]])
        connection.send({"error": " ".join(ends)})
    sys.stdout.flush()
    sys.stderr.flush()
    # Because of gloo's threads, one in six normal exits aborts (see recipes/rank/program.py).
    os._exit(0)


def measure_case(
    case: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Any]:
    """Return `ms` per call and the number of `wrong` elements, the largest of all ranks.

    If a rank runs out of memory, return an `error` instead. All ranks call this; those beyond the
    first case["ranks"] only wait.
    """
    collective, out_of_memory = None, False
    try:
        if dist.get_rank() < case["ranks"]:
            collective = Collective(case, group, device)
    except torch.OutOfMemoryError:
        out_of_memory = True
    if highest(out_of_memory):  # checked now, because ranks would wait for one without buffers
        del collective
        return {"error": "out of memory"}
    wrong = ms = 0.0
    if collective is not None:
        wrong = collective.wrong()
        collective.prepare()
        highest(0.0, group)  # a barrier, so that all ranks start together
        ms = steps_ms(collective.call, device, case["warmup"], case["repetitions"])
    del collective
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next size may need all memory
    return {"ms": highest(ms), "wrong": int(highest(wrong))}


class Collective:
    """One operation and its buffers.

    case["bytes"] is the size that nccl-tests reports: the whole array on one rank.
    """

    def __init__(
        self, case: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.op, self.ranks, self.rank = case["op"], case["ranks"], dist.get_rank()
        dtype = DTYPES[case["dtype"]]
        self.chunk = case["bytes"] // dtype.itemsize // self.ranks
        inputs = self.chunk * (1 if self.op == "all_gather" else self.ranks)
        outputs = self.chunk * (1 if self.op == "reduce_scatter" else self.ranks)
        self.input = self.output = torch.empty(inputs, dtype=dtype, device=device)
        if self.op not in ("all_reduce", "broadcast"):
            self.output = torch.empty(outputs, dtype=dtype, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(self.output, group=group),
            "all_gather": lambda: GATHER(self.output, self.input, group=group),
            "reduce_scatter": lambda: SCATTER(self.output, self.input, group=group),
            "all_to_all": lambda: dist.all_to_all_single(self.output, self.input, group=group),
            "broadcast": lambda: dist.broadcast(self.output, 0, group=group),
        }
        self.call = calls[self.op]

    def wrong(self) -> int:
        """Call once, and return the number of elements of this rank's result that are not exact."""
        for part, index in blocks(self.input):
            part.copy_(self._sent(index, self.rank))
        if self.output is not self.input:
            # The memory may still contain the correct result of an earlier call.
            self.output.fill_(-1)
        self.call()
        return int(
            sum((part != self._expected(index)).sum() for part, index in blocks(self.output))
        )

    def prepare(self) -> None:
        """Fill the buffers with normal values, or with zeros if repeated calls would add up."""
        if self.op == "all_reduce":
            self.output.zero_()
        else:
            self.input.normal_()

    def _sent(self, index: torch.Tensor, rank: torch.Tensor | int) -> torch.Tensor:
        """Return a rank's input at these indices. Adjacent elements differ, and so do ranks."""
        return (index + rank) % (SUMMED_BELOW if self.op in SUMS else MOVED_BELOW)

    def _expected(self, index: torch.Tensor) -> torch.Tensor:
        source, within = index // self.chunk, index % self.chunk
        if self.op in SUMS:
            at = index + (self.rank * self.chunk if self.op == "reduce_scatter" else 0)
            values = torch.zeros_like(index)
            for rank in range(self.ranks):
                values += self._sent(at, rank)
        elif self.op == "all_gather":
            values = self._sent(within, source)
        elif self.op == "all_to_all":
            values = self._sent(self.rank * self.chunk + within, source)
        else:
            values = self._sent(index, 0)
        return values.to(self.output.dtype)


def blocks(buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of a buffer with the indices of their elements, which take eight bytes each."""
    for part, start in zip(buffer.split(BLOCK), range(0, len(buffer), BLOCK), strict=True):
        yield part, torch.arange(start, start + len(part), device=buffer.device)


def highest(value: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the largest value of all ranks. Gloo exchanges them, so the GPU stays idle."""
    shared = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return float(shared)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    main(Connection(options.pop("descriptor")), **options)
