"""Every topology on the GPUs of this machine: step time, tokens/s, memory, shares of a GRPO step, and whether losses agree.

    python tests/gpu/topologies.py hardware=h200 --gpus 4 --model qwen3_4b

Runs `launch/run.py` once for each line of the tables below, several at a time on disjoint GPUs, and writes `topologies.json` and a table
in Markdown. Weights are random and rows are random digits, so that nothing is fetched; every row fills the sequence. What is finished is
not run again. docs/results/topologies.md was made with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MASK = "HIP_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "CUDA_VISIBLE_DEVICES"
WARM_UP = 3  # steps that allocate, compile and tune
STEPS = {"fp32": 6, "bf16": 10}
TOKENS = 2048  # of an SFT row
SFT_BATCH, GRPO_BATCH = 32, 96  # sequences of a step, of all ranks together
DIGITS_A_ROW = 2300  # one token each


@dataclass(frozen=True)
class Job:
    """A run: its name, the GPUs it takes, and its overrides."""

    name: str
    gpus: int
    overrides: list[str]


def sft(model: str, precision: str, topology: str, gpus: int, seed: int = 0) -> Job:
    per_device = {"qwen3_4b": 2}.get(model, 4)
    shared = ["method=sft", f"method.args.max_length={TOKENS}", f"effective_batch={SFT_BATCH}", f"seed={seed}"]
    shared += [f"method.args.per_device_train_batch_size={per_device}", f"method.args.max_steps={STEPS[precision]}"]
    name = f"{model}-sft-{precision}-{topology}-{gpus}" + (f"-seed{seed}" if seed else "")
    return Job(name, gpus, [*shared, f"model={model}", f"precision={precision}", f"topology={topology}", f"topology.num_gpus={gpus}"])


def grpo(model: str, topology: str, gpus: int, *extra: str, name: str | None = None, serving: int = 1) -> Job:
    """`serving` of the GPUs generate, in a split."""
    ranks = gpus - serving if topology == "split" else gpus
    shared = ["method=grpo", "~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0", "method.args.max_completion_length=512"]
    shared += [f"effective_batch={GRPO_BATCH}", "method.args.per_device_train_batch_size=8", f"method.args.max_steps={STEPS['bf16']}"]
    assert GRPO_BATCH % (8 * ranks) == 0
    return Job(
        f"{model}-grpo-{name or topology}-{gpus}",
        gpus,
        [*shared, f"model={model}", "precision=bf16", f"topology={topology}", f"topology.num_gpus={gpus}", *extra],
    )


def jobs(model: str, gpus: int, precisions: list[str], methods: list[str]) -> list[Job]:
    """Those that these GPUs can hold, the largest first."""
    counts = [n for n in (4, 2) if n <= gpus]
    found = []
    if "grpo" in methods:
        for n in counts:
            found += [grpo(model, "split", n, "topology.server_max_length=1024")]
            found += [grpo(model, "split", n, "topology.server_max_length=1024", "topology.overlap=true", name="split_overlap")]
        found.append(grpo(model, "colocate", 1, "method.args.vllm_max_model_length=1024"))
        for name, key, strategy in (("split_servers", "servers", "zero3"), ("split_tensor_parallel", "server_tensor_parallel", "fsdp")):
            two = ["topology.server_max_length=1024", f"topology.{key}=2", f"topology.strategy={strategy}"]
            found += [grpo(model, "split", n, *two, name=name, serving=2) for n in counts if n == 4]
    if "sft" in methods:
        found += [sft(model, p, t, n) for n in counts for p in precisions for t in ("ddp", "fsdp", "zero2", "zero3")]
        found += [sft(model, p, "single", 1, seed) for p in precisions for seed in ((0, 1) if p == "bf16" else (0,))]
    return found


def write_data(folder: Path) -> dict[str, Path]:
    """Rows of random digits for SFT, short sums for GRPO."""
    drawn = random.Random(0)
    files = {method: folder / f"{method}.jsonl" for method in ("sft", "grpo")}
    with files["sft"].open("w") as file:
        for _ in range(SFT_BATCH * STEPS["bf16"]):
            digits = "".join(drawn.choices("0123456789", k=DIGITS_A_ROW))
            file.write(json.dumps({"text": digits}) + "\n")
    with files["grpo"].open("w") as file:
        for _ in range(GRPO_BATCH * STEPS["bf16"]):
            a, b = drawn.randrange(100), drawn.randrange(100)
            row = {"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}], "answer": str(a + b)}
            file.write(json.dumps(row) + "\n")
    return files


def start(job: Job, hardware: str, folder: Path, data: dict[str, Path], gpus: list[int]) -> subprocess.Popen[bytes]:
    method = "grpo" if "method=grpo" in job.overrides else "sft"
    fixed = ["model.init=random", "data=jsonl", f"data.path={data[method]}", "tracking=none", "method.args.logging_steps=1"]
    fixed += ["method.args.save_strategy=no", f"name={job.name}", f"run_root={folder / 'runs'}", hardware, "resume=never"]
    fixed += ["runtime.hang_timeout_s=300"]
    log = (folder / f"{job.name}.log").open("wb")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch/run.py"), *fixed, *job.overrides],
        env={**os.environ, MASK: ",".join(map(str, gpus))},
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def run(todo: list[Job], hardware: str, folder: Path, num_gpus: int, until: float) -> None:
    """Several at a time; none is started after `until` (seconds, monotonic).

    A run's GPUs go to the next one when its last step is logged: that one loads its libraries while the first saves.
    """
    data = write_data(folder)
    given = os.environ.get(MASK)
    free = [int(gpu) for gpu in given.split(",")] if given else list(range(num_gpus))
    running = []
    while todo or running:
        for job in list(todo):
            if job.gpus <= len(free) and time.monotonic() < until:
                taken, free = free[: job.gpus], free[job.gpus :]
                todo.remove(job)
                running.append((job, start(job, hardware, folder, data, taken), taken, time.monotonic()))
        if not running:
            break
        time.sleep(0.5)
        for entry in list(running):
            job, process, taken, began = entry
            ended = process.poll() is not None
            if taken and (ended or trained(job, folder)):
                free = sorted([*free, *taken])
                taken.clear()
            if ended:
                running.remove(entry)
                print(f"{job.name}: exit {process.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    for job in todo:
        print(f"{job.name}: not run, no time left", flush=True)


def trained(job: Job, folder: Path) -> bool:
    """Whether the newest run of it has logged its last step."""
    found = sorted((folder / "runs" / job.name).glob("*/metrics.jsonl"))
    rows = found[-1].read_text().split("\n")[:-1] if found else []
    return bool(rows) and json.loads(rows[-1])["step"] == json.loads(rows[-1])["num_steps"]


def measured(job: Job, folder: Path) -> dict[str, Any] | None:
    """Medians of the steps after the warm-up; None where the run is not done."""
    found = sorted((folder / "runs" / job.name).glob("*/result.json"))
    if not found or json.loads(found[-1].read_text()).get("status") != "done":
        return None
    rows = [json.loads(line) for line in (found[-1].parent / "metrics.jsonl").read_text().splitlines()]
    steps = [after["time_s"] - before["time_s"] for before, after in zip(rows, rows[1:], strict=False)][WARM_UP - 1 :]
    row: dict[str, Any] = {"name": job.name, "gpus": job.gpus, "step_s": statistics.median(steps), "losses": [r["loss"] for r in rows]}
    for key in ("tokens_per_second", "mfu", "generation_s", "wait_s", "sync_s", "reward", "sampling/importance_sampling_ratio/mean"):
        values = [r[key] for r in rows[WARM_UP:] if r.get(key) is not None]
        if values:
            row[key] = statistics.median(values)
    row["tokens_per_second_per_gpu"] = row["tokens_per_second"] / job.gpus
    row["memory_peak_gb"] = max(r["memory_peak_gb"] for r in rows)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; shares are of a step."""
    lines = ["| run | s/step | tokens/s | per GPU | GB | generation | waiting | sync |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        shares = [f"{row[k] / row['step_s']:.0%}" if k in row else "" for k in ("generation_s", "wait_s", "sync_s")]
        figures = [f"{row['step_s']:.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second_per_gpu']:,.0f}"]
        lines.append("| " + " | ".join([row["name"], *figures, f"{row['memory_peak_gb']:.1f}", *shares]) + " |")
    return "\n".join(lines)


def agreement(rows: list[dict[str, Any]]) -> list[str]:
    """How far the losses of each run are from those of one GPU with the same seed, step by step."""
    told = []
    for row in rows:
        kind = "-".join(row["name"].split("-")[:3])  # model, method, precision
        alone = next((r for r in rows if r["name"] == f"{kind}-single-1"), None)
        if alone and alone is not row:
            apart = max(abs(a - b) for a, b in zip(alone["losses"], row["losses"], strict=True))
            told.append(f"{row['name']}: losses at most {apart:.2e} from one GPU's")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every topology on the GPUs of this machine.")
    parser.add_argument("hardware", help="hardware=<a group of conf/hardware>")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=["grpo", "sft"])
    parser.add_argument("--only", nargs="*", help="words, one of which a run's name holds")
    parser.add_argument("--folder", type=Path, default=Path("runs/topologies"))
    parser.add_argument("--seconds", type=float, default=3600, help="no run is started after so many")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    every = jobs(asked.model, asked.gpus, asked.precisions, asked.methods)
    every = [j for j in every if not asked.only or any(word in j.name for word in asked.only)]
    todo = [job for job in every if measured(job, asked.folder) is None]
    run(todo, asked.hardware, asked.folder.resolve(), asked.gpus, time.monotonic() + asked.seconds)
    rows = [row for row in (measured(job, asked.folder) for job in every) if row]
    (asked.folder / f"topologies-{asked.model}.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))
    print("\n".join(agreement(rows)))


if __name__ == "__main__":
    main()
