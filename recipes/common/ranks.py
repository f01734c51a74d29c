"""Several ranks that share work and files, and no gradients: each takes batches in turn, one has the last word."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from recipes.common.program import rank

Told = TypeVar("Told")
WAIT = datetime.timedelta(days=1)  # one of them may have hours of work left when the others are done


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join() -> None:
    """The group of all ranks; of a single one nothing. gloo: a word now and then, which needs no GPU."""
    if num_ranks() > 1:
        dist.init_process_group("gloo", timeout=WAIT)


def mine(number: int) -> list[int]:
    """Of things 0 to `number` - 1 those of this rank."""
    return list(range(rank(), number, num_ranks()))


def from_main(value: Told | None) -> Told:
    """What the main rank gives, on every rank; the others' `value` is not looked at."""
    told = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    return told[0]


def on_all(flag: bool) -> bool:
    """Whether it holds on every rank: a signal may reach one in the middle of its batches and another after its last."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags.item())


def own_gpu(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that leave this rank its own GPU: vLLM's process takes the first that it sees."""
    local = int(environ.get("LOCAL_RANK", "0"))
    masks = {name: environ[name].split(",") for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if environ.get(name)}
    return {name: gpus[local] for name, gpus in masks.items() if len(gpus) > 1} | ({"LOCAL_RANK": "0"} if masks else {})
