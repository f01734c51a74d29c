"""What each precision and each adapter costs in loss, memory and speed: one small model, from the same weights, on the same rows.

    python tests/gpu/precision.py plan hardware=mi300x            what would run, and what is refused there and why
    python tests/gpu/precision.py measure hardware=mi300x         writes runs/precision/precision_mi300x.jsonl; again: goes on
    python tests/gpu/precision.py measure hardware=cpu --tiny     two layers; fp8 is emulated
    python tests/gpu/precision.py report <file>.jsonl             the table, of any file of rows

A start is trained in fp32 first, so that adapters have something to adapt. Every combination goes on from it, once a seed (the order of
the rows, an adapter's first weights). Adapters train at ten times the learning rate of the others.
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

from launch.compose import compose
from launch.errors import UserError
from launch.plan import prepare
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
SEEDS = (0, 1)
REFERENCE = ("fp32", "full")
ON_A_CPU = ["hardware.precisions=[fp32,bf16,fp16,fp8,nf4]"]
Row = dict[str, Any]


def settings(asked: argparse.Namespace) -> list[str]:
    """What all runs have in common."""
    large = ["model.hidden_size=512", "model.intermediate_size=1536", "model.num_layers=8", "model.num_parameters=20980736"]
    size = ["model.num_layers=2", "model.num_parameters=525056"] if asked.tiny else large
    batch = f"method.args.per_device_train_batch_size={16 if asked.tiny else 64}"
    own = ON_A_CPU if asked.hardware == "hardware=cpu" else []
    return [*own, "topology=single", "method=sft", "model=tiny", *size, batch, "method.args.gradient_accumulation_steps=1"]


def start(asked: argparse.Namespace) -> Job:
    steps = [f"method.args.max_steps={asked.start_steps}", f"method.args.learning_rate={asked.learning_rate}", "seed=7"]
    return Job("start", 1, [*settings(asked), "precision=fp32", *steps], "own", keeps_model=True)


def job(precision: str, adapter: str, seed: int, asked: argparse.Namespace, model: Path) -> Job:
    rate = asked.learning_rate / 2 * (1 if adapter == "full" else 10)
    own = [f"model.path={model}", "model.init=pretrained", f"seed={seed}", f"method.args.max_steps={asked.steps}"]
    overrides = [*settings(asked), *own, f"method.args.learning_rate={rate:g}", *PRECISIONS[precision], *ADAPTERS[adapter]]
    return Job(f"{precision.replace(' ', '-')}-{adapter}-{seed}", 1, overrides, "own")


def refusal(precision: str, adapter: str, asked: argparse.Namespace) -> str | None:
    """Why the launcher does not run it on this hardware; None where it does."""
    try:
        prepare(compose([asked.hardware, *settings(asked), *PRECISIONS[precision], *ADAPTERS[adapter]]))
    except UserError as error:
        return str(error)
    return None


def combinations() -> list[tuple[str, str]]:
    return [(precision, adapter) for precision in PRECISIONS for adapter in ADAPTERS]


def plan(asked: argparse.Namespace) -> str:
    lines = [" ".join(start(asked).overrides)]
    for precision, adapter in combinations():
        refused = refusal(precision, adapter, asked)
        lines.append(f"{precision}, {adapter}: " + (f"refused: {refused}" if refused else f"{asked.steps} steps, seeds {SEEDS}"))
    return "\n".join(lines)


def measure(asked: argparse.Namespace) -> None:
    """Rows of what has run are written whatever stops the rest: what is done is not run again."""
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
                written.write(json.dumps({"precision": precision, "adapter": adapter, "seed": seed, **figures(steps)}) + "\n")
    print(report(file))


def figures(steps: list[Row]) -> Row:
    """Of the lines of a metrics.jsonl: mean loss of the last quarter of the steps, peak memory, the median step and tokens/s."""
    speeds = [row["tokens_per_second"] for row in steps[WARM_UP:] if row.get("tokens_per_second")]
    return {
        "steps": steps[-1]["step"],
        "loss": statistics.mean(row["loss"] for row in steps[-max(1, len(steps) // 4) :]),
        "peak_gb": max(row["memory_peak_gb"] for row in steps),
        "step_s": step_s(steps),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
    }


def report(file: Path) -> str:
    """A line for each combination, less the reference of the same seed: a seed that the reference lacks is left out."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    base = {row["seed"]: row for row in rows if (row["precision"], row["adapter"]) == REFERENCE}
    lines = ["| precision | adapter | seeds | steps | loss | less that of fp32, full | its spread | GB | tokens/s |", "|---" * 9 + "|"]
    missing = []
    for precision, adapter in combinations():
        found = [row for row in rows if (row["precision"], row["adapter"]) == (precision, adapter) and row["seed"] in base]
        if not found:
            missing.append(f"{precision} {adapter}")
            continue
        apart = [row["loss"] - base[row["seed"]]["loss"] for row in found]
        speeds = [row["tokens_per_second"] for row in found if row["tokens_per_second"]]
        cells = [precision, adapter, str(len(found)), str(found[0]["steps"]), f"{statistics.mean(row['loss'] for row in found):.4f}"]
        cells += [f"{statistics.mean(apart):+.4f}", f"{max(apart) - min(apart):.4f}" if len(apart) > 1 else ""]
        cells += [f"{max(row['peak_gb'] for row in found):.2f}", f"{statistics.mean(speeds):,.0f}" if speeds else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *([f"\nNot measured: {', '.join(missing)}."] if missing else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "measure", "report"])
    parser.add_argument("hardware", help="hardware=<a group of conf/hardware>; for report a file of rows")
    parser.add_argument("--tiny", action="store_true", help="two layers and 16 rows a step")
    parser.add_argument("--start-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gpus", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/precision"))
    parser.add_argument("--seconds", type=float, default=3600, help="no run is started after so many")
    asked = parser.parse_args()
    if asked.what == "report":
        print(report(Path(asked.hardware)))
    elif asked.what == "plan":
        print(plan(asked))
    else:
        measure(asked)


if __name__ == "__main__":
    main()
