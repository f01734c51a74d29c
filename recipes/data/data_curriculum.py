"""Schedule the levels and rows of each batch, by step, seed and (adaptive) pass rates.

All methods share one function for the shares of levels: a batch of sft or grpo is at a point of the
run, and a cycle of samples covers a part of it. A batch is what all ranks use in one optimizer
step, or for GRPO the prompts of one generation. All ranks compute the same batches from the same
numbers; the data loader then gives each rank its part.
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

Shares = dict[int, float]  # level -> share of a batch; they sum to 1
UNKNOWN = 0.5  # assumed pass rate of a level not tried yet, which gives it the largest weight


def shares(
    data: DictConfig, levels: Sequence[int], progress: float, pass_rates: Mapping[int, float]
) -> Shares:
    """Return the share of each level at `progress` (0 to 1) of a run, by `data.curriculum`.

    progressive: stages of equal length, one per level, from the lowest. mixed: the same, but a
    share `earlier` of each batch is spread over the lower levels. adaptive: in proportion to p(1-p)
    for the pass rate p, at least `floor`, because GRPO's advantages are zero if all answers are
    right or all are wrong.
    """
    args = data.curriculum_args
    if data.curriculum == "adaptive":
        weights = {
            level: max(args.floor, (p := pass_rates.get(level, UNKNOWN)) * (1 - p))
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
    """Return the share of each level in cycle `cycle` (from 1): the mean over its part of the run.

    So if there are fewer cycles than levels, none is left out; a single cycle has equal shares.
    """
    # sampling points; no stage ends between two of them
    places = [(cycle - 1 + (n + 0.5) / len(levels)) / num_cycles for n in range(len(levels))]
    parts = [shares(data, levels, place, pass_rates) for place in places]
    return {level: sum(part[level] for part in parts) / len(parts) for level in levels}


def pass_scores(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Score each completion from 0 to 1; a pass rate is the mean of these.

    rewards: (completions, rewards), NaN if a reward does not apply; weights: (rewards), negative
    for a penalty. As in recipes/rewards/verifier.py, the mean divides by the weights' absolute sum.
    """
    sizes = weights.abs() * ~rewards.isnan()
    score = (rewards.nan_to_num() * weights).sum(1) / sizes.sum(1)
    return score.nan_to_num().clamp(0, 1)  # NaN if no reward applies


def check_levels(curriculum: str, levels: Sequence[Any]) -> None:
    """Reject rows that do not have two or more levels, each a whole number."""
    values = set(levels)
    if len(values) < 2 or not all(isinstance(level, int) for level in values):
        raise UserError(
            f"data.curriculum={curriculum}: the rows have the levels {sorted(map(str, values))}. "
            "Give every row a whole number as level, of two or more levels, or use "
            "data.curriculum=none."
        )


def read_pass_rates(path: str | None) -> dict[int, float]:
    """Return level -> pass rate (or accuracy) from a result.json, or {} without a path."""
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
            f"data.pass_rates={path}: a result.json with by_level (pass_rate or accuracy) is "
            f"needed: {error!r}."
        ) from error


class Schedule:
    """Choose the rows of every batch; adaptive schedules also use what `observe` records.

    `lag` is the number of batches drawn before the answers to a batch are known. Batch n uses those
    before n - lag, so it depends neither on how early the data loader draws it nor on a resume.
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
            level: [n for n, of in enumerate(row_levels) if of == level]
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
        """Record the levels and scores of the next batch's prompts on all ranks."""
        memory, rates = self.data.curriculum_args.memory, dict(self.rates[-1])
        for level in sorted(set(levels)):
            of_level = [score for of, score in zip(levels, scores, strict=True) if of == level]
            rate = sum(of_level) / len(of_level)
            rates[level] = memory * rates[level] + (1 - memory) * rate if level in rates else rate
        self.rates.append(rates)

    def batches(self) -> Iterator[list[int]]:
        """Yield the row numbers of every batch; no row repeats before its level is used up."""
        rng = random.Random(self.seed)
        waiting: dict[int, list[int]] = {level: [] for level in self.rows}
        owed = dict.fromkeys(self.rows, 0.0)
        for batch in range(self.num_batches):
            chosen, batch_shares = [], self.shares(batch)
            present = [level for level, share in batch_shares.items() if share > 0]
            for _ in range(self.batch_size):
                for level, share in batch_shares.items():
                    owed[level] += share
                # Each place gets the level that is furthest below its share. So later places
                # correct rounding, and a level without a share gets none.
                level = max(present, key=owed.__getitem__)
                owed[level] -= 1.0
                if not waiting[level]:
                    waiting[level] = rng.sample(self.rows[level], len(self.rows[level]))
                chosen.append(waiting[level].pop())
            rng.shuffle(chosen)
            yield chosen


class ScheduleSampler(Sampler[int]):
    """Yield a schedule's rows in order, each row `each` times and each batch `whole` times."""

    def __init__(self, schedule: Schedule, repeats: int = 1, cycles: int = 1) -> None:
        self.schedule, self.each, self.whole = schedule, repeats, cycles

    def __iter__(self) -> Iterator[int]:
        for batch in self.schedule.batches():
            for _ in range(self.whole):
                yield from (row for row in batch for _ in range(self.each))

    def __len__(self) -> int:
        return self.schedule.num_batches * self.schedule.batch_size * self.each * self.whole


class ScheduleState(TrainerCallback, ExportableState):
    """Save an adaptive schedule's observations in the trainer's state and checkpoints."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def state(self) -> dict[str, Any]:
        # JSON has no integer keys
        rates = [
            {str(level): rate for level, rate in known.items()} for known in self.schedule.rates
        ]
        return {"args": {}, "attributes": {"rates": rates}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        self.schedule.logged_step = state.global_step
        if saved:
            self.schedule.rates[:] = [
                {int(level): rate for level, rate in known.items()}
                for known in saved["attributes"]["rates"]
            ]


class Curriculum:
    """Choose rows by `data.curriculum` and log the shares: a mixin, placed before a TRL trainer."""

    _schedule: Schedule | None = None

    def use(self, data: DictConfig, seed: int, ahead: int = 0) -> None:
        """Set the schedule up; call once, after __init__. Raises UserError for missing levels.

        `ahead` is the number of generations that are requested early.
        """
        if data.curriculum == "none":
            return
        has_levels = "level" in self.train_dataset.column_names
        levels = self.train_dataset["level"] if has_levels else [None]
        check_levels(data.curriculum, levels)
        args = self.args
        # Draws of a row in sequence, passes over a batch, and draws from the data loader per
        # optimizer step.
        self._each = self._whole = self._per_step = 1
        size = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
        if hasattr(self, "num_generations"):
            self._each = self.num_generations
            self._whole = self.num_iterations * args.steps_per_generation
            self._per_step = args.gradient_accumulation_steps
            size = args.generation_batch_size // self.num_generations
        num_batches = math.ceil(args.max_steps * self._per_step / self._whole)
        # The loader is one draw ahead to detect its end. Its workers are further ahead. A step
        # takes all of its draws at once.
        early = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2)
        lag = math.ceil((self._per_step + 1 + early) / self._whole) + 1 + ahead
        online = hasattr(self, "num_generations") and data.curriculum == "adaptive"
        self._schedule = Schedule(data, levels, size, num_batches, seed, lag, online)
        self.add_callback(ScheduleState(self._schedule))

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        if self._schedule is None:
            return super()._get_train_sampler(dataset)
        return ScheduleSampler(self._schedule, self._each, self._whole)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        if self._schedule is not None and self._schedule.online and self.model.training:
            scores = pass_scores(rewards, self.reward_weights.to(rewards.device))
            self._schedule.observe(gather_object([row["level"] for row in inputs]), scores.tolist())
        return rewards

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Add the mean shares since the last line, as scheduled, before rounding to rows."""
        if self._schedule is not None and "loss" in logs:
            logs = {**logs, **self.level_shares(self._schedule.logged_step, self.state.global_step)}
            self._schedule.logged_step = self.state.global_step
        super().log(logs, *args, **kwargs)

    def level_shares(self, after: int, until: int) -> dict[str, float]:
        """Return the mean share of each level in the optimizer steps `after` + 1 to `until`."""
        draws = range(min(after, until - 1) * self._per_step, until * self._per_step)
        parts = [self._schedule.shares(draw // self._whole) for draw in draws]
        return {
            f"level_share/{level}": sum(part[level] for part in parts) / len(parts)
            for level in parts[0]
        }
