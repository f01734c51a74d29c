"""Compare predicted with measured memory and speed: docs/results/memory.md and speed.md.

    python tests/gpu/predictions.py measure hardware=h200 --gpus 2
                            writes runs/predictions/h200/predictions.jsonl
    python tests/gpu/predictions.py predict hardware=h100
                            prints the lines of docs/results/predicted.jsonl; needs no GPU
    python tests/gpu/predictions.py report
                            prints docs/results/predictions.jsonl as tables; needs no GPU

HELD_OUT lists configurations that have not been measured. The planner's formulas are fixed before
the measurement, and each measured row contains the prediction of that time. After the measurement,
formulas may be fitted to the rows, and new configurations replace the old ones here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch.config.choose import choose
from launch.config.compose import compose
from launch.estimate import activations, memory
from launch.estimate import speed as planner_speed
from launch.estimate.rank_memory import generates_with_vllm
from launch.estimate.speed import estimate_speed
from launch.machine import detect, placement
from launch.plan.planning import prepare
from launch.schema import Config
from launch.schema.enums import Head
from launch.schema.plan import Memory, Speed
from tests.gpu.jobs import Job, rows_of, run, step_s

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/results/predictions.jsonl"
STEPS = {"sft": 6, "dpo": 6, "grpo": 6}
LONG_ENOUGH = 60  # steps after which speed=auto compiles
# name: (GPUs, overrides). `batch` is the batch of one rank; the default of `accumulation` is 1.
# docs/results/predictions.jsonl has the measured configurations, to which constants are fitted.
HELD_OUT: dict[str, tuple[int, str]] = {
    "grpo-1.7b-colocate": (1, "grpo qwen3_1_7b batch=16 topology=colocate"),
    "grpo-0.6b-split-2": (2, "grpo qwen3_0_6b batch=16 topology=split accumulation=2"),
    "sft-1.7b-ddp-4": (4, "sft qwen3_1_7b batch=2 max_length=4096 topology=ddp"),
    "sft-4b-fsdp-4": (4, "sft qwen3_4b batch=2 max_length=4096 topology=fsdp"),
    "sft-8b-zero2-4": (4, "sft qwen3_8b batch=1 max_length=4096 topology=zero2"),
    "sft-1.7b-zero3-4": (4, "sft qwen3_1_7b batch=4 max_length=2048 topology=zero3"),
    "dpo-4b-fsdp-4": (4, "dpo qwen3_4b batch=2 max_length=1024 topology=fsdp"),
    "grpo-1.7b-split-4": (4, "grpo qwen3_1_7b batch=16 topology=split"),
    # Settings that speed=auto chooses, except the micro-batch, because `batch` is set.
    "sft-4b-auto": (1, "sft qwen3_4b batch=4 max_length=4096 speed=auto"),
    "sft-4b-16-bits-plain-auto": (
        1,
        "sft qwen3_4b batch=2 max_length=4096 plain precision.weights=bf16 speed=auto",
    ),
    "sft-4b-fp8-plain-auto": (
        1,
        "sft qwen3_4b batch=2 max_length=4096 plain precision=fp8 precision.weights=bf16 "
        "speed=auto",
    ),
    "sft-0.6b-auto": (1, "sft qwen3_0_6b batch=8 max_length=2048 speed=auto"),
    "sft-8b-lora-auto": (
        1,
        "sft qwen3_8b batch=2 max_length=4096 adapter=lora precision.weights=bf16 speed=auto",
    ),
    "dpo-1.7b-auto": (1, "dpo qwen3_1_7b batch=4 max_length=1024 speed=auto"),
    "sft-4b-ddp-2-auto": (2, "sft qwen3_4b batch=2 max_length=4096 topology=ddp speed=auto"),
    "sft-4b-fsdp-2-auto": (2, "sft qwen3_4b batch=2 max_length=4096 topology=fsdp speed=auto"),
}


def job(name: str) -> Job:
    """Return the job that measures a configuration of HELD_OUT."""
    gpus, words = HELD_OUT[name]
    method, model, *rest = words.split()
    steps = LONG_ENOUGH if "speed=auto" in rest else STEPS[method]
    overrides = f"method={method} model={model} topology.num_gpus={gpus}".split()
    overrides.append(f"method.args.max_steps={steps}")
    for default in ("speed=off", "topology=single", "accumulation=1", "precision=bf16"):
        key, _, _ = default.partition("=")
        if not any(word.startswith(f"{key}=") for word in rest):
            rest.append(default)
    short = {
        "batch": "method.args.per_device_train_batch_size",
        "max_length": "method.args.max_length",
        "accumulation": "method.args.gradient_accumulation_steps",
    }
    for word in rest:
        key, _, value = word.partition("=")
        plain = "method.args.gradient_checkpointing=false"
        overrides.append(plain if word == "plain" else f"{short.get(key, key)}={value}")
    if method == "grpo":
        overrides += ["~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0"]
        overrides.append("method.args.max_completion_length=512")
        split = "topology=split" in rest
        longest = "topology.server_max_length" if split else "method.args.vllm_max_model_length"
        overrides.append(f"{longest}=1024")
    lengths = [int(word.partition("=")[2]) for word in rest if word.startswith("max_length=")]
    return Job(name, gpus, overrides, "long" if max(lengths, default=0) > 4096 else method)


def measure(hardware: str, gpus: int, only: list[str] | None, folder: Path, seconds: float) -> None:
    jobs = sorted(
        (job(name) for name in HELD_OUT if not only or any(word in name for word in only)),
        key=lambda j: -j.gpus,
    )
    fitting = [j for j in jobs if j.gpus <= gpus]
    run(fitting, hardware, folder.resolve(), gpus, time.monotonic() + seconds)
    lines = []
    for measured_job in jobs:
        rows = rows_of(measured_job, folder)
        if not rows:
            continue
        row: dict[str, Any] = {"name": measured_job.name, "held_out": True}
        row["peak_gb"] = round(max(r["memory_peak_gb"] for r in rows), 3)
        if "offload" not in measured_job.name:  # the planner does not predict offloaded optimizers
            row["step_s"] = round(step_s(rows), 4)
        overrides = [hardware, "model.init=random", *measured_job.overrides]
        row |= {"head": "own", "overrides": overrides}
        row["predicted"] = figures(*planned(row["overrides"]))
        lines.append(json.dumps(row))
    (folder / "predictions.jsonl").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def figures(memory: Memory, speed: Speed) -> dict[str, Any]:
    step_s = speed.step_s and round(speed.step_s, 4)
    return {"peak_gb": round(memory.allocated_gb, 3), "step_s": step_s}


def planned(overrides: list[str], trls_step: bool = False) -> tuple[Memory, Speed]:
    """Return the memory of a rank and the speed of the run, with speed=off unless overridden.

    `trls_step`: plan a step of TRL and of our earlier versions, which have TRL's head, TRL's pass
    for vLLM's importance ratio, and servers with a tokenizer.
    """
    with contextlib.ExitStack() as patched:
        if trls_step:
            patched.enter_context(
                mock.patch.object(activations, "head_of", return_value=Head.tiled)
            )
            patched.enter_context(
                mock.patch.object(planner_speed, "rescores_completions", generates_with_vllm)
            )
            patched.enter_context(
                mock.patch.object(placement, "is_tokens_only", return_value=False)
            )
        return _planned(tuple(overrides), trls_step)


def planned_row(row: dict[str, Any]) -> tuple[Memory, Speed]:
    """Return today's plan for a line of predictions.jsonl, with the kind of step that it measured.

    All lines were measured before weights were sent during the step.
    """
    memory, speed = planned(row["overrides"], trls_step="head" not in row)
    memory.parts_gb.pop("weights being sent", None)
    return memory, speed


def composition(overrides: list[str]) -> Config:
    speed_off = [] if any(word.startswith("speed=") for word in overrides) else ["speed=off"]
    host = detect.Host(python="python", num_cores=64)
    return choose(prepare(compose([*overrides, *speed_off]))[0], host)


def predict(hardware: str) -> str:
    """Return a JSON line with choices and predictions for each configuration with speed=auto."""
    lines = []
    for name in HELD_OUT:
        overrides = [hardware, "model.init=random", *job(name).overrides]
        if "speed=auto" not in overrides:
            continue
        memory, speed = planned(overrides)
        rate = speed.tokens_per_second and round(speed.tokens_per_second)
        predicted = {**figures(memory, speed), "tokens_per_second": rate}
        chosen = {choice.key: choice.value for choice in composition(overrides).chosen}
        row = {"name": name, "overrides": overrides, "chosen": chosen, "predicted": predicted}
        lines.append(json.dumps(row))
    return "\n".join(lines)


@functools.cache
def _planned(overrides: tuple[str, ...], trls_step: bool) -> tuple[Memory, Speed]:
    config = composition([*overrides])
    host = detect.Host(python="python", num_cores=64)
    processes = placement.process_groups(config, host)
    return memory.memory(config, processes)[-1], estimate_speed(config)


def tables(
    unit: str,
    reason: str,
    measured: str,
    predict: Callable[[dict[str, Any]], tuple[float | None, str]],
) -> str:
    """Return a table of earlier predictions and a table of today's, for rows with key `measured`.

    The first table compares held-out runs with the predictions before their measurement. The second
    compares all runs with today's predictions.
    """
    rows = [
        _named(row)
        for line in MEASURED.read_text().splitlines()
        if measured in (row := json.loads(line))
    ]
    columns = ["run", f"{unit} measured", "predicted", "error"]
    held_out = [row for row in rows if row["held_out"]]
    then = [(row["name"], row[measured], row["predicted"][measured]) for row in held_out]
    now = [(row["name"], row[measured], *predict(row)) for row in rows]
    now = [row for row in now if row[2]]
    before = _table("Predicted before the measurement", columns, then)
    return "\n".join([*before, *_table("All runs, as predicted now", [*columns, reason], now)])


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """Add the GPU to the name, unless it is an H200."""
    gpu = row["overrides"][0].partition("=")[2]
    return row if gpu == "h200" else {**row, "name": f"{row['name']} ({gpu.upper()})"}


def _table(title: str, columns: list[str], rows: list[tuple[Any, ...]]) -> list[str]:
    """Return a table with its worst and mean error. Rows are (name, measured, predicted, ...)."""
    errors = [predicted / measured - 1 for _, measured, predicted, *_ in rows]
    mean = statistics.mean(abs(error) for error in errors)
    summary = f"{len(errors)} runs; worst {max(errors, key=abs):+.1%}, mean {mean:.1%}."
    lines = [f"## {title}", "", summary, ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for (name, measured, predicted, *reasons), error in zip(rows, errors, strict=True):
        cells = [name, f"{measured:.2f}", f"{predicted:.2f}", f"{error:+.1%}", *reasons]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def memory_report() -> str:
    def predict(row: dict[str, Any]) -> tuple[float | None, str]:
        memory = planned_row(row)[0]
        return memory.allocated_gb, memory.moment

    return tables("GB", "most at", "peak_gb", predict)


def speed_report() -> str:
    def predict(row: dict[str, Any]) -> tuple[float | None, str]:
        speed = planned_row(row)[1]
        return speed.step_s, speed.basis.partition(": ")[2]

    return tables("s a step", "what takes the time", "step_s", predict)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare predictions with measurements.")
    parser.add_argument("what", choices=["measure", "predict", "report"])
    parser.add_argument(
        "hardware", nargs="?", default="hardware=h200", help="hardware=<a group of conf/hardware>"
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", help="only configurations whose name contains one of these words"
    )
    parser.add_argument("--folder", type=Path, help="default: runs/predictions/<hardware>")
    parser.add_argument("--seconds", type=float, default=3600, help="start no run after this time")
    options = parser.parse_args()
    if options.what == "report":
        print(memory_report())
        print(speed_report())
    elif options.what == "predict":
        print(predict(options.hardware))
    else:
        # One folder per kind of GPU, because runs are looked up by name.
        folder = options.folder or Path("runs/predictions") / options.hardware.partition("=")[2]
        measure(options.hardware, options.gpus, options.only, folder, options.seconds)


if __name__ == "__main__":
    main()
