"""Run several recipes in turn on two ranks, so that libraries are imported once.

    python -m tests.e2e.two_ranks --config <config.yaml> ...

test_two_ranks.py starts it. Each run leaves its result.json, whatever its exit code.
"""

from __future__ import annotations

import functools
import importlib
import sys

import torch.distributed as dist
from omegaconf import OmegaConf

from recipes.rank import program
from tests.e2e import forked

join_with = dist.init_process_group


def join(number: int, backend: str, **options: object) -> None:
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start{number}", store)
    join_with(backend, store=store, rank=rank, world_size=world_size, **options)


def work() -> int:
    for number, path in enumerate(paths):
        if methods[path].kind == "bench" and dist.is_initialized():
            # Each benchmark joins a new group, whose keys must not collide with the previous one.
            dist.destroy_process_group()
            dist.init_process_group = functools.partial(join, number)
        program.run(works[path], ["--config", path])
        dist.barrier()  # wait for the main rank's files
    return 0


if __name__ == "__main__":
    paths = sys.argv[2:]
    methods = {path: OmegaConf.load(path).method for path in paths}
    works = {
        path: getattr(importlib.import_module(method.program), method.name.rpartition("/")[2])
        for path, method in methods.items()
    }
    sys.exit(forked.run(work, sys.argv))
