"""Find the batch per rank, and the checkpointing, that train the most tokens per second.

The launcher plans every candidate. This measures those that should fit and, of each kind, the
smallest that should not, which shows the margin of the plan.
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
    """Arguments. `batches` are rows per rank, in any order.

    `checkpointing`: whether the backward pass recomputes activations.
    """

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
            "batch": each["args"][SIZE],
            "checkpointing": each["args"][CHECKPOINTING],
            "planned_gb": each["planned_gb"],
            "accumulation": each["args"].get("gradient_accumulation_steps", 1),
        }
        for each in candidates
    ]
    settings = [Setting(candidate["args"]) for candidate in candidates]

    def work(case: Row) -> Row:
        name = f"batch{case['batch']}-{_kind(case['checkpointing']).replace(' ', '-')}"
        return training(config, args, name, settings[cases.index(case)])

    rows = measure_rows(config, args, table, cases, work, skip_larger("batch", "checkpointing"))
    own = config.tuned.trainer_args
    # The unchanged recipe, or else the nearest candidate that runs.
    before = min(
        [row for row in rows if not row["error"]] or rows,
        key=lambda row: (row["checkpointing"] != own[CHECKPOINTING], abs(row["batch"] - own[SIZE])),
    )
    if (before["batch"], before["checkpointing"]) != (own[SIZE], own[CHECKPOINTING]):
        notes.append(
            f"the unchanged recipe, batch {own[SIZE]} {_kind(own[CHECKPOINTING])}, does not "
            f"run here, so `before` is batch {before['batch']} {_kind(before['checkpointing'])}."
        )
    notes += margin(rows, candidates)
    return finish(config, table, rows, before, settings, notes)


def select_candidates(planned: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return, of each kind of checkpointing, all that fit and one more, and notes on the others."""
    candidates, omitted = [], []
    for kind in dict.fromkeys(candidate["args"][CHECKPOINTING] for candidate in planned):
        same_kind = [each for each in planned if each["args"][CHECKPOINTING] == kind]
        too_large = [each for each in same_kind if not each["fits"]]
        candidates += [each for each in same_kind if each["fits"]] + too_large[:1]
        omitted += [f"{each['args'][SIZE]} {_kind(kind)}" for each in too_large[1:]]
    note = "not measured, because the plan says that they do not fit: batches of "
    return candidates, [f"{note}{', '.join(omitted)}."] if omitted else []


def _kind(checkpointing: bool) -> str:
    return f"{'with' if checkpointing else 'without'} checkpointing"


def margin(rows: list[Row], candidates: list[dict[str, Any]]) -> list[str]:
    """Return notes that compare the plan with the measurements."""
    notes = []
    for row, candidate in zip(rows, candidates, strict=True):
        if candidate["fits"]:
            continue
        outcome = row["error"]
        if outcome == OUT_OF_MEMORY:
            outcome = "did not fit"
        elif not outcome:
            outcome = f"fitted, with {row['memory_gb']:.1f} GB at its peak"
        notes.append(
            f"batch {row['batch']}, planned to exceed the memory of "
            f"{candidate['capacity_gb']:.0f} GB: {outcome}."
        )
    return notes


if __name__ == "__main__":
    main(batch)
