"""Predicted memory and speed beside measured: runs every configuration below, and prints the tables of docs/results/memory.md and speed.md.

    python tests/gpu/predictions.py measure hardware=h200 --gpus 2      writes runs/predictions/h200/predictions.jsonl
    python tests/gpu/predictions.py predict hardware=h100               needs no GPU: what docs/results/predicted.jsonl is made by
    python tests/gpu/predictions.py report                              needs no GPU: docs/results/predictions.jsonl as tables

HELD_OUT is written down, and the planner's formulas fixed, before any of it is measured: its rows of the file keep what was predicted then.
Formulas may rest on them afterwards, and new configurations take their place here.
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

from launch import topology
from launch.compose import compose
from launch.machine import detect
from launch.plan import prepare
from launch.planner import memory
from launch.planner import speed as planner_speed
from launch.planner.activations import Head
from launch.planner.choose import choose
from launch.planner.speed import Speed, generates_with_vllm, speed
from launch.schema import Config
from tests.gpu.jobs import Job, rows_of, run, step_s

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/results/predictions.jsonl"
STEPS = {"sft": 6, "dpo": 6, "grpo": 6}
LONG_ENOUGH = 60  # steps under speed=auto: compiling pays
# name: GPUs, overrides. Batch is of one rank; accumulation is 1 where nothing else is said. None of them has been measured: what has been
# is in docs/results/predictions.jsonl, for the constants to rest on.
HELD_OUT: dict[str, tuple[int, str]] = {
    "grpo-1.7b-colocate": (1, "grpo qwen3_1_7b batch=16 topology=colocate"),
    "grpo-0.6b-split-2": (2, "grpo qwen3_0_6b batch=16 topology=split accumulation=2"),
    "sft-1.7b-ddp-4": (4, "sft qwen3_1_7b batch=2 max_length=4096 topology=ddp"),
    "sft-4b-fsdp-4": (4, "sft qwen3_4b batch=2 max_length=4096 topology=fsdp"),
    "sft-8b-zero2-4": (4, "sft qwen3_8b batch=1 max_length=4096 topology=zero2"),
    "sft-1.7b-zero3-4": (4, "sft qwen3_1_7b batch=4 max_length=2048 topology=zero3"),
    "dpo-4b-fsdp-4": (4, "dpo qwen3_4b batch=2 max_length=1024 topology=fsdp"),
    "grpo-1.7b-split-4": (4, "grpo qwen3_1_7b batch=16 topology=split"),
    # Of what speed=auto chooses. `batch` is given, so the micro-batch stays.
    "sft-4b-auto": (1, "sft qwen3_4b batch=4 max_length=4096 speed=auto"),
    "sft-4b-16-bits-plain-auto": (1, "sft qwen3_4b batch=2 max_length=4096 plain precision.weights=bf16 speed=auto"),
    "sft-4b-fp8-plain-auto": (1, "sft qwen3_4b batch=2 max_length=4096 plain precision=fp8 precision.weights=bf16 speed=auto"),
    "sft-0.6b-auto": (1, "sft qwen3_0_6b batch=8 max_length=2048 speed=auto"),
    "sft-8b-lora-auto": (1, "sft qwen3_8b batch=2 max_length=4096 adapter=lora precision.weights=bf16 speed=auto"),
    "dpo-1.7b-auto": (1, "dpo qwen3_1_7b batch=4 max_length=1024 speed=auto"),
    "sft-4b-ddp-2-auto": (2, "sft qwen3_4b batch=2 max_length=4096 topology=ddp speed=auto"),
    "sft-4b-fsdp-2-auto": (2, "sft qwen3_4b batch=2 max_length=4096 topology=fsdp speed=auto"),
}


def job(name: str) -> Job:
    """The words of a configuration as overrides."""
    gpus, words = HELD_OUT[name]
    method, model, *rest = words.split()
    steps = LONG_ENOUGH if "speed=auto" in rest else STEPS[method]
    found = [f"method={method}", f"model={model}", f"method.args.max_steps={steps}", f"topology.num_gpus={gpus}"]
    if "speed=auto" not in rest:
        found.append("speed=off")
    if not any(word.startswith("topology=") for word in rest):
        found.append("topology=single")
    short = {
        "batch": "method.args.per_device_train_batch_size",
        "max_length": "method.args.max_length",
        "accumulation": "method.args.gradient_accumulation_steps",
    }
    for word in rest:
        key, _, value = word.partition("=")
        found.append("method.args.gradient_checkpointing=false" if word == "plain" else f"{short.get(key, key)}={value}")
    if "accumulation=" not in words:
        found.append("method.args.gradient_accumulation_steps=1")
    if not any(word.startswith("precision=") for word in rest):
        found.append("precision=bf16")
    if method == "grpo":
        found += ["~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0", "method.args.max_completion_length=512"]
        split = "topology=split" in words
        found.append("topology.server_max_length=1024" if split else "method.args.vllm_max_model_length=1024")
    long = any(word.startswith("max_length=") and int(word.partition("=")[2]) > 4096 for word in rest)
    return Job(name, gpus, found, "long" if long else method)


def measure(hardware: str, gpus: int, only: list[str] | None, folder: Path, seconds: float) -> None:
    jobs = sorted((job(name) for name in HELD_OUT if not only or any(word in name for word in only)), key=lambda j: -j.gpus)
    run([j for j in jobs if j.gpus <= gpus], hardware, folder.resolve(), gpus, time.monotonic() + seconds)
    lines = []
    for found in jobs:
        rows = rows_of(found, folder)
        if rows:
            row: dict[str, Any] = {"name": found.name, "held_out": True, "peak_gb": round(max(r["memory_peak_gb"] for r in rows), 3)}
            if "offload" not in found.name:  # how long the host's optimizer and PCIe take is not predicted
                row["step_s"] = round(step_s(rows), 4)
            row |= {"head": "own", "overrides": [hardware, "model.init=random", *found.overrides]}
            took, lasts = planned(row["overrides"])
            row["predicted"] = {"peak_gb": round(took.allocated_gb, 3), "step_s": lasts.step_s and round(lasts.step_s, 4)}
            lines.append(json.dumps(row))
    (folder / "predictions.jsonl").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def planned(overrides: list[str], trls_step: bool = False) -> tuple[memory.Memory, Speed]:
    """Return the memory of a rank and the speed of the run, with speed=off unless `overrides` say otherwise.

    `trls_step`: plan for TRL's head and for its pass for vLLM's importance ratio, as before recipes/common/head.py and sampling_ratio.py
    and as other programs compute losses.
    """
    with contextlib.ExitStack() as patched:
        if trls_step:
            patched.enter_context(mock.patch.object(memory, "_head", return_value=Head.tiled))
            patched.enter_context(mock.patch.object(planner_speed, "_scores_apart", generates_with_vllm))
        return _planned(tuple(overrides), trls_step)


def planned_row(row: dict[str, Any]) -> tuple[memory.Memory, Speed]:
    """Return what is planned now for a line of predictions.jsonl, with the step that it was measured with."""
    return planned(row["overrides"], trls_step="head" not in row)


def composition(overrides: list[str]) -> Config:
    said = [] if any(override.startswith("speed=") for override in overrides) else ["speed=off"]
    return choose(prepare(compose([*overrides, *said]))[0], detect.Host(python="python", num_cores=64))


def predict(hardware: str) -> str:
    """A line for each configuration under speed=auto: what is chosen, and what is predicted of it."""
    lines = []
    for name in HELD_OUT:
        overrides = [hardware, "model.init=random", *job(name).overrides]
        if "speed=auto" not in overrides:
            continue
        took, lasts = planned(overrides)
        chosen = {choice.key: choice.value for choice in composition(overrides).chosen}
        figures = {"peak_gb": round(took.allocated_gb, 3), "step_s": lasts.step_s and round(lasts.step_s, 4)}
        figures["tokens_per_second"] = lasts.tokens_per_second and round(lasts.tokens_per_second)
        lines.append(json.dumps({"name": name, "overrides": overrides, "chosen": chosen, "predicted": figures}))
    return "\n".join(lines)


@functools.cache
def _planned(overrides: tuple[str, ...], trls_step: bool) -> tuple[memory.Memory, Speed]:
    config = composition([*overrides])
    host = detect.Host(python="python", num_cores=64)
    return memory.memory(config, topology.processes(config, host, Path("/runs/x/1")))[-1], speed(config)


def tables(unit: str, reason: str, measured: str, predict: Callable[[dict[str, Any]], tuple[float | None, str]]) -> str:
    """Every row that has `measured`: those of held-out runs beside what was predicted before they were measured, and all beside what is
    predicted now; worst and mean error."""
    rows = [_named(row) for line in MEASURED.read_text().splitlines() if measured in (row := json.loads(line))]
    columns = ["run", f"{unit} measured", "predicted", "error"]
    then = [(row["name"], row[measured], row["predicted"][measured]) for row in rows if row["held_out"]]
    now = [(row["name"], row[measured], *predict(row)) for row in rows]
    return "\n".join(
        [
            *_table("Predicted before it was measured", columns, then),
            *_table("All, as they are predicted now", [*columns, reason], [row for row in now if row[2]]),
        ]
    )


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """With its GPU, where that is no H200."""
    gpu = row["overrides"][0].partition("=")[2]
    return row if gpu == "h200" else {**row, "name": f"{row['name']} ({gpu.upper()})"}


def _table(title: str, columns: list[str], rows: list[tuple[Any, ...]]) -> list[str]:
    """Of rows (name, measured, predicted, what else is said)."""
    errors = [predicted / measured - 1 for _, measured, predicted, *_ in rows]
    mean = statistics.mean(abs(error) for error in errors)
    lines = [f"## {title}", "", f"{len(errors)} runs; worst {max(errors, key=abs):+.1%}, mean {mean:.1%}.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for (name, measured, predicted, *said), error in zip(rows, errors, strict=True):
        lines.append("| " + " | ".join([name, f"{measured:.2f}", f"{predicted:.2f}", f"{error:+.1%}", *said]) + " |")
    return [*lines, ""]


def memory_report() -> str:
    def predict(row: dict[str, Any]) -> tuple[float | None, str]:
        found = planned_row(row)[0]
        return found.allocated_gb, found.moment

    return tables("GB", "most at", "peak_gb", predict)


def speed_report() -> str:
    def predict(row: dict[str, Any]) -> tuple[float | None, str]:
        found = planned_row(row)[1]
        return found.step_s, found.basis.partition(": ")[2]

    return tables("s a step", "what takes the time", "step_s", predict)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted memory and speed beside measured.")
    parser.add_argument("what", choices=["measure", "predict", "report"])
    parser.add_argument("hardware", nargs="?", default="hardware=h200", help="hardware=<a group of conf/hardware>")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="words, one of which a configuration's name holds")
    parser.add_argument("--folder", type=Path, help="default: runs/predictions/<hardware>")
    parser.add_argument("--seconds", type=float, default=3600, help="no run is started after so many")
    asked = parser.parse_args()
    if asked.what == "report":
        print(memory_report())
        print(speed_report())
    elif asked.what == "predict":
        print(predict(asked.hardware))
    else:
        folder = asked.folder or Path("runs/predictions") / asked.hardware.partition("=")[2]  # a run of one GPU is none of another's
        measure(asked.hardware, asked.gpus, asked.only, folder, asked.seconds)


if __name__ == "__main__":
    main()
