"""Tune the matrix products of a recipe with PyTorch's TunableOp, and measure the gain.

TunableOp records the products of a training step, times every kernel of rocBLAS and hipBLASLt for
each product, and writes the fastest ones to a CSV file. This only works on ROCm, because other
builds have a single kernel. The file's folder is mounted in later runs. Its name contains the GPU
and the versions of ROCm, hipBLASLt and torch, because TunableOp rejects files from other versions
(PyTorch, aten/src/ATen/cuda/tunable/README.md). The experiment sets the three variables that
make later runs use the file.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import write_text
from recipes.bench.benchmark import Row
from recipes.rank.program import main
from recipes.tune import offline, trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TrainingTuneConfig, training

FILE = "tunableop.csv"  # TunableOp inserts the GPU's number before the dot
PREFIX = "PYTORCH_TUNABLEOP_"
MAX_GPUS = 8  # per node; each GPU reads its own copy
VERSIONS = ("GCN_ARCH_NAME", "ROCM_VERSION", "HIPBLASLT_VERSION", "PT_VERSION")


@dataclass
class TunableopConfig(TrainingTuneConfig):
    """Arguments. Each kernel is timed until `max_duration_ms` or `max_iterations` is reached."""

    max_duration_ms: int = 30
    max_iterations: int = 100


def tunableop(config: DictConfig) -> dict[str, Any]:
    args = TunableopConfig(**OmegaConf.to_container(config.trainer_args))
    nothing = "Nothing was tuned, because without ROCm torch has only one kernel per product."
    work = functools.partial(collect, config, args)
    return offline.tune(config, args, "tunableop", work, setting_with, nothing)


def collect(config: DictConfig, args: TunableopConfig, result: Path) -> Row:
    """Record the products of one step, tune them in a new process, and return the step's row.

    On ROCm, write the path of the tuned file to `result`.
    """
    folder = trial.trial_folder(config, offline.COLLECT)
    untuned, tuned = folder / "untuned.csv", folder / FILE
    recording = {"ENABLED": "1", "TUNING": "0", "RECORD_UNTUNED": "1"}
    recording |= {"UNTUNED_FILENAME": str(untuned), "FILENAME": str(tuned)}
    env = {f"{PREFIX}{name}": value for name, value in recording.items()}
    row = training(config, args, offline.COLLECT, Setting(), env, steps=1)
    untuned = folder / file_of_gpu(untuned.name, 0)
    row |= {"products": len(products(untuned)), "tuning_s": None}
    if torch.version.hip is None:
        return row
    limits = (str(args.max_duration_ms), str(args.max_iterations))
    argv = [sys.executable, "-m", "recipes.tune.tunableop", "--tune", untuned, tuned, *limits]
    # Without the user's variables, which would override the switches of tune_offline.
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    start = time.monotonic()
    trial.follow(config, [*map(str, argv)], env, folder, "tuning.log")
    row["tuning_s"] = time.monotonic() - start
    cache = add_to_cache(tuned, Path(config.tuned.cache) / "tunableop")
    write_text(result, str(cache / FILE))
    return row


def products(path: Path) -> list[str]:
    """Return the distinct lines of a file that describe matrix products, sorted."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted({line for line in lines if line.startswith(("Gemm", "ScaledGemm"))})


def add_to_cache(tuned: Path, cache: Path) -> Path:
    """Add tuned kernels to the cached file of the same versions, and return its folder.

    The folder is called, for example, gfx942-rocm7.2.0-hipblaslt1.2.0-torch2.13.0, and has a copy
    of the file per GPU. Raise UserError if kernels or versions are missing from `tuned`.
    """
    head = [line for line in tuned.read_text().splitlines() if line.startswith("Validator")]
    kernels, versions = products(tuned), dict(line.split(",", 2)[1:] for line in head)
    missing = [name for name in VERSIONS if name not in versions]
    if missing or not kernels:
        raise UserError(
            f"{tuned}: TunableOp wrote {len(kernels)} kernels. Missing from the file: "
            f"{', '.join(missing) or 'products'}. Enable hipBLASLt."
        )
    gfx, rocm, hipblaslt, torch_version = (
        re.sub(r"[^\w.-]", "-", versions[name].split(":")[0]) for name in VERSIONS
    )
    folder = cache / f"{gfx}-rocm{rocm}-hipblaslt{hipblaslt}-torch{torch_version}"
    names = {tuple(line.split(",")[:2]) for line in kernels}
    existing = products(folder / file_of_gpu(FILE, 0))
    earlier = [line for line in existing if tuple(line.split(",")[:2]) not in names]
    content = "\n".join([*head, *sorted([*earlier, *kernels])]) + "\n"
    for gpu in range(MAX_GPUS):
        write_text(folder / file_of_gpu(FILE, gpu), content)
    return folder


def file_of_gpu(name: str, gpu: int) -> str:
    return name.replace(".", f"{gpu}.", 1)


def setting_with(file: str) -> Setting:
    """Return the setting that makes a run use the tuned file."""
    switches = {"ENABLED": "1", "TUNING": "0", "FILENAME": file}
    return Setting(env={f"{PREFIX}{name}": value for name, value in switches.items()})


def tune_offline(untuned: str, out: str, max_duration_ms: str, max_iterations: str) -> None:
    """Tune the recorded products, and write the results to `out`.

    This needs a new process, because TunableOp reads its switches only once per process.
    """
    from torch.cuda import tunable

    tunable.enable(True)
    tunable.tuning_enable(True)
    tunable.record_untuned_enable(False)
    tunable.set_filename(out, insert_device_ordinal=False)
    tunable.set_max_tuning_duration(int(max_duration_ms))
    tunable.set_max_tuning_iterations(int(max_iterations))
    single, lines = Path(untuned).with_name("one.csv"), products(Path(untuned))
    for number, product in enumerate(lines, 1):
        single.write_text(f"{product}\n")
        tunable.tune_gemm_in_file(str(single))
        print(f"{number}/{len(lines)}  {product}", flush=True)  # the log shows the progress
    torch.cuda.synchronize()
    results = [("Validator", *pair) for pair in tunable.get_validators()] + [*tunable.get_results()]
    Path(out).write_text("".join(",".join(map(str, result)) + "\n" for result in results))


if __name__ == "__main__":
    if "--tune" in sys.argv:
        tune_offline(*sys.argv[2:])
    else:
        main(tunableop)
