"""Run several recipes in turn on one of two ranks, so that libraries are imported once.

    python -m torch.distributed.run ... -m tests.e2e.two_ranks --config <config.yaml> ...

test_two_ranks.py starts it. Each run leaves its result.json, whatever its exit code.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys

import torch.distributed as dist
from omegaconf import OmegaConf

from recipes.rank import program

join_with = dist.init_process_group


def join(number: int, backend: str, **options: object) -> None:
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start{number}", store)
    join_with(backend, store=store, rank=rank, world_size=world_size, **options)


def main() -> None:
    for number, path in enumerate(sys.argv[2:]):
        module = OmegaConf.load(path).method.program
        if module.startswith("recipes.bench.") and dist.is_initialized():
            # Each benchmark joins a new group, whose keys must not collide with the previous one.
            dist.destroy_process_group()
            dist.init_process_group = functools.partial(join, number)
        work = getattr(importlib.import_module(module), module.rpartition(".")[2])
        program.run(work, ["--config", path])
        dist.barrier()  # wait for the main rank's files
    sys.stdout.flush()
    os._exit(0)  # like recipes/rank/program.py with gloo


if __name__ == "__main__":
    main()
