"""Find the batch per rank and the checkpointing that train the most tokens per second.

The launcher plans every candidate. This program measures those that should fit in memory. With and
without checkpointing, it also measures the smallest batch that should not fit, which tests the
plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench.benchmark import OUT_OF_MEMORY, Row, Table, measure_rows, skip_larger
from recipes.rank.program import is_main_rank, main
from recipes.tune.trial import Setting
from recipes.tune.tuning import STEP, TRAINING, TrainingTuneConfig, finish, training

SIZE, CHECKPOINTING = STEP[0], "gradient_checkpointing"


@dataclass
class BatchConfig(TrainingTuneConfig):
    """Arguments. `batches`: numbers of rows per rank. `checkpointing`: with, without, or both."""

    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    checkpointing: list[bool] = field(default_factory=lambda: [True, False])


def batch(config: DictConfig) -> dict[str, Any]:
    args = BatchConfig(**OmegaConf.to_container(config.trainer_args))
    if not is_main_rank():  # the trials start their own ranks on the same GPUs
        return {}
    planned: list[dict[str, Any]] = OmegaConf.to_container(config.tuned.planned)  # type: ignore[assignment]
    candidates, notes = select_candidates(planned)
    keys = f"batch checkpointing planned_gb {TRAINING}"
    table = Table("batch", keys, figure="tokens_per_second")
    cases = [
        {
            "batch": candidate["args"][SIZE],
            "checkpointing": candidate["args"][CHECKPOINTING],
            "planned_gb": candidate["planned_gb"],
            "accumulation": candidate["args"].get("gradient_accumulation_steps", 1),
        }
        for candidate in candidates
    ]
    settings = [Setting(candidate["args"]) for candidate in candidates]

    def work(case: Row) -> Row:
        name = f"batch{case['batch']}-{_kind(case['checkpointing']).replace(' ', '-')}"
        return training(config, args, name, settings[cases.index(case)])

    rows = measure_rows(config, args, table, cases, work, skip_larger("batch", "checkpointing"))
    size, checkpointing = (config.tuned.trainer_args[key] for key in (SIZE, CHECKPOINTING))
    # The unchanged recipe or, if it does not run, the nearest candidate that does.
    before = min(
        [row for row in rows if not row["error"]] or rows,
        key=lambda row: (row["checkpointing"] != checkpointing, abs(row["batch"] - size)),
    )
    if (before["batch"], before["checkpointing"]) != (size, checkpointing):
        notes.append(
            f"The unchanged recipe (batch {size} {_kind(checkpointing)}) does not run "
            f"here, so `before` is batch {before['batch']} {_kind(before['checkpointing'])}."
        )
    notes += margin(rows, candidates)
    return finish(config, table, rows, before, settings, notes)


def select_candidates(planned: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the candidates to measure, and a note on the others.

    With and without checkpointing, these are all that fit and the first one that does not.
    """
    candidates, omitted = [], []
    for kind in dict.fromkeys(candidate["args"][CHECKPOINTING] for candidate in planned):
        same_kind = [plan for plan in planned if plan["args"][CHECKPOINTING] == kind]
        too_large = [plan for plan in same_kind if not plan["fits"]]
        candidates += [plan for plan in same_kind if plan["fits"]] + too_large[:1]
        omitted += [f"{plan['args'][SIZE]} {_kind(kind)}" for plan in too_large[1:]]
    note = "Not measured, because they do not fit according to the plan: batch "
    return candidates, [f"{note}{', batch '.join(omitted)}."] if omitted else []


def _kind(checkpointing: bool) -> str:
    return f"{'with' if checkpointing else 'without'} checkpointing"


def margin(rows: list[Row], candidates: list[dict[str, Any]]) -> list[str]:
    """Return a note on each measured candidate that should not fit according to the plan."""
    notes = []
    for row, candidate in zip(rows, candidates, strict=True):
        if candidate["fits"]:
            continue
        outcome = row["error"]
        if outcome == OUT_OF_MEMORY:
            outcome = "did not fit"
        elif not outcome:
            outcome = f"did fit, with a peak of {row['memory_gb']:.1f} GB"
        notes.append(
            f"Batch {row['batch']}, planned to exceed the memory of "
            f"{candidate['capacity_gb']:.0f} GB: {outcome}."
        )
    return notes


if __name__ == "__main__":
    main(batch)
