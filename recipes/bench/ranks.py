"""Let all ranks, or the first few, measure together; they agree over gloo, which uses no GPU.

If only one rank runs out of memory, the others wait for it in a collective operation, which NCCL
and gloo cannot abandon. Every rank then restarts its program in the same process, still under
torchrun; the row has failed and the series continues.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launch.core.errors import UserError
from recipes.bench.series import ROW_ERROR
from recipes.rank.program import Failed, Interrupted

# How long ranks wait while others measure; the launcher's watchdog ends a hang much earlier.
PATIENCE = timedelta(hours=2)
GRACE_S = 20.0  # ranks that run out of memory together do so within a step, and then agree
POLL_S = 0.5
STARTS = "RECIPES_STARTS"  # number of restarts of this rank's program
_rows = itertools.count()  # counts alike on all ranks


@contextmanager
def joined(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Join torchrun's ranks, over NCCL (RCCL) if they have GPUs, and yield a gloo group of them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    same: dict[str, Any] = {"store": _store(), "rank": rank, "world_size": size}
    if device.type != "cuda":
        dist.init_process_group("gloo", timeout=PATIENCE, **same)
        # A second group, because a rank may be in the middle of measuring with the first.
        yield dist.new_group(backend="gloo", timeout=PATIENCE)
        return  # recipes.rank.program.main ends the process; a normal exit with gloo may abort
    dist.init_process_group("nccl", device_id=device, **same)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield control
    except (Failed, Interrupted, UserError):
        dist.destroy_process_group()
        raise
    # Skipped after other errors: it waits for collectives that other ranks may never reach.
    dist.destroy_process_group()


def slowest(
    control: dist.ProcessGroup, work: Callable[[], dict[str, float]] | None
) -> dict[str, Any]:
    """Return, on every rank, the largest value of each key that the ranks with `work` measured.

    So time is the slowest rank's, and memory is the fullest rank's. Raise OutOfMemoryError or
    UserError on all ranks if one of them did. If other ranks are stuck, all restart instead.
    """
    with _watched() as report:
        by_rank = agreed(work or (lambda: None), control, report)
    measured = [figures for figures in by_rank if figures is not None]
    return {key: max(figures[key] for figures in measured) for key in measured[0]}


def agreed(
    work: Callable[[], Any],
    group: dist.ProcessGroup | None = None,
    on_error: Callable[[str], None] = lambda error: None,
) -> list[Any]:
    """Return the results of all ranks.

    Raise Interrupted, OutOfMemoryError or UserError on all ranks if one of them did.
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
    if "error" in outcome:
        on_error(outcome["error"])
    outcomes = [outcome]
    if dist.is_initialized():
        outcomes = [{}] * dist.get_world_size(group)
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


def _store() -> dist.Store:
    """Return torchrun's store, with a prefix, because an earlier start's addresses are invalid."""
    store = next(dist.rendezvous("env://"))[0]
    return dist.PrefixStore(f"start{os.environ.get(STARTS, '0')}", store)


@contextmanager
def _watched() -> Iterator[Callable[[str], None]]:
    """Yield a function that reports a failure to other ranks; restart after a reported failure.

    This rank restarts only if the block has not ended GRACE_S after the failure.
    """
    key, ended = f"failed{next(_rows)}", threading.Event()
    if dist.get_world_size() == 1:
        yield lambda error: None
        return
    theirs, mine = _store(), _store()  # a connection serves one thread at a time

    def watch() -> None:
        while not ended.wait(POLL_S):
            if theirs.check([key]):
                if not ended.wait(GRACE_S):
                    restart(theirs.get(key).decode())
                return

    thread = threading.Thread(target=watch, name="failures of other ranks", daemon=True)
    thread.start()
    try:
        yield lambda error: mine.set(key, error)
    finally:
        ended.set()
        thread.join()


def restart(error: str) -> None:
    """Restart the program in this process, which ends its threads and frees its GPU memory."""
    os.environ[ROW_ERROR] = error
    os.environ[STARTS] = str(int(os.environ.get(STARTS, "0")) + 1)
    reason = f"only one rank failed ({error or 'out of memory'})"
    print(f"{reason}: all restart at the next row", file=sys.stderr, flush=True)
    os.execv(sys.executable, sys.orig_argv)
