"""Test the ancestors of phases and the gains of evaluations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launch.study.lineage import Phase, cycles, gain_points, gains, lineages, steps_before

RUN = Path("/runs/p/20261122-101500-abc")


def phase(
    name: str,
    taken: str | None = None,
    steps: int = 0,
    accuracy: float | None = None,
    problems: str = "same",
) -> Phase:
    return Phase(
        RUN / name,
        f"/elsewhere/{RUN.name}/{taken}/model" if taken else "hub/base",
        steps,
        accuracy,
        problems,
    )


TREE = [  # two methods start from one SFT, which the first phase of one of them evaluates
    phase("1_sft", steps=100),
    phase("2_grpo", "1_sft", steps=50),
    phase("3_grpo_evaluated", "2_grpo", accuracy=0.6),
    phase("4_raft_cycle0_evaluate", "1_sft", accuracy=0.5),
    phase("5_raft_cycle1_train", "1_sft", steps=20),
    phase("6_raft_cycle1_evaluate", "5_raft_cycle1_train", accuracy=0.65),
    phase("7_raft_cycle2_train", "5_raft_cycle1_train", steps=20),
    phase("8_raft_cycle2_evaluate", "7_raft_cycle2_train", accuracy=0.55),
]


def found(phases: list[Phase]) -> dict[str, tuple[str | None, float | None]]:
    return {
        phase.name: (before.name, round(gain_points(phase, before), 6)) if before else (None, None)
        for phase, before in gains(phases)
    }


def test_each_evaluation_is_compared_with_that_of_its_start():
    assert found(TREE) == {
        "3_grpo_evaluated": ("4_raft_cycle0_evaluate", 10.0),
        "4_raft_cycle0_evaluate": (None, None),
        "6_raft_cycle1_evaluate": ("4_raft_cycle0_evaluate", 15.0),
        "8_raft_cycle2_evaluate": ("6_raft_cycle1_evaluate", -10.0),
    }
    assert [[p.name[0] for p in line] for line in lineages(TREE)] == [["4", "3"], ["4", "6", "8"]]
    assert [steps_before(TREE, p) for p in (TREE[2], TREE[3], TREE[7])] == [150, 100, 140]


def test_an_evaluation_of_the_first_model_is_found_by_its_name():
    base, other = phase("1_base", accuracy=0.1), Phase(RUN / "2_other", "hub/other", 0, 0.3, "same")
    trained = [phase("3_sft", steps=5), phase("4_evaluate", "3_sft", accuracy=0.4)]
    assert found([other, base, *trained])["4_evaluate"] == ("1_base", 30.0)
    assert found([other, *trained])["4_evaluate"] == (None, None)


def test_a_training_without_evaluation_is_skipped_and_other_problems_are_not_compared():
    trained = [phase("1_a", steps=1), phase("3_b", "1_a"), phase("4_c", "3_b")]
    line = [*trained, phase("2_ea", "1_a", accuracy=0.2)]
    assert found([*line, phase("5_ec", "4_c", accuracy=0.5)])["5_ec"] == ("2_ea", 30.0)
    others = phase("5_ec", "4_c", accuracy=0.5, problems="others")
    assert found([*line, others])["5_ec"] == (None, None)
    reward = dataclasses.replace(line[-1], measure="reward")
    assert found([*trained, reward, phase("5_ec", "4_c", accuracy=0.5)])["5_ec"] == (None, None)


def test_the_cycles_of_raft_are_one_curve():
    alone = [
        phase("1_cycle0_evaluate", accuracy=0.1),
        phase("4_cycle1_evaluate", accuracy=0.2),
        phase("5_cycle1_train"),
    ]
    assert cycles(alone) == {"raft": [(0, 0.1), (1, 0.2)]}
    assert cycles(TREE) == {"raft": [(0, 0.5), (1, 0.65), (2, pytest.approx(0.55))]}
