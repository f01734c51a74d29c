"""PyTorch's TunableOp for a recipe: collect the matrix products of its steps, time every kernel of rocBLAS and hipBLASLt for each, keep the
fastest in a CSV file, and measure a step with and without it. ROCm only: elsewhere TunableOp has one kernel to choose from.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=tune/tunableop model=qwen3_4b

The file is kept by GPU, ROCm and hipBLASLt, in a folder that later runs and their containers see. TunableOp itself refuses one that
another version has written (PyTorch, aten/src/ATen/cuda/tunable/README.md), so it is looked up by these versions. A later run takes it by
the three variables that the experiment sets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from recipes.bench.series import Column, Row, Table, measure_rows, show
from recipes.common.errors import UserError
from recipes.common.files import write_json
from recipes.common.program import Failed, main
from recipes.tune import trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, require_first, trial_data

FILE = "tunableop.csv"  # TunableOp puts the number of the process's GPU before the point
MOST_GPUS = 8  # of a node, each of which reads a copy of its own
WITHOUT, COLLECT, WITH = "without", "collect", "with"
VERSIONS = ("GCN_ARCH_NAME", "ROCM_VERSION", "HIPBLASLT_VERSION", "PT_VERSION")


@dataclass
class TunableopConfig(TrainingTuneConfig):
    """`max_duration_ms`: for timing one kernel; `max_iterations`: calls of it, whichever is over first. Raises UserError."""

    max_duration_ms: int = 30
    max_iterations: int = 100


def tunableop(config: DictConfig) -> dict[str, Any]:
    args = TunableopConfig(**OmegaConf.to_container(config.trainer_args))
    table = Table(
        "tunableop",
        figure="tokens_per_second",
        columns=[Column("run", "run"), *TRAINING, Column("products", "products"), Column("tuning_s", "tuning s", 0)],
    )
    own = config.tuned.trainer_args
    data = trial_data(config, args, own.per_device_train_batch_size * own.get("gradient_accumulation_steps", 1))
    result = trial.folder_of(config, COLLECT) / "tuned.json"

    def work(case: Row) -> Row:
        require_first(rows)
        if case["run"] == COLLECT:
            return collect(config, args, data, result)
        setting = used(result) if case["run"] == WITH else Setting()
        return trial.training(config, case["run"], setting, args.steps, args.warmup, data)

    rows: list[Row] = []
    measure_rows(config, args, table, [{"run": WITHOUT}, {"run": COLLECT}], work, rows)
    if any(row["error"] for row in rows):
        show(table, rows, config.hardware.name, [])
        raise Failed(f"nothing was tuned: {rows[0]['error'] or rows[1]['error']}", tuning=table.benchmark, rows=rows)
    if not result.exists():
        why = "Nothing was tuned: this torch is not built for ROCm, and has no other kernels to choose from."
        return finish(config, table, rows[:1], rows[0], [Setting()], [why])
    rows = []
    measure_rows(config, args, table, [{"run": run} for run in (WITHOUT, COLLECT, WITH)], work, rows)
    kept = f"Tuned products are in {json.loads(result.read_text())['file']}, with the GPU's number before the point."
    after = {**rows[2], "products": rows[1]["products"], "tuning_s": rows[1]["tuning_s"]}
    return finish(config, table, [rows[0], after], rows[0], [Setting(), used(result)], [kept])


def collect(config: DictConfig, args: TunableopConfig, data: dict[str, Any], result: Path) -> Row:
    """Write down the products of one step, tune them in a process of its own, and keep what it found."""
    untuned = trial.folder_of(config, COLLECT) / "untuned.csv"
    # The trial makes its folder anew, so the file's path is known before it exists.
    recording = {
        "ENABLED": "1",
        "TUNING": "0",
        "RECORD_UNTUNED": "1",
        "UNTUNED_FILENAME": str(untuned),
        "FILENAME": str(untuned.with_name(FILE)),
    }
    env = {f"PYTORCH_TUNABLEOP_{name}": value for name, value in recording.items()}
    row = trial.training(config, COLLECT, Setting(), 1, args.warmup, data, env)
    found = products(untuned.with_name("untuned0.csv"))
    if torch.version.hip is None:
        return {**row, "products": len(found), "tuning_s": None}
    if not found:
        raise UserError("the recipe's steps made no matrix product that TunableOp knows")
    tuned = untuned.with_name(FILE)
    argv = [sys.executable, "-m", "recipes.tune.tunableop", "--tune", str(untuned.with_name("untuned0.csv")), "--out", str(tuned)]
    argv += ["--max-duration-ms", str(args.max_duration_ms), "--max-iterations", str(args.max_iterations)]
    argv += ["--said", str(untuned.with_name("said.json"))]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_TUNABLEOP_")}  # they win over the program
    error = trial.follow(config, argv, env, untuned.parent, "tuning.log").error
    if error:
        raise UserError(f"tuning failed: {error}")
    said = json.loads(untuned.with_name("said.json").read_text())
    folder = keep(tuned, said["validators"], Path(config.tuned.cache) / "tunableop")
    write_json(result, {"file": str(folder / FILE), "products": len(found), "tuning_s": said["time_s"]})
    return {**row, "products": len(found), "tuning_s": said["time_s"]}


def products(path: Path) -> list[str]:
    """The lines of an untuned file, each once."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted({line for line in lines if line.startswith(("Gemm", "ScaledGemm"))})


def keep(tuned: Path, validators: list[list[str]], cache: Path) -> Path:
    """Add what was tuned to the file of these versions, a copy for each GPU of a node; returns their folder. Raises UserError."""
    if not products(tuned):
        raise UserError(f"{tuned}: tuning wrote no kernel")
    folder = cache / key(validators)
    folder.mkdir(parents=True, exist_ok=True)
    kept, fresh = folder / numbered(FILE, 0), products(tuned)
    head = [line for line in tuned.read_text().splitlines() if line.startswith("Validator")]
    names = {tuple(line.split(",")[:2]) for line in fresh}
    earlier = [line for line in products(kept) if tuple(line.split(",")[:2]) not in names]  # of other recipes
    content = "\n".join([*head, *sorted([*earlier, *fresh])]) + "\n"
    for gpu in range(MOST_GPUS):
        staged = folder / f".{gpu}.staged"
        staged.write_text(content)
        staged.replace(folder / numbered(FILE, gpu))
    return folder


def key(validators: list[list[str]]) -> str:
    """A folder's name from the versions that a file is bound to: gfx942-rocm7.2.0-hipblaslt1.2.0-torch2.13.0."""
    found = dict(validators)
    missing = [name for name in VERSIONS if name not in found]
    if missing:
        raise UserError(f"TunableOp names no {', '.join(missing)}: is hipBLASLt switched off?")
    gfx, rocm, hipblaslt, torch_version = (re.sub(r"[^\w.-]", "-", found[name].split(":")[0]) for name in VERSIONS)
    return f"{gfx}-rocm{rocm}-hipblaslt{hipblaslt}-torch{torch_version}"


def numbered(name: str, gpu: int) -> str:
    return name.replace(".", f"{gpu}.", 1)


def used(result: Path) -> Setting:
    """What makes a run take the file."""
    file = json.loads(result.read_text())["file"]
    return Setting(env={f"PYTORCH_TUNABLEOP_{name}": value for name, value in (("ENABLED", "1"), ("TUNING", "0"), ("FILENAME", file))})


def tune_offline(argv: list[str]) -> None:
    """In a process of its own: the recipe's has recorded, and TunableOp reads its switches once."""
    import time

    from torch.cuda import tunable

    parser = argparse.ArgumentParser(description="Tunes the products of an untuned file; recipes.tune.tunableop starts it.")
    parser.add_argument("--tune", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--said", required=True)
    parser.add_argument("--max-duration-ms", type=int, required=True)
    parser.add_argument("--max-iterations", type=int, required=True)
    given = parser.parse_args(argv)
    began = time.monotonic()
    tunable.enable(True)
    tunable.tuning_enable(True)
    tunable.record_untuned_enable(False)
    tunable.set_filename(given.out, insert_device_ordinal=False)
    tunable.set_max_tuning_duration(given.max_duration_ms)
    tunable.set_max_tuning_iterations(given.max_iterations)
    for number, product in enumerate(found := products(Path(given.tune)), 1):
        one = Path(given.tune).with_name("one.csv")
        one.write_text(f"{product}\n")
        tunable.tune_gemm_in_file(str(one))
        print(f"{number}/{len(found)}  {product}", flush=True)  # a log that grows is what shows that it gets on
    torch.cuda.synchronize()
    results = tunable.get_results()
    validators = [list(pair) for pair in tunable.get_validators()]
    lines = [f"Validator,{name},{value}" for name, value in validators]
    lines += [",".join(map(str, one)) for one in results]
    Path(given.out).write_text("\n".join(lines) + "\n")
    write_json(Path(given.said), {"validators": validators, "time_s": time.monotonic() - began})


if __name__ == "__main__":
    if "--tune" in sys.argv:
        tune_offline(sys.argv[1:])
    else:
        main(tunableop)
