"""Measure what each precision and each adapter costs in loss, memory and speed.

    python tests/gpu/precision.py plan hardware=mi300x
                            what would run, and what is rejected there and why
    python tests/gpu/precision.py measure hardware=mi300x
                            writes runs/precision/precision_mi300x.jsonl; a second call continues
    python tests/gpu/precision.py measure hardware=cpu --tiny
                            two layers; fp8 is emulated
    python tests/gpu/precision.py report <file>.jsonl
                            the table, of any file of rows

One small model is trained in fp32 first, so that adapters have something to adapt. Every
combination starts from it, on the same rows. A seed sets their order and an adapter's first
weights. Adapters train at ten times the learning rate of the others.
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

from launch.config.compose import compose
from launch.core.errors import UserError
from launch.plan.planning import prepare
from tests.gpu.jobs import WARM_UP, Job, rows_of, run, step_s

PRECISIONS = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "bf16 weights too": ["precision=bf16", "precision.weights=bf16"],
    "fp16": ["precision=fp16"],
    "fp8": ["precision=fp8"],
    "nf4": ["precision=nf4"],
}
ADAPTERS = {
    "full": [],
    "lora": ["adapter=lora"],
    "rslora": ["adapter=lora", "adapter.rslora=true"],
    "dora": ["adapter=dora"],
}
TINY = "model.num_layers=2 model.num_parameters=525056"
SMALL = (
    "model.hidden_size=512 model.intermediate_size=1536 model.num_layers=8 "
    "model.num_parameters=20980736"
)
SEEDS = (0, 1)
REFERENCE = ("fp32", "full")
ON_A_CPU = ["hardware.precisions=[fp32,bf16,fp16,fp8,nf4]"]
Row = dict[str, Any]


def settings(asked: argparse.Namespace) -> list[str]:
    """Return the overrides that all runs have in common."""
    own = ON_A_CPU if asked.hardware == "hardware=cpu" else []
    words = f"""
        topology=single method=sft model=tiny {TINY if asked.tiny else SMALL}
        method.args.per_device_train_batch_size={16 if asked.tiny else 64}
        method.args.gradient_accumulation_steps=1
    """
    return [*own, *words.split()]


def start(asked: argparse.Namespace) -> Job:
    own = f"""
        precision=fp32 seed=7 method.args.max_steps={asked.start_steps}
        method.args.learning_rate={asked.learning_rate}
    """
    return Job("start", 1, [*settings(asked), *own.split()], "own", keeps_model=True)


def job(precision: str, adapter: str, seed: int, asked: argparse.Namespace, model: Path) -> Job:
    rate = asked.learning_rate / 2 * (1 if adapter == "full" else 10)
    own = f"seed={seed} method.args.max_steps={asked.steps} method.args.learning_rate={rate:g}"
    start = [f"model.path={model}", "model.init=pretrained", *own.split()]
    overrides = [*settings(asked), *start, *PRECISIONS[precision], *ADAPTERS[adapter]]
    return Job(f"{precision.replace(' ', '-')}-{adapter}-{seed}", 1, overrides, "own")


def refusal(precision: str, adapter: str, asked: argparse.Namespace) -> str | None:
    """Return why the launcher rejects it on this hardware, or None."""
    try:
        own = [*PRECISIONS[precision], *ADAPTERS[adapter]]
        prepare(compose([asked.hardware, *settings(asked), *own]))
    except UserError as error:
        return str(error)
    return None


def combinations() -> list[tuple[str, str]]:
    return [(precision, adapter) for precision in PRECISIONS for adapter in ADAPTERS]


def plan(asked: argparse.Namespace) -> str:
    lines = [" ".join(start(asked).overrides)]
    for precision, adapter in combinations():
        refused = refusal(precision, adapter, asked)
        lines.append(
            f"{precision}, {adapter}: "
            + (f"refused: {refused}" if refused else f"{asked.steps} steps, seeds {SEEDS}")
        )
    return "\n".join(lines)


def measure(asked: argparse.Namespace) -> None:
    """Train all combinations and write the rows of those done, which are not run again."""
    folder, until = asked.folder.resolve(), time.monotonic() + asked.seconds
    run([start(asked)], asked.hardware, folder, 1, until)
    if rows_of(start(asked), folder) is None:
        raise SystemExit(f"the start did not train: {folder / 'start.log'}")
    model = sorted((folder / "runs/start").glob("*/model"))[-1]
    kept = [pair for pair in combinations() if refusal(*pair, asked) is None]
    jobs = {(*pair, seed): job(*pair, seed, asked, model) for seed in SEEDS for pair in kept}
    run(list(jobs.values()), asked.hardware, folder, asked.gpus, until)
    file = folder / f"precision_{asked.hardware.partition('=')[2]}.jsonl"
    with file.open("w") as written:
        for (precision, adapter, seed), one in jobs.items():
            steps = rows_of(one, folder)
            if steps:
                names = {"precision": precision, "adapter": adapter, "seed": seed}
                written.write(json.dumps({**names, **figures(steps)}) + "\n")
    print(report(file))


def figures(steps: list[Row]) -> Row:
    """Return the mean loss of the last quarter, peak memory, median step and tokens/s."""
    speeds = [row["tokens_per_second"] for row in steps[WARM_UP:] if row.get("tokens_per_second")]
    return {
        "steps": steps[-1]["step"],
        "loss": statistics.mean(row["loss"] for row in steps[-max(1, len(steps) // 4) :]),
        "peak_gb": max(row["memory_peak_gb"] for row in steps),
        "step_s": step_s(steps),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
    }


def report(file: Path) -> str:
    """Return a line for each combination, minus the reference of the same seeds."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    base = {row["seed"]: row for row in rows if (row["precision"], row["adapter"]) == REFERENCE}
    lines = [
        "| precision | adapter | seeds | steps | loss | less that of fp32, full | its spread | GB "
        "| tokens/s |",
        "|---" * 9 + "|",
    ]
    missing = []
    for precision, adapter in combinations():
        found = [
            row
            for row in rows
            if (row["precision"], row["adapter"]) == (precision, adapter) and row["seed"] in base
        ]
        if not found:
            missing.append(f"{precision} {adapter}")
            continue
        apart = [row["loss"] - base[row["seed"]]["loss"] for row in found]
        speeds = [row["tokens_per_second"] for row in found if row["tokens_per_second"]]
        cells = [
            precision,
            adapter,
            str(len(found)),
            str(found[0]["steps"]),
            f"{statistics.mean(row['loss'] for row in found):.4f}",
            f"{statistics.mean(apart):+.4f}",
            f"{max(apart) - min(apart):.4f}" if len(apart) > 1 else "",
            f"{max(row['peak_gb'] for row in found):.2f}",
            f"{statistics.mean(speeds):,.0f}" if speeds else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *([f"\nNot measured: {', '.join(missing)}."] if missing else [])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["plan", "measure", "report"])
    parser.add_argument(
        "hardware", help="hardware=<a group of conf/hardware>; for report a file of rows"
    )
    parser.add_argument("--tiny", action="store_true", help="two layers and 16 rows a step")
    parser.add_argument("--start-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gpus", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/precision"))
    parser.add_argument(
        "--seconds", type=float, default=3600, help="no run is started after so many"
    )
    asked = parser.parse_args()
    if asked.what == "report":
        print(report(Path(asked.hardware)))
    elif asked.what == "plan":
        print(plan(asked))
    else:
        measure(asked)


if __name__ == "__main__":
    main()
