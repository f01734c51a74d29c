"""Compare the loss curves of all settings that speed=auto may choose, on a CPU.

    nice -n 5 python tests/gpu/curves.py measure
                            writes runs/curves/curves.jsonl; a second call resumes
    python tests/gpu/curves.py report
                            writes the table to docs/results/speed.md; exit code 4 if curves differ

A tiny Qwen3 with random weights trains for 200 steps on generated text, with three seeds. All
settings of a seed start from the same weights and train on the same rows. Compiled layers need a
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
from tests.gpu.speed_report import cells_of, write

STEPS, SEEDS, PRECISIONS = 200, (0, 1, 2), ("fp32", "bf16")
# The first steps are compared one by one. The mean of the last steps is the final loss.
FIRST, LAST = 10, 20
FIRST_WITHIN = 1e-3  # tolerance of the first steps in bf16, as a share of the loss
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
    # In bf16, the micro-batch alone changes losses by up to 2.7e-3 in 12 steps of 32 rows, which is
    # 6e-4 of the loss.
    "micro-batch": f"speed=off {WHOLE}",
    # All choices that are possible on a GPU. On a CPU, speed=auto would choose fewer.
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
    """Train the settings that are not finished, and write the losses of all finished ones."""
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
    """Compare each setting with eager, and return the table and whether all settings agree.

    A final loss agrees if it differs from that of eager by no more than the seeds of eager differ.
    """
    columns = ["precision", "setting", f"{FIRST} steps within", "final loss", "less eager's"]
    columns.append("agrees")
    lines, whole, spreads = [cells_of(columns), "|" + "---|" * len(columns)], True, []
    for precision in PRECISIONS:
        finals = {
            key: mean(losses[-LAST:]) for key, losses in curves.items() if key[1] == precision
        }
        of_seeds = [final for (setting, *_), final in finals.items() if setting == EAGER]
        spread = max(of_seeds) - min(of_seeds) if of_seeds else 0.0
        spreads.append(f"{spread:.4f} ({precision})")
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
            shift = f"{mean(shifts):+.4f} (at most {max(map(abs, shifts)):.4f})"
            cells = [precision, setting, f"{apart:.1e}", f"{final:.4f}", shift]
            lines.append(cells_of([*cells, "yes" if agrees else "**no**"]))
    legend = (
        f"The final loss is the mean of the last {LAST} of {STEPS} steps over {len(SEEDS)} seeds. "
        "A setting agrees if its final loss differs from eager's by no more than two seeds do, "
        f"{' and '.join(spreads)}. "
        f"In bf16, each of the first {FIRST} losses must also be within {FIRST_WITHIN:g} of "
        "eager's."
    )
    return "\n".join([*lines, "", legend]), whole


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
    parser.add_argument("--seconds", type=float, default=7200, help="start no run after this time")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.folder.resolve(), options.at_once, options.seconds)
        return 0
    shown, whole = table(read(options.folder / "curves.jsonl"))
    print(shown)
    write("speed", "curves", shown)
    return 0 if whole else 4


if __name__ == "__main__":
    sys.exit(main())
