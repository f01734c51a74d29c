"""Schedule the levels and rows of each batch by step, seed and, if adaptive, pass rates.

A batch contains the rows of all ranks for one optimizer step, or GRPO's prompts for one generation.
All ranks compute the same batches; the data loader then selects each rank's part. A sampling cycle
covers a part of the run, so its level shares are means over that part.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from omegaconf import DictConfig
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from launch.core.errors import UserError

Shares = dict[int, float]  # level -> share of a batch; the shares sum to 1
UNTRIED_PASS_RATE = 0.5  # of a level without samples; it maximizes the level's weight p(1-p)


def shares(
    data: DictConfig, levels: Sequence[int], progress: float, pass_rates: Mapping[int, float]
) -> Shares:
    """Return each level's share of a batch at `progress` (0 to 1) of a run.

    The curriculum `progressive` has a stage for each level, all equally long, from the lowest up.
    `mixed` also spreads a share `earlier` of each batch over the lower levels. `adaptive` weights a
    level of pass rate p by p(1-p), but at least by `floor`. If all answers to a prompt are right,
    or all are wrong, GRPO's advantages are zero.
    """
    args = data.curriculum_args
    if data.curriculum == "adaptive":
        weights = {
            level: max(args.floor, (p := pass_rates.get(level, UNTRIED_PASS_RATE)) * (1 - p))
            for level in levels
        }
        return {level: weight / sum(weights.values()) for level, weight in weights.items()}
    stage = min(len(levels) - 1, math.floor(progress * len(levels)))
    earlier = args.earlier if data.curriculum == "mixed" and stage else 0.0
    return {
        level: 1 - earlier if n == stage else (earlier / stage if n < stage else 0.0)
        for n, level in enumerate(levels)
    }


def cycle_shares(
    data: DictConfig,
    levels: Sequence[int],
    cycle: int,
    num_cycles: int,
    pass_rates: Mapping[int, float],
) -> Shares:
    """Return each level's mean share over cycle `cycle` (from 1) of `num_cycles`.

    The mean includes every level, even if there are fewer cycles than levels.
    """
    # All stages end at multiples of 1 / (levels x cycles), so the mean of these midpoints is exact.
    midpoints = [(cycle - 1 + (n + 0.5) / len(levels)) / num_cycles for n in range(len(levels))]
    parts = [shares(data, levels, midpoint, pass_rates) for midpoint in midpoints]
    return {level: sum(part[level] for part in parts) / len(parts) for level in levels}


def pass_scores(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each completion's score from 0 to 1. A pass rate is a mean of scores.

    rewards: (completions, rewards), NaN where a reward does not apply. weights: (rewards), negative
    for penalties. As in recipes/rewards/verifier.py, a score is the sum of the weighted rewards
    over the sum of the absolute weights.
    """
    sizes = weights.abs() * ~rewards.isnan()
    score = (rewards.nan_to_num() * weights).sum(1) / sizes.sum(1)
    return score.nan_to_num().clamp(0, 1)  # NaN if no reward applies


def check_levels(curriculum: str, levels: Sequence[Any]) -> None:
    """Raise UserError unless the rows have at least two levels, all integers."""
    values = set(levels)
    if len(values) < 2 or not all(isinstance(level, int) for level in values):
        raise UserError(
            f"data.curriculum={curriculum} needs rows of at least two levels, but the rows have "
            f"the levels {sorted(map(str, values))}. Set an integer `level` in every row, or use: "
            "data.curriculum=none."
        )


def read_pass_rates(path: str | None) -> dict[int, float]:
    """Return {level: pass rate or accuracy} of a result.json. Raises UserError if it is invalid."""
    if path is None:
        return {}
    try:
        by_level = json.loads(Path(path).read_text(encoding="utf-8"))["by_level"]
        return {
            int(level): float(row.get("pass_rate", row.get("accuracy")))
            for level, row in by_level.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"data.pass_rates={path} is not a result.json with pass_rate or accuracy in by_level: "
            f"{error!r}. Use the result.json of method=sample or method=evaluate."
        ) from error


class Schedule:
    """Choose the rows of every batch. If `online`, shares follow the scores passed to `observe`.

    `lag` is the number of batches drawn before the answers to a batch are known. Batch n uses only
    scores of batches before n - lag, so batches do not depend on prefetching or resuming.
    """

    def __init__(
        self,
        data: DictConfig,
        row_levels: Sequence[int],
        batch_size: int,
        num_batches: int,
        seed: int,
        lag: int = 1,
        online: bool = False,
    ) -> None:
        self.data, self.batch_size, self.num_batches = data, batch_size, num_batches
        self.seed, self.lag, self.online = seed, lag, online
        self.rows = {
            level: [n for n, row_level in enumerate(row_levels) if row_level == level]
            for level in sorted(set(row_levels))
        }
        # Pass rates by level after each answered batch. The first entry comes from data.pass_rates.
        self.rates: list[dict[int, float]] = [read_pass_rates(data.pass_rates)]
        self.logged_step = 0

    def shares(self, batch: int) -> Shares:
        # An IndexError means that the lag is too small.
        rates = self.rates[max(0, batch - self.lag) if self.online else 0]
        return shares(self.data, list(self.rows), batch / self.num_batches, rates)

    def observe(self, levels: Sequence[int], scores: Sequence[float]) -> None:
        """Update the pass rates by the completions of the next batch, from all ranks."""
        memory, rates = self.data.curriculum_args.memory, dict(self.rates[-1])
        for level in sorted(set(levels)):
            pairs = zip(levels, scores, strict=True)
            of_level = [score for score_level, score in pairs if score_level == level]
            rate = sum(of_level) / len(of_level)
            rates[level] = memory * rates[level] + (1 - memory) * rate if level in rates else rate
        self.rates.append(rates)

    def batches(self) -> Iterator[list[int]]:
        """Yield the row indices of each batch. A row repeats only after all rows of its level."""
        rng = random.Random(self.seed)
        unused: dict[int, list[int]] = {level: [] for level in self.rows}
        deficits = dict.fromkeys(self.rows, 0.0)  # rows that a level is below its share
        for batch in range(self.num_batches):
            chosen, batch_shares = [], self.shares(batch)
            present = [level for level, share in batch_shares.items() if share > 0]
            for _ in range(self.batch_size):
                for level, share in batch_shares.items():
                    deficits[level] += share
                level = max(present, key=deficits.__getitem__)
                deficits[level] -= 1.0
                if not unused[level]:
                    unused[level] = rng.sample(self.rows[level], len(self.rows[level]))
                chosen.append(unused[level].pop())
            rng.shuffle(chosen)
            yield chosen


class ScheduleSampler(Sampler[int]):
    """Yield the row indices of a schedule in order, with repeated rows and batches for GRPO."""

    def __init__(self, schedule: Schedule, row_repeats: int = 1, batch_repeats: int = 1) -> None:
        self.schedule, self.row_repeats, self.batch_repeats = schedule, row_repeats, batch_repeats

    def __iter__(self) -> Iterator[int]:
        for batch in self.schedule.batches():
            for _ in range(self.batch_repeats):
                yield from (row for row in batch for _ in range(self.row_repeats))

    def __len__(self) -> int:
        num_rows = self.schedule.num_batches * self.schedule.batch_size
        return num_rows * self.row_repeats * self.batch_repeats


class ScheduleState(TrainerCallback, ExportableState):
    """Save an adaptive schedule's pass rates in checkpoints, and restore them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def state(self) -> dict[str, Any]:
        history = self.schedule.rates  # JSON has no integer keys
        rates = [{str(level): rate for level, rate in by_level.items()} for by_level in history]
        return {"args": {}, "attributes": {"rates": rates}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        self.schedule.logged_step = state.global_step
        if saved:
            self.schedule.rates[:] = [
                {int(level): rate for level, rate in by_level.items()}
                for by_level in saved["attributes"]["rates"]
            ]


class Curriculum:
    """A mixin that chooses rows by `data.curriculum` and logs the share of each level.

    List it before the TRL trainer.
    """

    _schedule: Schedule | None = None

    def use_curriculum(self, data: DictConfig, seed: int, ahead: int = 0) -> None:
        """Create the schedule; call once, after __init__. Raises UserError if rows have no levels.

        `ahead` is the number of generations that are requested in advance.
        """
        if data.curriculum == "none":
            return
        has_levels = "level" in self.train_dataset.column_names
        levels = self.train_dataset["level"] if has_levels else [None]
        check_levels(data.curriculum, levels)
        args = self.args
        self._row_repeats = self._batch_repeats = 1
        self._draws_per_step = 1  # from the data loader, per optimizer step
        size = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
        if hasattr(self, "num_generations"):
            self._row_repeats = self.num_generations
            self._batch_repeats = self.num_iterations * args.steps_per_generation
            self._draws_per_step = args.gradient_accumulation_steps
            size = args.generation_batch_size // self.num_generations
        num_batches = math.ceil(args.max_steps * self._draws_per_step / self._batch_repeats)
        # The loader draws one batch ahead to detect its end, and its workers prefetch more. A step
        # takes all of its draws together.
        prefetched = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2)
        lag = math.ceil((self._draws_per_step + 1 + prefetched) / self._batch_repeats) + 1 + ahead
        online = hasattr(self, "num_generations") and data.curriculum == "adaptive"
        self._schedule = Schedule(data, levels, size, num_batches, seed, lag, online)
        self.add_callback(ScheduleState(self._schedule))

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        if self._schedule is None:
            return super()._get_train_sampler(dataset)
        return ScheduleSampler(self._schedule, self._row_repeats, self._batch_repeats)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        if self._schedule is not None and self._schedule.online and self.model.training:
            scores = pass_scores(rewards, self.reward_weights.to(rewards.device))
            self._schedule.observe(gather_object([row["level"] for row in inputs]), scores.tolist())
        return rewards

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Add the mean scheduled shares of the levels since the last logged step."""
        if self._schedule is not None and "loss" in logs:
            logs = {**logs, **self.level_shares(self._schedule.logged_step, self.state.global_step)}
            self._schedule.logged_step = self.state.global_step
        super().log(logs, *args, **kwargs)

    def level_shares(self, after: int, until: int) -> dict[str, float]:
        """Return the mean share of each level in the optimizer steps `after` + 1 to `until`."""
        per_step = self._draws_per_step
        draws = range(min(after, until - 1) * per_step, until * per_step)
        parts = [self._schedule.shares(draw // self._batch_repeats) for draw in draws]
        return {
            f"level_share/{level}": sum(part[level] for part in parts) / len(parts)
            for level in parts[0]
        }
