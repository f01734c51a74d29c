"""Exchange results and failures between ranks that measure together, over gloo.

Gloo does not use the GPUs, so ranks that only wait do not disturb the measurement.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launch.core.errors import UserError
from recipes.rank.program import Failed, Interrupted

# Limit for waiting until other ranks have measured. The launcher's watchdog ends a hang earlier.
PATIENCE = timedelta(hours=2)
GRACE = timedelta(seconds=20)  # ranks that all run out of memory do so within the same step

_calls = itertools.count()  # numbers the calls of gather_results, equally on all ranks


class RankFailedAlone(Exception):
    """Only this rank failed, and the others wait for it in a collective."""


@contextmanager
def control_group(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Initialize torch.distributed for torchrun's ranks, and yield a gloo group of all ranks.

    The default group uses NCCL (RCCL) on GPUs, and gloo on a CPU.
    """
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        # A separate group even on a CPU, because a rank may still be using the default group.
        yield dist.new_group(backend="gloo", timeout=PATIENCE)
    except (Failed, Interrupted, UserError):
        _destroy_nccl(device)
        raise
    # After other errors this could hang, because it waits for collectives of other ranks.
    _destroy_nccl(device)


def _destroy_nccl(device: torch.device) -> None:
    """Destroy the NCCL group, if any. With gloo, recipes.rank.program.main exits."""
    if device.type == "cuda":
        dist.destroy_process_group()


def slowest_rank(
    control: dist.ProcessGroup, work: Callable[[], dict[str, float]] | None
) -> dict[str, Any]:
    """Run `work` on the ranks that have it, and return the largest value of each key to all ranks.

    The largest time belongs to the slowest rank. Exceptions are as in `gather_results`.
    """
    measured = [
        figures for figures in gather_results(work or (lambda: None), control, GRACE) if figures
    ]
    return {key: max(figures[key] for figures in measured) for key in measured[0]}


def gather_results(
    work: Callable[[], Any], group: dist.ProcessGroup | None = None, grace: timedelta = PATIENCE
) -> list[Any]:
    """Run `work` on every rank, and return the results of all ranks.

    If one rank raises Interrupted, OutOfMemoryError or UserError, raise it on all ranks. If this
    rank failed and others are still working after `grace`, raise RankFailedAlone.
    """
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = work()
    except Interrupted:
        outcome["interrupted"] = True
    except torch.OutOfMemoryError:
        outcome["error"] = ""
    except UserError as failure:
        outcome["error"] = str(failure)
    outcomes = [outcome]
    if dist.is_initialized():
        outcomes *= dist.get_world_size(group)
        if grace < PATIENCE and len(outcomes) > 1:
            store, mark = next(dist.rendezvous("env://"))[0], next(_calls)
            store.set(f"ended{mark}/{dist.get_rank()}", "")
            try:
                if "error" in outcome:  # the collective below would hang if others still work
                    store.wait([f"ended{mark}/{rank}" for rank in range(len(outcomes))], grace)
            except dist.DistStoreError as late:
                raise RankFailedAlone(outcome["error"]) from late
        dist.all_gather_object(outcomes, outcome, group=group)
    if any("interrupted" in outcome for outcome in outcomes):
        raise Interrupted
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        raise UserError(max(errors)) if max(errors) else torch.OutOfMemoryError()
    return [outcome["result"] for outcome in outcomes]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
