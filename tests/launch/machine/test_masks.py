"""Test that a plan follows the shell's masks, and that processes only get the plan's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launch.core.errors import HostError
from launch.execution.local import LocalProcess
from launch.machine import detect, masks
from launch.plan import inherited
from launch.plan.planning import make_plan
from launch.schema.plan import Process, Setting
from tests.conftest import composed, host_with
from tests.helpers import sysroots

SET = f"{{n: os.environ[n] for n in {masks.ALL!r} if n in os.environ}}"
PRINT = f"import json, os; print(json.dumps({SET}))"


def process(settings: list[Setting]) -> Process:
    config, variables = composed("hardware=cpu"), {s.name: s for s in settings}
    passed = inherited.names(config, os.environ, variables)
    argv = [sys.executable, "-c", PRINT]
    return Process("trainers", "trainer", argv, settings, [3], inherited=passed)


@pytest.mark.parametrize(
    ("variables", "masks_seen"),
    [
        ([Setting("HIP_VISIBLE_DEVICES", "3", "", "launcher")], {"HIP_VISIBLE_DEVICES": "3"}),
        (
            [],
            {"CUDA_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "2,3"},
        ),  # a process without GPUs keeps what hides them from it
    ],
)
def test_a_process_sees_one_mask(tmp_path, monkeypatch, variables, masks_seen):
    for name in masks.ALL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("GPU_DEVICE_ORDINAL", "2,3")
    started = LocalProcess(process(variables), tmp_path / "log")
    started.wait(60)
    started.remove()
    assert json.loads((tmp_path / "log").read_text()) == masks_seen


@pytest.mark.parametrize(("shell", "mask"), [
    ({"CUDA_VISIBLE_DEVICES": "5,3"}, "5,3"),  # HIP reads it
    ({"GPU_DEVICE_ORDINAL": "5,3"}, "5,3"),
    ({"HIP_VISIBLE_DEVICES": "5,3", "CUDA_VISIBLE_DEVICES": ""}, "5,3"),
    ({"HIP_VISIBLE_DEVICES": "5,3", "CUDA_VISIBLE_DEVICES": "5,3"}, "5,3"),
    ({}, "0,1"),
    ({"HIP_VISIBLE_DEVICES": "0,2", "CUDA_VISIBLE_DEVICES": "1"}, None),
])  # fmt: skip
def test_a_plan_uses_the_mask_of_the_shell(shell, mask):
    config = composed("hardware=mi300x", "topology=ddp", "topology.num_gpus=2", "runtime=local")
    if mask is None:
        with pytest.raises(HostError, match="CUDA_VISIBLE_DEVICES=1. Use: unset"):
            make_plan(config, host_with(8, **shell), Path("/runs/1"))
        return
    (trainers,) = make_plan(config, host_with(8, **shell), Path("/runs/1")).processes
    variables = {name: value for name, value in trainers.env.items() if name in masks.ALL}
    assert variables == {"HIP_VISIBLE_DEVICES": mask}


@pytest.mark.parametrize(("environ", "indices"), [
    ({}, [0, 1]),
    ({"HIP_VISIBLE_DEVICES": "0"}, [0]),
    ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
    ({"HIP_VISIBLE_DEVICES": ""}, []),
    ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ({"HIP_VISIBLE_DEVICES": "GPU-00ff"}, [0, 1]),
    ({"HIP_VISIBLE_DEVICES": "7"}, [0, 1]),
])  # fmt: skip
def test_visible_gpus(tmp_path, environ, indices):
    sysroots.rx7900xtx(tmp_path)
    gpus = detect.gpus(str(tmp_path))
    assert [gpus.index(gpu) for gpu in masks.visible(gpus, environ)] == indices
