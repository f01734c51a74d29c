"""Several ranks that measure together, all or the first few: they agree over gloo, so that ranks that only wait use no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipes.common.errors import UserError
from recipes.common.program import Failed, Interrupted

PATIENCE = timedelta(hours=2)  # of ranks that wait for others to measure; the launcher's watchdog ends a hang long before


@contextmanager
def joined(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Join the ranks that torchrun started, by NCCL (RCCL) where they have GPUs; yields the gloo group of all."""
    if device.type != "cuda":
        dist.init_process_group("gloo", timeout=PATIENCE)
        yield dist.group.WORLD
        return  # recipes.common.program.main ends an interpreter with gloo in its own way
    dist.init_process_group("nccl", device_id=device)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield control
    except (Failed, Interrupted, UserError):
        dist.destroy_process_group()
        raise
    # Not after another error: it waits for collectives that other ranks may never reach.
    dist.destroy_process_group()


def slowest(control: dist.ProcessGroup, work: Callable[[], dict[str, float]] | None) -> dict[str, Any]:
    """What the ranks with `work` found, the largest value of each key, on every rank; the others (None) wait for it.

    Time is the slowest rank's, memory the fullest one's. Raises OutOfMemoryError or UserError on all ranks where one of them did.
    """
    mine: dict[str, float] | str | None = None
    try:
        mine = work() if work else None
    except torch.OutOfMemoryError:
        mine = ""
    except UserError as refused:
        mine = str(refused)
    found: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(found, mine, group=control)
    errors = [one for one in found if isinstance(one, str)]
    if errors:
        raise UserError(max(errors)) if max(errors) else torch.OutOfMemoryError()
    measured = [one for one in found if one is not None]
    return {key: max(one[key] for one in measured) for key in measured[0]}
