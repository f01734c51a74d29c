"""Coordinate ranks that share work and files, but no gradients."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from recipes.rank.program import rank

Value = TypeVar("Value")
# One rank may work for hours after the others are done.
TIMEOUT = datetime.timedelta(days=1)


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join() -> None:
    """Join all ranks in a gloo group, which needs no GPU. Do nothing for a single rank."""
    if num_ranks() > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)


def rank_share(count: int) -> list[int]:
    """Return this rank's part of the numbers from 0 to `count` - 1."""
    return list(range(rank(), count, num_ranks()))


def broadcast(value: Value | None) -> Value:
    """Return the main rank's `value` on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def all_ranks(flag: bool) -> bool:
    """Return whether `flag` is true on every rank.

    Flags may differ, since a signal may reach one rank before its last batch and another after it.
    """
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags.item())


def single_gpu_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that hide the GPUs of other ranks, since vLLM uses the first visible GPU."""
    local = int(environ.get("LOCAL_RANK", "0"))
    masks = {
        name: environ[name].split(",")
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        if environ.get(name)
    }
    return {name: gpus[local] for name, gpus in masks.items() if len(gpus) > 1} | (
        {"LOCAL_RANK": "0"} if masks else {}
    )
