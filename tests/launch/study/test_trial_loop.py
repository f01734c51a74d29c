"""Which GPUs a trial gets: disjoint sets, within the user's own mask."""

from __future__ import annotations

import pytest

from launch.config.request import Request
from launch.core.errors import HostError
from launch.study.trial_loop import at_once, blocks, environment_of
from launch.study.trials import prepared
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
    assert blocks(gpus, size) == sets


@pytest.mark.parametrize(("gpus", "wanted", "parallel", "count"), [
    (EIGHT, 1, None, 8),
    (EIGHT, 3, None, 2),
    (EIGHT, 1, 3, 3),
    (EIGHT, 8, 3, 1),
    ([], 0, 4, 4),
    ([0], 2, None, 1),
])  # fmt: skip
def test_at_once(gpus, wanted, parallel, count):
    assert at_once(gpus, wanted, parallel) == count


def test_a_trial_sees_its_own_gpus_only():
    host = host_with(8, HIP_VISIBLE_DEVICES="2,3,6,7")
    trial = prepared(Request(ONE_GPU), host)
    assert trial.num_gpus == 1
    assert trial.gpus_here(host, planned=False) == [2, 3, 6, 7]
    env = {"HIP_VISIBLE_DEVICES": "6", "OMP_NUM_THREADS": "16"}
    assert environment_of(trial, [6], 4, host) == env
    narrowed = host_with(8, **environment_of(trial, [6], 4, host))
    assert prepared(Request(ONE_GPU), narrowed).plans[0].processes[-1].gpus == [6]


@pytest.mark.parametrize(
    ("overrides", "num_gpus"),
    [(["method=grpo"], 8), (["topology=ddp", "topology.num_gpus=2"], 2)],  # a server and 7 ranks
)
def test_a_trial_of_several_gpus_is_counted_whole(overrides, num_gpus):
    trial = prepared(Request([*ONE_GPU[:2], *overrides]), host_with(8))
    assert trial.num_gpus == num_gpus


def test_on_a_cpu_a_trial_takes_no_gpu_and_alone_keeps_all_cores():
    host = host_with(0)
    trial = prepared(Request(["hardware=cpu"]), host)
    assert (trial.num_gpus, trial.gpus_here(host, planned=False)) == (0, [])
    assert environment_of(trial, [], 1, host) == {}
    assert environment_of(trial, [], 4, host) == {"OMP_NUM_THREADS": "16"}
    assert environment_of(trial, [], 4, host_with(0, OMP_NUM_THREADS="3")) == {}
    on_slurm = prepared(Request(["hardware=cpu", "runtime=slurm"]), host)
    assert environment_of(on_slurm, [], 4, host) == {}


def test_a_mask_of_the_users_that_names_no_index_is_refused():
    with pytest.raises(HostError, match="expected indices"):
        prepared(Request(ONE_GPU), host_with(8, HIP_VISIBLE_DEVICES="GPU-1234"))
