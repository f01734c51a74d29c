"""Several ranks that measure together, all or the first few: they agree over gloo, so that ranks that only wait use no GPU.

Where one of them runs out of memory alone, the others wait in a collective operation that it never reaches, and NCCL and gloo let nobody
out of one. So every rank starts its own program anew, in its process, under torchrun as before: the row has failed, the series goes on.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipes.bench.series import ROW_ERROR
from recipes.common.errors import UserError
from recipes.common.program import Failed, Interrupted

PATIENCE = timedelta(hours=2)  # of ranks that wait for others to measure; the launcher's watchdog ends a hang long before
GRACE_S = 20.0  # from a rank's failure: ranks that run out of memory together do so within a step, and then all agree
POLL_S = 0.5
STARTS = "RECIPES_STARTS"  # of this rank's program in its process
_rows = itertools.count()  # the same on all ranks


@contextmanager
def joined(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Join the ranks that torchrun started, by NCCL (RCCL) where they have GPUs; yields the gloo group of all."""
    store, rank, size = _store()
    same: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
    if device.type != "cuda":
        dist.init_process_group("gloo", timeout=PATIENCE, **same)
        yield dist.new_group(backend="gloo", timeout=PATIENCE)  # not the one that they measure with: one may be in the middle of that
        return  # recipes.common.program.main ends an interpreter with gloo in its own way
    dist.init_process_group("nccl", device_id=device, **same)
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

    Time is the slowest rank's, memory the fullest one's. Raises OutOfMemoryError or UserError on all ranks where one of them did; where the
    others do not hear of it, because they wait for that one, none returns: they start anew.
    """
    mine: dict[str, float] | str | None = None
    with _watched() as tell:
        try:
            mine = work() if work else None
        except torch.OutOfMemoryError:
            mine = ""
        except UserError as refused:
            mine = str(refused)
        if isinstance(mine, str):
            tell(mine)
        found: list[Any] = [None] * dist.get_world_size(control)
        dist.all_gather_object(found, mine, group=control)
    errors = [one for one in found if isinstance(one, str)]
    if errors:
        raise UserError(max(errors)) if max(errors) else torch.OutOfMemoryError()
    measured = [one for one in found if one is not None]
    return {key: max(one[key] for one in measured) for key in measured[0]}


def _store() -> tuple[dist.Store, int, int]:
    """torchrun's, with rank and number of ranks. Of each start under names of its own: addresses of an earlier one are no longer true."""
    store, rank, size = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"start{os.environ.get(STARTS, '0')}", store), rank, size


@contextmanager
def _watched() -> Iterator[Callable[[str], None]]:
    """Yields what a rank tells the others its failure with. Where one has failed and the block does not end, the program starts anew."""
    key, ended = f"failed{next(_rows)}", threading.Event()
    if dist.get_world_size() == 1:
        yield lambda error: None
        return
    theirs, mine = _store()[0], _store()[0]  # a connection serves one thread at a time

    def watch() -> None:
        while not ended.wait(POLL_S):
            if theirs.check([key]):
                if not ended.wait(GRACE_S):
                    _start_anew(theirs.get(key).decode())
                return

    thread = threading.Thread(target=watch, name="failures of other ranks", daemon=True)
    thread.start()
    try:
        yield lambda error: mine.set(key, error)
    finally:
        ended.set()
        thread.join()


def _start_anew(error: str) -> None:
    """This program in place of itself: its threads, wherever they wait, and its GPU memory are gone with it."""
    os.environ[ROW_ERROR] = error
    os.environ[STARTS] = str(int(os.environ.get(STARTS, "0")) + 1)
    print(f"one rank alone has failed ({error or 'out of memory'}): all start anew with the next row", file=sys.stderr, flush=True)
    os.execv(sys.executable, sys.orig_argv)
