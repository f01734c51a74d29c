"""Test schedules: exact shares, seeded rows, and pass rates of earlier batches."""

import itertools
import json
from collections import Counter

import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from transformers import TrainerState

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.schema import Data
from recipes.data.data_curriculum import (
    Curriculum,
    Schedule,
    ScheduleSampler,
    ScheduleState,
    cycle_shares,
    pass_scores,
    read_pass_rates,
    shares,
)

LEVELS = [n % 3 for n in range(30)]  # ten rows of each level


def configured(curriculum, **own):
    return OmegaConf.merge(plain(Data(name="jsonl", kind="jsonl")), {"curriculum": curriculum}, own)


def counts(schedule):
    return [
        [Counter(LEVELS[row] for row in batch)[level] for level in (0, 1, 2)]
        for batch in schedule.batches()
    ]


def test_scores_are_weighted_means_from_0_to_1():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, nan], [nan, nan]])
    assert pass_scores(rewards, torch.tensor([1.0, 1.0])).tolist() == [0.5, 1.0, 0.5, 1.0, 0.0]
    # weights that sum to 0
    assert pass_scores(rewards, torch.tensor([1.0, -1.0])).tolist() == [0.5, 0.0, 0.0, 1.0, 0.0]
    assert pass_scores(rewards, torch.tensor([3.0, -1.0])).tolist() == [0.75, 0.5, 0.0, 1.0, 0.0]


def mixed(earlier, *size):
    return Schedule(
        configured("mixed", curriculum_args={"earlier": earlier}), LEVELS, *size, seed=0
    )


def test_mixed_keeps_its_share_of_earlier_levels():
    schedule = mixed(0.4, 10, 6)
    assert counts(schedule) == [[10, 0, 0]] * 2 + [[4, 6, 0]] * 2 + [[2, 2, 6]] * 2
    assert schedule.shares(5) == pytest.approx({0: 0.2, 1: 0.2, 2: 0.6})


def test_fractional_rows_even_out_over_several_batches():
    stage = counts(mixed(0.3, 4, 30))[10:20]  # 1.2 rows a batch of level 0, 2.8 of level 1
    assert [sum(of) for of in zip(*stage, strict=True)] == [12, 28, 0]
    assert {tuple(batch_shares) for batch_shares in stage} == {(1, 3, 0), (2, 2, 0)}


def test_adaptive_shares_follow_pass_rates():
    # Level 2 has no samples, so its pass rate counts as one half.
    actual = shares(configured("adaptive"), [0, 1, 2], 0.9, {0: 1.0, 1: 0.5})
    assert actual == pytest.approx({0: 0.05 / 0.55, 1: 0.25 / 0.55, 2: 0.25 / 0.55})


@pytest.mark.parametrize(("curriculum", "num_cycles", "actual"), [
    ("progressive", 3, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    ("progressive", 2, [[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]]),  # every level is included
    ("progressive", 1, [[1 / 3, 1 / 3, 1 / 3]]),
    ("mixed", 3, [[1, 0, 0], [0.3, 0.7, 0], [0.15, 0.15, 0.7]]),
    ("adaptive", 2, [[0.05 / 0.35, 0.25 / 0.35, 0.05 / 0.35]] * 2),
])  # fmt: skip
def test_a_sampling_cycle_has_the_mean_shares_of_its_part_of_the_run(
    curriculum, num_cycles, actual
):
    data, rates = configured(curriculum), {0: 1.0, 1: 0.5, 2: 0.0}
    for cycle, expected in enumerate(actual, start=1):
        of_cycle = cycle_shares(data, [0, 1, 2], cycle, num_cycles, rates)
        assert list(of_cycle.values()) == pytest.approx(expected)


def test_rows_repeat_only_after_their_level_and_depend_on_the_seed():
    first, again, other = (
        list(Schedule(configured("progressive"), LEVELS, 5, 6, seed).batches())
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert sorted(first[0] + first[1]) == [n for n in range(30) if LEVELS[n] == 0]


def test_the_sampler_repeats_rows_and_batches():
    schedule = Schedule(configured("progressive"), LEVELS, 2, 3, seed=0)
    sampler = ScheduleSampler(schedule, row_repeats=3, batch_repeats=2)
    actual = list(sampler)
    assert len(actual) == len(sampler) == 3 * 2 * 3 * 2
    a, b = actual[0], actual[3]
    assert actual[:12] == [a, a, a, b, b, b] * 2
    assert a != b


def drawn(schedule, ahead):
    """Return the batches of a run whose loader is `ahead` batches ahead of scoring.

    Level 0 is always right, 1 half of the time, 2 never.
    """
    batches, waiting, actual = schedule.batches(), [], []
    while len(actual) < schedule.num_batches:
        while len(waiting) <= ahead and (batch := next(batches, None)) is not None:
            waiting.append(batch)
        batch = waiting.pop(0)
        actual.append(batch)
        if len(actual) >= len(schedule.rates):  # batches in a checkpoint are scored already
            schedule.observe(
                [LEVELS[row] for row in batch], [1.0 - LEVELS[row] / 2 for row in batch]
            )
    return actual


def test_adaptive_batches_do_not_depend_on_prefetching_or_resuming():
    def schedule(batches=12):
        return Schedule(configured("adaptive"), LEVELS, 8, batches, seed=0, lag=3, online=True)

    eager, lazy = drawn(schedule(), ahead=2), drawn(schedule(), ahead=0)
    assert eager == lazy
    level_1 = [Counter(LEVELS[row] for row in batch)[1] for batch in eager]
    assert schedule().shares(0) == dict.fromkeys((0, 1, 2), pytest.approx(1 / 3))
    assert sum(level_1[-4:]) > sum(level_1[:4])  # more of what is right half of the time
    stopped = schedule()
    for batch in itertools.islice(stopped.batches(), 4):
        stopped.observe([LEVELS[row] for row in batch], [1.0 - LEVELS[row] / 2 for row in batch])
    saved = json.loads(json.dumps(ScheduleState(stopped).state()))
    state = TrainerState(stateful_callbacks={"ScheduleState": saved})
    resumed = schedule()
    ScheduleState(resumed).on_train_begin(None, state, None)
    assert drawn(resumed, ahead=2) == eager


def test_pass_rates_are_read_from_a_result(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"by_level": {"0": {"pass_rate": 0.9}, "2": {"accuracy": 0.1}}}))
    assert read_pass_rates(str(path)) == {0: 0.9, 2: 0.1}
    path.write_text("{}")
    with pytest.raises(UserError, match="data.pass_rates=.*by_level"):
        read_pass_rates(str(path))


@pytest.mark.parametrize("levels", [[1, None], [1, 1]])
def test_rows_need_several_levels(levels):
    class Trainer(Curriculum):
        train_dataset = Dataset.from_list([{"level": level} for level in levels])

    with pytest.raises(UserError, match="data.curriculum=progressive"):
        Trainer().use_curriculum(configured("progressive"), seed=0)
