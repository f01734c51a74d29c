"""The batch of a rank and checkpointing that train the most tokens a second: the memory planner first, measurement second.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=tune/batch model=qwen3_4b method.args.max_length=4096
    8 GPUs:  python launch/run.py hardware=mi350x topology=fsdp method=tune/batch model=qwen3_8b

The launcher plans every candidate. Measured are those that it says fit, and of each kind the first that it says does not, which shows how
much the plan keeps back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench.series import OUT_OF_MEMORY, Column, Row, Table, measure_rows
from recipes.common.errors import UserError
from recipes.common.program import is_main_rank, main
from recipes.tune import trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, trial_data

SIZE, CHECKPOINTING = "per_device_train_batch_size", "gradient_checkpointing"


@dataclass
class BatchConfig(TrainingTuneConfig):
    """`batches`: rows of a rank, any order. `checkpointing`: whether activations are computed again in backward. `planned`: what the
    launcher's memory planner says of each pair."""

    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    checkpointing: list[bool] = field(default_factory=lambda: [True, False])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("batches", "checkpointing")


def batch(config: DictConfig) -> dict[str, Any]:
    args = BatchConfig(**OmegaConf.to_container(config.trainer_args))
    if not is_main_rank():  # the trials have ranks of their own, on the same GPUs
        return {}
    planned: list[dict[str, Any]] = OmegaConf.to_container(config.tuned.planned)  # type: ignore[assignment]
    chosen, notes = to_measure(planned)
    table = Table(
        "batch",
        figure="tokens_per_second",
        columns=[Column("batch", "batch"), Column("checkpointing", "checkpointing"), Column("planned_gb", "planned GB", 1), *TRAINING],
    )
    cases = [_case(one) for one in chosen]
    settings = {(case["batch"], case["checkpointing"]): Setting(one["args"]) for case, one in zip(cases, chosen, strict=True)}
    ranks = trial.num_ranks()
    most = max(one["args"][SIZE] * one["args"].get("gradient_accumulation_steps", 1) for one in chosen) * ranks
    data = trial_data(config, args, most)
    rows: list[Row] = []

    def work(case: Row) -> Row:
        if smaller := out_of_memory_before(case, rows):
            raise UserError(f"not measured: a batch of {smaller} ran out of memory")
        name = f"batch{case['batch']}-{'with' if case['checkpointing'] else 'without'}-checkpointing"
        taken = case["batch"] * case["accumulation"] * ranks * (args.steps + args.warmup)  # no more rows than that are read
        rows_of_trial = {**data, "limit": taken} if data else {}
        return trial.training(config, name, settings[case["batch"], case["checkpointing"]], args.steps, args.warmup, rows_of_trial)

    measure_rows(config, args, table, cases, work, rows)
    before = as_it_stands(config, rows)
    used = [settings[row["batch"], row["checkpointing"]] for row in rows]
    return finish(config, table, rows, before, used, [*notes, *margin(rows, chosen), *another(before, config.tuned.trainer_args)])


def to_measure(planned: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each kind of checkpointing all that fit, the smallest first, and one more; and what is left out, said."""
    chosen, left_out = [], []
    for kind in dict.fromkeys(one["args"][CHECKPOINTING] for one in planned):
        of_kind = [one for one in planned if one["args"][CHECKPOINTING] == kind]
        above = [one for one in of_kind if not one["fits"]]
        chosen += [one for one in of_kind if one["fits"]] + above[:1]
        left_out += above[1:]
    said = [f"{one['args'][SIZE]} {'with' if one['args'][CHECKPOINTING] else 'without'} checkpointing" for one in left_out]
    return chosen, [f"not measured, because the planner says that they do not fit: batches of {', '.join(said)}."] if said else []


def out_of_memory_before(case: Row, rows: list[Row]) -> int | None:
    """A smaller batch of the same kind that ran out of memory."""
    of_kind = (row for row in rows if row["checkpointing"] == case["checkpointing"] and row["error"] == OUT_OF_MEMORY)
    return next((int(row["batch"]) for row in of_kind if row["batch"] < case["batch"]), None)


def as_it_stands(config: DictConfig, rows: list[Row]) -> Row:
    """The row of the recipe's own arguments, or the nearest batch of its kind that could be measured."""
    own = config.tuned.trainer_args
    measured = [row for row in rows if not row["error"]] or rows
    return min(measured, key=lambda row: (row["checkpointing"] != own[CHECKPOINTING], abs(row["batch"] - own[SIZE])))


def another(before: Row, own: Any) -> list[str]:
    """What `before` is where the recipe's own arguments could not be measured."""
    if (before["batch"], before["checkpointing"]) == (own[SIZE], own[CHECKPOINTING]):
        return []
    named = [f"batch {size} {'with' if kind else 'without'} checkpointing" for size, kind in
             ((own[SIZE], own[CHECKPOINTING]), (before["batch"], before["checkpointing"]))]  # fmt: skip
    return [f"the recipe as it stands, {named[0]}, does not run here; before is the nearest that does, {named[1]}."]


def margin(rows: list[Row], chosen: list[dict[str, Any]]) -> list[str]:
    """How the plan compares with what was measured."""
    said = []
    for row, one in zip(rows, chosen, strict=True):
        if not one["fits"]:
            found = (
                "did not fit" if row["error"] == OUT_OF_MEMORY else row["error"] or f"fitted, with {row['memory_gb']:.1f} GB at its peak"
            )
            said.append(f"batch {row['batch']}, planned to need more than the {one['capacity_gb']:.0f} GB there are: {found}.")
    return said


def _case(one: dict[str, Any]) -> Row:
    return {
        "batch": one["args"][SIZE],
        "checkpointing": one["args"][CHECKPOINTING],
        "planned_gb": one["planned_gb"],
        "accumulation": one["args"].get("gradient_accumulation_steps", 1),
    }


if __name__ == "__main__":
    main(batch)
