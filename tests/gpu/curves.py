"""Compare on a CPU the loss curves of everything that `speed=auto` may choose.

    nice -n 5 python tests/gpu/curves.py measure
                            writes runs/curves/curves.jsonl; a second call continues
    python tests/gpu/curves.py report
                            the table, into docs/results/speed.md; exit code 4 if curves disagree

A tiny Qwen3 with random weights trains for 200 steps of generated text, with three seeds. All
settings of a seed start from the same weights and take the same rows. The compiled layers need a
C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.jobs import ROOT, Job, rows_of, run
from tests.gpu.speed_report import page

STEPS, SEEDS, PRECISIONS = 200, (0, 1, 2), ("fp32", "bf16")
FIRST, LAST = 10, 20  # steps compared one by one, and those whose mean is the final loss
FIRST_WITHIN = 1e-3  # of the loss, in bf16
EAGER = "eager"
TINY = "method=sft model=tiny topology=single"
PLAIN = (
    "method.args.per_device_train_batch_size=16 method.args.gradient_accumulation_steps=4 "
    "method.args.gradient_checkpointing=true"
)
WHOLE = (
    "method.args.per_device_train_batch_size=64 method.args.gradient_accumulation_steps=1 "
    "method.args.gradient_checkpointing=false"
)
SETTINGS = {
    EAGER: f"speed=off {PLAIN}",
    "compiled": f"speed=off step.compile=true {PLAIN}",
    "packed": f"speed=off step.rows=packed {PLAIN}",
    # In bf16 another micro-batch alone moves the losses: in 12 steps of 32 rows by up to 2.7e-3,
    # which is 6e-4 of the loss.
    "micro-batch": f"speed=off {WHOLE}",
    # The CPU's own choices are few, so these are all that a GPU's may be.
    "chosen": f"speed=off step.compile=true step.rows=packed {WHOLE}",
}
Curves = dict[tuple[str, str, int], list[float]]


def job(setting: str, precision: str, seed: int) -> Job:
    words = (
        f"{TINY} {SETTINGS[setting]} precision={precision} seed={seed} "
        f"method.args.max_steps={STEPS}"
    )
    return Job(f"{setting}-{precision}-{seed}", 1, words.split(), "own")


def combinations() -> list[tuple[str, str, int]]:
    return [(setting, p, seed) for p in PRECISIONS for seed in SEEDS for setting in SETTINGS]


def measure(folder: Path, at_once: int, seconds: float) -> None:
    """Train what has not been trained, several at a time, and write the losses of what has."""
    jobs = [job(*key) for key in combinations()]
    run(jobs, "hardware=cpu", folder, at_once, time.monotonic() + seconds)
    with (folder / "curves.jsonl").open("w") as file:
        for setting, precision, seed in combinations():
            rows = rows_of(job(setting, precision, seed), folder)
            if rows:
                row = {"setting": setting, "precision": precision, "seed": seed}
                row["losses"] = [line["loss"] for line in rows]
                file.write(json.dumps(row) + "\n")


def table(curves: Curves) -> tuple[str, bool]:
    """Compare each setting with eager of the same precision and seed; return whether all agree too.

    Final losses agree if they differ from eager's by no more than the final losses of two seeds do.
    """
    columns = ["precision", "setting", "seeds", f"{FIRST} steps within", "final loss"]
    columns += ["less eager's", "seeds differ by", "agrees"]
    lines, whole = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)], True
    for precision in PRECISIONS:
        finals = {
            key: mean(losses[-LAST:]) for key, losses in curves.items() if key[1] == precision
        }
        of_seeds = [final for (setting, *_), final in finals.items() if setting == EAGER]
        spread = max(of_seeds) - min(of_seeds) if of_seeds else 0.0
        for setting in SETTINGS:
            seeds = [
                seed
                for seed in SEEDS
                if {(setting, precision, seed), (EAGER, precision, seed)} <= set(finals)
            ]
            if not seeds:
                whole = False
                continue
            pairs = [((setting, precision, seed), (EAGER, precision, seed)) for seed in seeds]
            apart = max(first_apart(curves[own], curves[eager]) for own, eager in pairs)
            shifts = [finals[own] - finals[eager] for own, eager in pairs]
            near = precision != "bf16" or apart <= FIRST_WITHIN
            agrees = near and max(map(abs, shifts)) <= spread
            whole = whole and agrees and len(seeds) == len(SEEDS)
            final = mean(finals[setting, precision, seed] for seed in seeds)
            cells: list[Any] = [precision, setting, len(seeds), f"{apart:.1e}", f"{final:.4f}"]
            cells += [
                f"{mean(shifts):+.4f} (at most {max(map(abs, shifts)):.4f})",
                f"{spread:.4f}",
                "yes" if agrees else "**no**",
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    said = (
        f"Final is the mean of the last {LAST} of {STEPS} steps. "
        "A setting agrees where that differs from eager's by no more than two seeds do, "
        f"in bf16 also each of the first {FIRST} losses by no more than {FIRST_WITHIN:g} of it."
    )
    return "\n".join([*lines, "", said]), whole


def first_apart(losses: list[float], others: list[float]) -> float:
    return max(
        abs(one / other - 1) for one, other in zip(losses[:FIRST], others[:FIRST], strict=True)
    )


def read(file: Path) -> Curves:
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["setting"], row["precision"], row["seed"]): row["losses"] for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/curves")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--seconds", type=float, default=7200, help="no run is started after so many"
    )
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.folder.resolve(), given.at_once, given.seconds)
        return 0
    shown, whole = table(read(given.folder / "curves.jsonl"))
    print(shown)
    target = ROOT / "docs/results/speed.md"
    target.write_text(page(target.read_text(), "curves", shown))
    return 0 if whole else 4


if __name__ == "__main__":
    sys.exit(main())
