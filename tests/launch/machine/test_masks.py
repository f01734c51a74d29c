"""Which GPUs a process sees: the shell's masks are read once, and the plan's replaces them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launch.config import auto
from launch.config.compose import compose
from launch.core.errors import HostError
from launch.execution.local import LocalProcess
from launch.machine import detect, masks
from launch.plan.planning import make_plan
from launch.schema.plan import Process, Setting
from tests.conftest import composed, host_with
from tests.helpers import sysroots

SET = f"{{n: os.environ[n] for n in {masks.ALL!r} if n in os.environ}}"
PRINT = f"import json, os; print(json.dumps({SET}))"


def process(settings: list[Setting]) -> Process:
    return Process("trainers", "trainer", [sys.executable, "-c", PRINT], settings, [3])


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ([Setting("HIP_VISIBLE_DEVICES", "3", "", "launcher")], {"HIP_VISIBLE_DEVICES": "3"}),
        (
            [],
            {"CUDA_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "2,3"},
        ),  # a process without GPUs keeps what hides them from it
    ],
)
def test_a_process_sees_one_mask(tmp_path, monkeypatch, own, seen):
    for name in masks.ALL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("GPU_DEVICE_ORDINAL", "2,3")
    started = LocalProcess(process(own), tmp_path / "log")
    started.wait(60)
    started.remove()
    assert json.loads((tmp_path / "log").read_text()) == seen


@pytest.mark.parametrize(
    ("shell", "mask"),
    [
        ({"CUDA_VISIBLE_DEVICES": "5,3"}, "5,3"),  # HIP honours it
        ({"GPU_DEVICE_ORDINAL": "5,3"}, "5,3"),
        ({"HIP_VISIBLE_DEVICES": "5,3", "CUDA_VISIBLE_DEVICES": ""}, "5,3"),
        ({"HIP_VISIBLE_DEVICES": "5,3", "CUDA_VISIBLE_DEVICES": "5,3"}, "5,3"),
        ({}, "0,1"),
    ],
)
def test_a_plan_honours_the_shell(shell, mask):
    config = composed("hardware=mi300x", "topology=ddp", "topology.num_gpus=2", "runtime=local")
    (trainers,) = make_plan(config, host_with(8, **shell), Path("/runs/1")).processes
    assert {name: value for name, value in trainers.env.items() if name in masks.ALL} == {
        "HIP_VISIBLE_DEVICES": mask
    }


def test_two_masks_that_differ_are_refused():
    config = composed("hardware=mi300x", "topology=single", "runtime=local")
    shell = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(
        HostError,
        match="HIP_VISIBLE_DEVICES=0: CUDA_VISIBLE_DEVICES=1 differs from it. .*unset CUDA",
    ):
        make_plan(config, host_with(8, **shell), Path("/runs/1"))


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, [0, 1]),
        ({"HIP_VISIBLE_DEVICES": "0"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "GPU-00ff"}, [0, 1]),
        ({"HIP_VISIBLE_DEVICES": "7"}, [0, 1]),
    ],
)
def test_what_a_mask_leaves(tmp_path, environ, left):
    sysroots.rx7900xtx(tmp_path)
    found = detect.gpus(str(tmp_path))
    assert [found.index(gpu) for gpu in masks.visible(found, environ)] == left


def test_makers_are_counted_apart(tmp_path):
    machine = sysroots.h200(tmp_path)
    sysroots.gpu_node(
        machine, 20, 0xF3, 1 << 29, gfx_target_version=100306, simd_count=4, simd_per_cu=2
    )
    found = detect.gpus(str(tmp_path))
    assert detect.group_of(masks.visible(found, {"HIP_VISIBLE_DEVICES": "-1"})) == "h200"
    assert (
        len(masks.visible(found, {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "1"})) == 1
    )


def test_auto_takes_the_card_that_the_mask_leaves(tmp_path, monkeypatch, capsys):
    sysroots.rx7900xtx(tmp_path)
    found = detect.gpus(str(tmp_path))
    monkeypatch.setattr(detect, "gpus", lambda: found)  # of this tree, in place of this machine's
    auto._say.cache_clear()
    for name in masks.ALL:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HostError, match=r"1 x rx7900xtx, 1 x unknown GPU \(gfx1036"):
        compose(["hardware=auto"])
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert compose(["hardware=auto"]).hardware.name == "rx7900xtx"
    assert "hardware=auto: 1 x AMD Radeon RX 7900 XTX" in capsys.readouterr().err
