"""Predicted memory and speed beside measured: runs every configuration below, and prints the tables of docs/results/memory.md and speed.md.

    python tests/gpu/predictions.py measure hardware=h200 --gpus 2      writes runs/predictions/predictions_h200.jsonl
    python tests/gpu/predictions.py report                              needs no GPU: docs/results/predictions_h200.jsonl as tables

HELD_OUT was written down, and the planner's formulas fixed, before any of it is measured. Rows of the file with held_out=false are those
that the constants rest on.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch import detect, memory, topology
from launch.compose import compose
from launch.plan import prepare
from launch.speed import Speed, speed
from tests.gpu.jobs import Job, rows_of, run, step_s

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/results/predictions_h200.jsonl"
STEPS = {"sft": 6, "dpo": 4, "grpo": 4}
# name: GPUs, overrides. Batch is of one rank; accumulation is 1 where nothing else is said. None of them has been measured: what has been
# is in docs/results/predictions_h200.jsonl, for the constants to rest on. Most are small, so that two GPUs do all in 20 minutes.
HELD_OUT: dict[str, tuple[int, str]] = {
    "sft-0.6b-1x512": (1, "sft qwen3_0_6b batch=1 max_length=512"),
    "sft-0.6b-8x2048-plain": (1, "sft qwen3_0_6b batch=8 max_length=2048 plain"),
    "sft-0.6b-2x8192": (1, "sft qwen3_0_6b batch=2 max_length=8192 accumulation=2"),
    "sft-0.6b-16x1024-16bit": (1, "sft qwen3_0_6b batch=16 max_length=1024 precision.weights=bf16"),
    "sft-0.6b-4x1024-fp32": (1, "sft qwen3_0_6b batch=4 max_length=1024 precision=fp32"),
    "sft-1.7b-16x512": (1, "sft qwen3_1_7b batch=16 max_length=512 accumulation=2"),
    "sft-1.7b-1x4096-plain": (1, "sft qwen3_1_7b batch=1 max_length=4096 plain"),
    "sft-1.7b-1x16384": (1, "sft qwen3_1_7b batch=1 max_length=16384"),
    "sft-1.7b-4x2048-lora": (1, "sft qwen3_1_7b batch=4 max_length=2048 adapter=lora"),
    "sft-1.7b-2x4096-lora-plain": (1, "sft qwen3_1_7b batch=2 max_length=4096 adapter=lora precision.weights=bf16 plain"),
    "sft-4b-4x2048": (1, "sft qwen3_4b batch=4 max_length=2048"),
    "sft-4b-1x8192-lora": (1, "sft qwen3_4b batch=1 max_length=8192 adapter=lora"),
    "sft-8b-1x4096-16bit": (1, "sft qwen3_8b batch=1 max_length=4096 precision.weights=bf16"),
    "dpo-0.6b-2x2048-plain": (1, "dpo qwen3_0_6b batch=2 max_length=2048 plain"),
    "dpo-0.6b-8x512": (1, "dpo qwen3_0_6b batch=8 max_length=512"),
    "dpo-1.7b-4x1024-lora": (1, "dpo qwen3_1_7b batch=4 max_length=1024 adapter=lora precision.weights=bf16"),
    "grpo-1.7b-colocate": (1, "grpo qwen3_1_7b batch=16 topology=colocate"),
    "sft-0.6b-ddp-2": (2, "sft qwen3_0_6b batch=4 max_length=4096 topology=ddp"),
    "sft-0.6b-fsdp-2-offload": (2, "sft qwen3_0_6b batch=8 max_length=1024 topology=fsdp topology.fsdp.cpu_offload=true"),
    "sft-1.7b-ddp-2-plain": (2, "sft qwen3_1_7b batch=2 max_length=2048 topology=ddp plain accumulation=2"),
    "sft-1.7b-fsdp-2": (2, "sft qwen3_1_7b batch=8 max_length=2048 topology=fsdp"),
    "sft-1.7b-zero3-2": (2, "sft qwen3_1_7b batch=4 max_length=4096 topology=zero3"),
    "sft-1.7b-zero2-2-offload": (2, "sft qwen3_1_7b batch=4 max_length=1024 topology=zero2 topology.zero.offload_optimizer=true"),
    "sft-0.6b-zero3-2-offload": (
        2,
        "sft qwen3_0_6b batch=4 max_length=2048 topology=zero3 topology.zero.offload_optimizer=true topology.zero.offload_parameters=true",
    ),
    "sft-4b-zero2-2": (2, "sft qwen3_4b batch=2 max_length=4096 topology=zero2"),
    "sft-4b-fsdp-2-lora": (2, "sft qwen3_4b batch=2 max_length=1024 topology=fsdp adapter=lora"),
    "dpo-0.6b-fsdp-2": (2, "dpo qwen3_0_6b batch=4 max_length=2048 topology=fsdp"),
    "dpo-0.6b-zero3-2": (2, "dpo qwen3_0_6b batch=2 max_length=1024 topology=zero3 accumulation=2"),
    "grpo-0.6b-split-2": (2, "grpo qwen3_0_6b batch=16 topology=split accumulation=2"),
}


def job(name: str) -> Job:
    """The words of a configuration as overrides."""
    gpus, words = HELD_OUT[name]
    method, model, *rest = words.split()
    found = [f"method={method}", f"model={model}", f"method.args.max_steps={STEPS[method]}", f"topology.num_gpus={gpus}"]
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
            row["overrides"] = [hardware, "model.init=random", *found.overrides]
            lines.append(json.dumps(row))
    (folder / f"predictions_{hardware.partition('=')[2]}.jsonl").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def planned(overrides: list[str]) -> tuple[memory.Memory, Speed]:
    """The memory of a rank, and the speed of the run."""
    return _planned(tuple(overrides))


@functools.cache
def _planned(overrides: tuple[str, ...]) -> tuple[memory.Memory, Speed]:
    config, _ = prepare(compose([*overrides]))
    host = detect.Host(python="python", num_cores=64)
    return memory.memory(config, topology.processes(config, host, Path("/runs/x/1")))[-1], speed(config)


def tables(columns: str, measured: str, predict: Callable[[list[str]], tuple[float | None, str]]) -> str:
    """Every row that has `measured` beside its prediction, worst and mean error, those apart that the formulas were made with."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    lines = []
    for title, held_out in (("Measured after the formulas were fixed", True), ("Measured before", False)):
        errors, table = [], [columns, "|" + "---|" * (columns.count("|") - 1)]
        for row in rows:
            if row.get("held_out", False) == held_out and measured in row:
                found, note = predict(row["overrides"])
                if found:
                    errors.append(found / row[measured] - 1)
                    table.append(f"| {row['name']} | {row[measured]:.2f} | {found:.2f} | {errors[-1]:+.1%} | {note} |")
        if errors:
            mean = statistics.mean(abs(error) for error in errors)
            lines += [f"## {title}", "", f"{len(errors)} runs; worst {max(errors, key=abs):+.1%}, mean {mean:.1%}.", "", *table, ""]
    return "\n".join(lines)


def memory_report() -> str:
    def predict(overrides: list[str]) -> tuple[float | None, str]:
        found = planned(overrides)[0]
        return found.allocated_gb, found.moment

    return tables("| run | GB measured | predicted | error | most at |", "peak_gb", predict)


def speed_report() -> str:
    def predict(overrides: list[str]) -> tuple[float | None, str]:
        found = planned(overrides)[1]
        return found.step_s, found.basis.partition(": ")[2]

    return tables("| run | s a step measured | predicted | error | what takes the time |", "step_s", predict)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted memory and speed beside measured.")
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("hardware", nargs="?", default="hardware=h200", help="hardware=<a group of conf/hardware>")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="words, one of which a configuration's name holds")
    parser.add_argument("--folder", type=Path, default=Path("runs/predictions"))
    parser.add_argument("--seconds", type=float, default=3600, help="no run is started after so many")
    asked = parser.parse_args()
    if asked.what == "report":
        print(memory_report())
        print(speed_report())
    else:
        measure(asked.hardware, asked.gpus, asked.only, asked.folder, asked.seconds)


if __name__ == "__main__":
    main()
