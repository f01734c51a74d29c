"""Measure every topology on this machine's GPUs: time, memory, shares of a GRPO step, losses.

    python tests/gpu/topologies.py hardware=h200 --gpus 4 --model qwen3_4b

Runs `launch/run.py` for each line of the tables below, several at a time on disjoint GPUs, and
writes `topologies.json` and a table in Markdown. Weights are random and rows are random digits, so
that nothing is downloaded; every row fills the sequence. What is finished is not run again.
docs/results/topologies.md was made with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.jobs import WARM_UP, Job, rows_of, run, step_s

STEPS = {"fp32": 6, "bf16": 10, "grpo": 8}
TOKENS = 2048  # of an SFT row
# All but the last sum to a step.
SHARES = ("generation_s", "wait_s", "sync_s", "reward_s", "train_s", "server_s", "transfer_s")
SFT_BATCH, GRPO_BATCH = 32, 96  # sequences of a step, of all ranks together
SERVED = "topology.server_max_length=1024"


def sft(model: str, precision: str, topology: str, gpus: int, seed: int = 0) -> Job:
    per_device = 2 if model == "qwen3_4b" else 4
    words = f"""
        method=sft model={model} precision={precision} topology={topology}
        topology.num_gpus={gpus} seed={seed} effective_batch={SFT_BATCH}
        method.args.per_device_train_batch_size={per_device} method.args.max_length={TOKENS}
        method.args.max_steps={STEPS[precision]}
    """
    name = f"{model}-sft-{precision}-{topology}-{gpus}" + (f"-seed{seed}" if seed else "")
    return Job(name, gpus, words.split())


def grpo(
    model: str, topology: str, gpus: int, *extra: str, name: str | None = None, serving: int = 1
) -> Job:
    """Return a run in which, in a split, `serving` of the GPUs generate."""
    ranks = gpus - serving if topology == "split" else gpus
    assert GRPO_BATCH % (8 * ranks) == 0
    words = f"""
        method=grpo ~method.rewards.reasoning_gym +method.rewards.accuracy=1.0 model={model}
        precision=bf16 topology={topology} topology.num_gpus={gpus} effective_batch={GRPO_BATCH}
        method.args.per_device_train_batch_size=8 method.args.max_completion_length=512
        method.args.max_steps={STEPS["grpo"]}
    """
    overrides = [*words.split(), *extra]
    return Job(f"{model}-grpo-{name or topology}-{gpus}", gpus, overrides, "grpo")


def jobs(model: str, gpus: int, precisions: list[str], methods: list[str]) -> list[Job]:
    """Return the runs that fit these GPUs, the largest first."""
    counts = [n for n in (4, 2) if n <= gpus]
    runs = []
    if "grpo" in methods:
        for n in counts:
            overlap = (SERVED, "topology.overlap=true")
            runs.append(grpo(model, "split", n, SERVED))
            runs.append(grpo(model, "split", n, *overlap, name="split_overlap"))
        runs.append(grpo(model, "colocate", 1, "method.args.vllm_max_model_length=1024"))
        for name, key, strategy in (
            ("split_servers", "servers", "zero3"),
            ("split_tensor_parallel", "server_tensor_parallel", "fsdp"),
        ):
            two = [SERVED, f"topology.{key}=2", f"topology.strategy={strategy}"]
            runs += [grpo(model, "split", n, *two, name=name, serving=2) for n in counts if n == 4]
    if "sft" in methods:
        runs += [
            sft(model, precision, topology, n)
            for n in counts
            for precision in precisions
            for topology in ("ddp", "fsdp", "zero2", "zero3")
        ]
        for precision in precisions:
            seeds = (0, 1) if precision == "bf16" else (0,)
            runs += [sft(model, precision, "single", 1, seed) for seed in seeds]
    return runs


def measured(job: Job, folder: Path) -> dict[str, Any] | None:
    """Return medians of the steps after the warm-up, or None if the run is not done."""
    rows = rows_of(job, folder)
    if rows is None:
        return None
    row: dict[str, Any] = {"name": job.name, "gpus": job.gpus, "step_s": step_s(rows)}
    row["losses"] = [r["loss"] for r in rows]
    ratio = "sampling/importance_sampling_ratio/mean"
    for key in ("tokens_per_second", "mfu", *SHARES, "reward", ratio):
        values = [r[key] for r in rows[WARM_UP:] if r.get(key) is not None]
        if values:
            row[key] = statistics.median(values)
    row["tokens_per_second_per_gpu"] = row["tokens_per_second"] / job.gpus
    row["memory_peak_gb"] = max(r["memory_peak_gb"] for r in rows)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown; shares are of a step."""
    shares = [key.removesuffix("_s") for key in SHARES]
    columns = ["run", "s/step", "tokens/s", "per GPU", "GB", *shares]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [
            row["name"],
            f"{row['step_s']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['memory_peak_gb']:.1f}",
            *(f"{row[key] / row['step_s']:.0%}" if key in row else "" for key in SHARES),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def agreement(rows: list[dict[str, Any]]) -> list[str]:
    """Say how far each run's losses are from those of one GPU with the same seed, step by step."""
    lines = []
    for row in rows:
        kind = "-".join(row["name"].split("-")[:3])  # model, method, precision
        alone = next((r for r in rows if r["name"] == f"{kind}-single-1"), None)
        if alone and alone is not row:
            apart = max(abs(a - b) for a, b in zip(alone["losses"], row["losses"], strict=True))
            lines.append(f"{row['name']}: losses at most {apart:.2e} from one GPU's")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure every topology on the GPUs of this machine."
    )
    parser.add_argument("hardware", help="hardware=<a group of conf/hardware>")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=["grpo", "sft"])
    parser.add_argument("--only", nargs="*", help="words, one of which a run's name holds")
    parser.add_argument("--folder", type=Path, default=Path("runs/topologies"))
    parser.add_argument(
        "--seconds", type=float, default=3600, help="no run is started after so many"
    )
    asked = parser.parse_args()
    every = jobs(asked.model, asked.gpus, asked.precisions, asked.methods)
    every = [j for j in every if not asked.only or any(word in j.name for word in asked.only)]
    run(every, asked.hardware, asked.folder.resolve(), asked.gpus, time.monotonic() + asked.seconds)
    rows = [row for row in (measured(job, asked.folder) for job in every) if row]
    (asked.folder / f"topologies-{asked.model}.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))
    print("\n".join(agreement(rows)))


if __name__ == "__main__":
    main()
