"""Compare predicted with measured memory and speed: docs/results/memory.md and speed.md.

    python tests/gpu/predictions.py measure hardware=h200 --gpus 2
                            writes runs/predictions/h200/predictions.jsonl
    python tests/gpu/predictions.py predict hardware=h100
                            prints the lines of docs/results/predicted.jsonl; needs no GPU
    python tests/gpu/predictions.py report
                            compares docs/results/predictions.jsonl with today's planner on both
                            pages; needs no GPU

HELD_OUT lists configurations that have not been measured. The planner's formulas are fixed before
the measurement, and each measured row contains the prediction of that time. After the measurement,
formulas may be fitted to the rows, and new configurations replace the old ones here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
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
from launch.estimate.rank_state import generates_with_vllm
from launch.estimate.speed import estimate_speed
from launch.machine import detect, placement
from launch.plan.planning import prepare
from launch.schema import Config
from launch.schema.enums import Head
from launch.schema.plan import Memory, Speed
from tests.gpu.jobs import Job, rows_of, run, step_s
from tests.gpu.speed_report import RESULTS, cells_of, write

Row = dict[str, Any]
MEASURED = RESULTS / "predictions.jsonl"
STEPS = {"sft": 6, "dpo": 6, "grpo": 6}
LONG_ENOUGH = 60  # steps after which speed=auto compiles
# Planner's DECODE_SERVED_S for a server that runs the model where it schedules, without and with
# text. TRL starts such a server, and so did we until 2026-11-29.
OLD_SERVER_S, OLD_SERVER_OF_TEXT_S = 0.055e-3, 0.045e-3
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


def planned(
    overrides: list[str], trls_step: bool = False, old_server: bool = False
) -> tuple[Memory, Speed]:
    """Return the memory of a rank and the speed of the run, with speed=off unless overridden.

    `trls_step`: plan a step of TRL and of our earlier versions, which have TRL's head, TRL's pass
    for vLLM's importance ratio, and servers with a tokenizer. `old_server`: without a process of
    its own for the model.
    """
    with contextlib.ExitStack() as patched:
        if old_server or trls_step:
            served_s = OLD_SERVER_OF_TEXT_S if trls_step else OLD_SERVER_S
            patched.enter_context(mock.patch.object(planner_speed, "DECODE_SERVED_S", served_s))
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
        return _planned(tuple(overrides), trls_step, old_server)


def planned_row(row: dict[str, Any]) -> tuple[Memory, Speed]:
    """Return today's plan for a line of predictions.jsonl, with the kind of step that it measured.

    Lines without `sends_in_step` were measured before weights were sent during the step, and lines
    without `model_process` with a server without a process of its own for the model.
    """
    is_old = "model_process" not in row
    memory, speed = planned(row["overrides"], trls_step="head" not in row, old_server=is_old)
    if "sends_in_step" not in row:
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
def _planned(overrides: tuple[str, ...], trls_step: bool, old_server: bool) -> tuple[Memory, Speed]:
    config = composition([*overrides])
    host = detect.Host(python="python", num_cores=64)
    processes = placement.process_groups(config, host)
    return memory.memory(config, processes)[-1], estimate_speed(config)


def report(measured: str, within: float, predict: Callable[[Row], float | None]) -> str:
    """Return a table of errors by kind of run, and the runs whose error exceeds `within`.

    Held-out runs have the prediction of the time before their measurement. Today's planner predicts
    all runs that have the key `measured`.
    """
    before, now = [], []
    for row in map(json.loads, MEASURED.read_text().splitlines()):
        if measured in row:
            figure, about = row[measured], (kind(row), title(row))
            before += [(*about, row["predicted"][measured] / figure - 1)] if row["held_out"] else []
            predicted = predict(row)
            now += [(*about, predicted / figure - 1)] if predicted else []
    columns = [
        f"{when}: {what}" for when in ("before", "now") for what in ("good", "mean", "worst")
    ]
    lines = [cells_of(["runs", *columns]), "|" + "---|" * 7]
    for name in [*sorted({name for name, _, _ in now}), "all"]:
        parts = [
            [error for of, _, error in errors if name in (of, "all")] for errors in (before, now)
        ]
        lines.append(cells_of([name, *(cell for part in parts for cell in shown(part, within))]))
    legend = "Before: predicted before the measurement. Now: by today's planner. Good: within"
    lines += ["", f"{legend} {within:.0%}."]
    others = [f"{name} {error:+.1%}" for _, name, error in before if abs(error) > within]
    lines += [f"Others before: {', '.join(others)}."] if others else []
    return "\n".join(lines) + "\n"


def kind(row: Row) -> str:
    """Return the method and the topology of a run."""
    words = " ".join(row["overrides"])
    method, topology = (re.search(rf"\b{key}=(\w+)", words) for key in ("method", "topology"))
    offload = " with offload" if "offload" in words else ""
    assert method
    return f"{method[1].upper()}, {topology[1] if topology else 'single'}{offload}"


def title(row: Row) -> str:
    """Return the name of a run, with the GPU unless it is an H200."""
    gpu = row["overrides"][0].partition("=")[2]
    return row["name"] if gpu == "h200" else f"{row['name']} ({gpu.upper()})"


def shown(errors: list[float], within: float) -> list[str]:
    """Return how many errors are within a limit, their mean size, and the worst."""
    if not errors:
        return ["", "", ""]
    sizes = [abs(error) for error in errors]
    count = sum(size <= within for size in sizes)
    return [
        f"{count} of {len(sizes)}",
        f"{statistics.mean(sizes):.1%}",
        f"{max(errors, key=abs):+.1%}",
    ]


def memory_report() -> str:
    return report("peak_gb", 0.05, lambda row: planned_row(row)[0].allocated_gb)


def speed_report() -> str:
    return report("step_s", 0.15, lambda row: planned_row(row)[1].step_s)


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
        write("memory", "predictions", memory_report())
        write("speed", "predictions", speed_report())
    elif options.what == "predict":
        print(predict(options.hardware))
    else:
        # One folder per kind of GPU, because runs are looked up by name.
        folder = options.folder or Path("runs/predictions") / options.hardware.partition("=")[2]
        measure(options.hardware, options.gpus, options.only, folder, options.seconds)


if __name__ == "__main__":
    main()
