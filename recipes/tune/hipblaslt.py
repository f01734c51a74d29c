"""Tune the matrix products of a recipe with hipblaslt-bench, and measure the gain.

hipBLASLt logs each product of a training step as a command of hipblaslt-bench. Each command is run
again with all kernels, and hipBLASLt writes the fastest to a file (HIPBLASLT_TUNING_FILE). Later
runs read it (HIPBLASLT_TUNING_OVERRIDE_FILE). hipBLASLt ignores a file of another version or GPU.
Source: hipBLASLt, "Using hipBLASLt offline tuning" on rocm.docs.amd.com.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import write_text
from recipes.bench.benchmark import Row
from recipes.rank.program import main, say
from recipes.tune import offline, trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TrainingTuneConfig, training

BENCH = "hipblaslt-bench"
READ, WRITE = "HIPBLASLT_TUNING_OVERRIDE_FILE", "HIPBLASLT_TUNING_FILE"
BENCH_LOG = "32"  # HIPBLASLT_LOG_MASK
REPLAYED = ("--algo_method", "--solution_index")  # the logged kernel, which tuning replaces


@dataclass
class HipblasltConfig(TrainingTuneConfig):
    """Arguments. `solutions`: kernels to time for each product, most promising first; -1: all."""

    solutions: int = field(default=-1, metadata={"minimum": -1})
    cold_iters: int = field(default=50, metadata={"minimum": 0})
    iters: int = field(default=20, metadata={"minimum": 1})


def hipblaslt(config: DictConfig) -> dict[str, Any]:
    args = HipblasltConfig(**OmegaConf.to_container(config.trainer_args))
    nothing = f"{config.hardware.name}: the recipe called no kernel of hipBLASLt."
    if torch.version.hip is None:
        nothing = "This torch has no hipBLASLt. Only a ROCm build can be tuned."
    work = functools.partial(collect, config, args)
    return offline.tune(config, args, "hipblaslt", work, setting_with, nothing)


def setting_with(file: str) -> Setting:
    """Return the setting that makes a run use the tuned file."""
    return Setting(env={READ: file})


def collect(config: DictConfig, args: HipblasltConfig, result: Path) -> Row:
    """Record the products of one step, tune them, and return the step's row.

    Write the path of the tuned file to `result`, if there are products.
    """
    folder = trial.trial_folder(config, offline.COLLECT)
    logged = {"HIPBLASLT_LOG_MASK": BENCH_LOG, "HIPBLASLT_LOG_FILE": str(folder / "calls_%i.log")}
    row = training(config, args, offline.COLLECT, Setting(), logged, steps=1)
    logs = sorted(folder.glob("calls_*.log"))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    products = commands(lines, args)
    row |= {"products": len(products), "tuning_s": None}
    if not products:
        return row
    if shutil.which(BENCH) is None:
        raise UserError(f"{BENCH} is not on the PATH. docs/containers.md says how to install it.")
    tuned, start, failed = folder / "tuned.txt", time.monotonic(), list[str]()
    # With the file of an earlier tuning, hipBLASLt would not search.
    env = {name: value for name, value in os.environ.items() if name != READ}
    env[WRITE] = str(tuned)
    for number, argv in enumerate(products, 1):
        say(f"{number}/{len(products)}  {shlex.join(argv)}")
        try:
            trial.follow(config, argv, env, folder, f"tuning{number}.log")
        except UserError as error:  # a kernel may fail for one product
            failed.append(f"product {number}: {error}")
    if not tuned.is_file():
        raise UserError("; ".join(failed[:1]) or f"{BENCH} wrote no {tuned.name}")
    row["tuning_s"] = time.monotonic() - start
    for line in failed:
        say(f"not tuned: {line}")
    content = tuned.read_text()
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]  # another tuning gets another name
    file = Path(config.tuned.cache) / "hipblaslt" / f"hipblaslt-{digest}.txt"
    write_text(file, content)
    write_text(result, str(file))
    return row


def commands(lines: Iterable[str], args: HipblasltConfig) -> list[list[str]]:
    """Return the command that tunes each distinct product in the lines of hipBLASLt's log."""
    options = f"--algo_method heuristic --requested_solution {args.solutions}"
    options += f" --cold_iters {args.cold_iters} --iters {args.iters}"
    products: dict[tuple[str, ...], None] = {}
    for line in lines:
        _, found, text = line.partition(f"{BENCH} ")
        if not found:
            continue
        words, argv = iter(shlex.split(text)), [BENCH]
        for word in words:
            if word in REPLAYED:
                next(words, None)
            else:
                argv.append(word)
        products[tuple(argv)] = None
    return [[*product, *options.split()] for product in products]


if __name__ == "__main__":
    main(hipblaslt)
