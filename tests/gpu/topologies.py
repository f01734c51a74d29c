"""Every topology on the GPUs of this machine: step time, tokens/s, memory, shares of a GRPO step, and whether losses agree.

    python tests/gpu/topologies.py hardware=h200 --gpus 4 --model qwen3_4b

Runs `launch/run.py` once for each line of the tables below, several at a time on disjoint GPUs, and writes `topologies.json` and a table
in Markdown. Weights are random and rows are random digits, so that nothing is fetched; every row fills the sequence. What is finished is
not run again. docs/results/topologies.md was made with it.
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
SHARES = ("generation_s", "wait_s", "sync_s", "reward_s", "train_s", "server_s")  # all but the last sum to a step
SFT_BATCH, GRPO_BATCH = 32, 96  # sequences of a step, of all ranks together


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
    shared += [f"effective_batch={GRPO_BATCH}", "method.args.per_device_train_batch_size=8", f"method.args.max_steps={STEPS['grpo']}"]
    assert GRPO_BATCH % (8 * ranks) == 0
    return Job(
        f"{model}-grpo-{name or topology}-{gpus}",
        gpus,
        [*shared, f"model={model}", "precision=bf16", f"topology={topology}", f"topology.num_gpus={gpus}", *extra],
        "grpo",
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


def measured(job: Job, folder: Path) -> dict[str, Any] | None:
    """Medians of the steps after the warm-up; None where the run is not done."""
    rows = rows_of(job, folder)
    if rows is None:
        return None
    row: dict[str, Any] = {"name": job.name, "gpus": job.gpus, "step_s": step_s(rows), "losses": [r["loss"] for r in rows]}
    for key in ("tokens_per_second", "mfu", *SHARES, "reward", "sampling/importance_sampling_ratio/mean"):
        values = [r[key] for r in rows[WARM_UP:] if r.get(key) is not None]
        if values:
            row[key] = statistics.median(values)
    row["tokens_per_second_per_gpu"] = row["tokens_per_second"] / job.gpus
    row["memory_peak_gb"] = max(r["memory_peak_gb"] for r in rows)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; shares are of a step."""
    shares = [key.removesuffix("_s") for key in SHARES]
    lines = [f"| {' | '.join(['run', 's/step', 'tokens/s', 'per GPU', 'GB', *shares])} |", "|---" * (5 + len(shares)) + "|"]
    for row in rows:
        shares = [f"{row[k] / row['step_s']:.0%}" if k in row else "" for k in SHARES]
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
    every = jobs(asked.model, asked.gpus, asked.precisions, asked.methods)
    every = [j for j in every if not asked.only or any(word in j.name for word in asked.only)]
    run(every, asked.hardware, asked.folder.resolve(), asked.gpus, time.monotonic() + asked.seconds)
    rows = [row for row in (measured(job, asked.folder) for job in every) if row]
    (asked.folder / f"topologies-{asked.model}.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))
    print("\n".join(agreement(rows)))


if __name__ == "__main__":
    main()
