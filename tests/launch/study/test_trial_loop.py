"""Test the GPUs of trials: disjoint sets within the user's mask."""

from __future__ import annotations

import pytest

from launch.config.request import Request
from launch.core.errors import HostError
from launch.study.trial_loop import gpu_blocks, num_parallel, trial_environment
from launch.study.trials import plan_trial
from tests.conftest import host_with

EIGHT = list(range(8))
ONE_GPU = ["hardware=mi300x", "model=qwen3_4b", "topology=single"]


@pytest.mark.parametrize(("gpus", "size", "sets"), [
    (EIGHT, 1, [[n] for n in EIGHT]),
    (EIGHT, 3, [[0, 1, 2], [3, 4, 5]]),
    ([2, 3, 6, 7], 2, [[2, 3], [6, 7]]),  # the user's own mask
    ([5], 2, [[]]),
])  # fmt: skip
def test_trials_that_run_together_share_no_gpu(gpus, size, sets):
    assert gpu_blocks(gpus, size) == sets


@pytest.mark.parametrize(("gpus", "wanted", "parallel", "count"), [
    (EIGHT, 1, None, 8),
    (EIGHT, 3, None, 2),
    (EIGHT, 1, 3, 3),
    (EIGHT, 8, 3, 1),
    ([], 0, 4, 4),
    ([0], 2, None, 1),
])  # fmt: skip
def test_num_parallel(gpus, wanted, parallel, count):
    assert num_parallel(gpus, wanted, parallel) == count


def test_a_trial_sees_only_its_own_gpus():
    host = host_with(8, HIP_VISIBLE_DEVICES="2,3,6,7")
    trial = plan_trial(Request(ONE_GPU), host)
    assert trial.num_gpus == 1
    assert trial.gpus_here(host, planned=False) == [2, 3, 6, 7]
    env = {"HIP_VISIBLE_DEVICES": "6", "OMP_NUM_THREADS": "16"}
    assert trial_environment(trial, [6], 4, host) == env
    narrowed = host_with(8, **trial_environment(trial, [6], 4, host))
    assert plan_trial(Request(ONE_GPU), narrowed).plans[0].processes[-1].gpus == [6]


@pytest.mark.parametrize(
    ("overrides", "num_gpus"),
    [(["method=grpo"], 8), (["topology=ddp", "topology.num_gpus=2"], 2)],  # a server and 7 ranks
)
def test_all_gpus_of_a_trial_are_counted(overrides, num_gpus):
    trial = plan_trial(Request([*ONE_GPU[:2], *overrides]), host_with(8))
    assert trial.num_gpus == num_gpus


def test_a_cpu_trial_uses_no_gpu_and_all_cores_if_alone():
    host = host_with(0)
    trial = plan_trial(Request(["hardware=cpu"]), host)
    assert (trial.num_gpus, trial.gpus_here(host, planned=False)) == (0, [])
    assert trial_environment(trial, [], 1, host) == {}
    assert trial_environment(trial, [], 4, host) == {"OMP_NUM_THREADS": "16"}
    assert trial_environment(trial, [], 4, host_with(0, OMP_NUM_THREADS="3")) == {}
    on_slurm = plan_trial(Request(["hardware=cpu", "runtime=slurm"]), host)
    assert trial_environment(on_slurm, [], 4, host) == {}


def test_a_mask_without_indices_is_rejected():
    with pytest.raises(HostError, match="expected indices"):
        plan_trial(Request(ONE_GPU), host_with(8, HIP_VISIBLE_DEVICES="GPU-1234"))
