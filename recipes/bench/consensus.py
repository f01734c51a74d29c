"""Let all ranks, or the first few, measure together, and agree over gloo, which uses no GPU."""

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

# How long ranks wait while others measure; the launcher's watchdog ends a hang much earlier.
PATIENCE = timedelta(hours=2)
GRACE = timedelta(seconds=20)  # ranks that run out of memory together do so within a step

_calls = itertools.count()  # the same numbers on all ranks


class Alone(Exception):
    """This rank failed and others did not; they wait for it in a collective."""


@contextmanager
def joined(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Join torchrun's ranks, over NCCL (RCCL) if they have GPUs, and yield a gloo group of them."""
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        # Also under gloo, because a rank may be in the middle of measuring with the first group.
        yield dist.new_group(backend="gloo", timeout=PATIENCE)
    except (Failed, Interrupted, UserError):
        _leave(device)
        raise
    # Skipped after other errors: it waits for collectives that other ranks may never reach.
    _leave(device)


def _leave(device: torch.device) -> None:
    """Leave NCCL's group; with gloo, recipes.rank.program.main ends the process instead."""
    if device.type == "cuda":
        dist.destroy_process_group()


def slowest(
    control: dist.ProcessGroup, work: Callable[[], dict[str, float]] | None
) -> dict[str, Any]:
    """Return, on every rank, the largest value of each key that the ranks with `work` measured.

    So time is the slowest rank's, and memory is the fullest rank's. Raise OutOfMemoryError or
    UserError on all ranks if all with `work` did, and Alone on a rank that others wait for.
    """
    measured = [figures for figures in agreed(work or (lambda: None), control, GRACE) if figures]
    return {key: max(figures[key] for figures in measured) for key in measured[0]}


def agreed(
    work: Callable[[], Any], group: dist.ProcessGroup | None = None, grace: timedelta = PATIENCE
) -> list[Any]:
    """Return the results of all ranks.

    Raise Interrupted, OutOfMemoryError or UserError on all ranks if one of them did. Raise Alone if
    this rank's `work` failed and the others' has not ended after `grace`.
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
                if "error" in outcome:
                    store.wait([f"ended{mark}/{rank}" for rank in range(len(outcomes))], grace)
            except dist.DistStoreError as late:
                raise Alone(outcome["error"]) from late
        dist.all_gather_object(outcomes, outcome, group=group)
    if any("interrupted" in other for other in outcomes):
        raise Interrupted
    errors = [other["error"] for other in outcomes if "error" in other]
    if errors:
        raise UserError(max(errors)) if max(errors) else torch.OutOfMemoryError()
    return [other["result"] for other in outcomes]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
