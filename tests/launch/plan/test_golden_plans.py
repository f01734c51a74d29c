"""Golden process lists: every topology at 1, 2, 4 and 8 GPUs.

`UPDATE_GOLDEN=1 pytest <this file>` writes them anew; read the diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.plan.planning import make_plan, prepare
from launch.plan.views import as_json
from launch.schema.trainer_args import complete
from tests.conftest import composed, host_with

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"
CASES = [("single", 1)]
CASES += [(t, n) for t in ("ddp", "fsdp", "zero2", "zero3", "split") for n in (1, 2, 4, 8)]


@pytest.mark.parametrize(("topology", "gpus"), CASES)
def test_processes(topology, gpus):
    # test_container.py has the golden files of containers.
    overrides = "hardware=mi300x method=grpo model=qwen3_4b name=golden runtime=local".split()
    config, warnings = prepare(
        composed(*overrides, f"topology={topology}", f"topology.num_gpus={gpus}")
    )
    plan = as_json(make_plan(config, host_with(8), Path("/runs/golden/1"), warnings))
    content = {key: plan[key] for key in ("topology", "processes", "trainer_args", "warnings")}
    for process in content["processes"]:
        process["env"]["PYTHONPATH"] = process["env"]["PYTHONPATH"].replace(
            str(ROOT), "<repository>"
        )
        del process["env_reasons"]  # prose of conf/hardware: free to be reworded
    file = GOLDEN / f"{topology}_{gpus}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    assert content == json.loads(file.read_text())


@pytest.mark.parametrize(("hardware", "backend"), [("mi300x", "cuda:nccl,cpu:gloo"), ("cpu", None)])
def test_fsdp_offloading_has_a_backend_for_the_cpu(hardware, backend):
    """Otherwise clipping fails: no backend for the device type cpu (torch 2.11, two H200s)."""
    config, _ = prepare(
        composed(
            f"hardware={hardware}",
            *"method=sft topology=fsdp topology.num_gpus=2 topology.fsdp.cpu_offload=true".split(),
        )
    )
    assert complete(config, Path("/runs/golden/1"), (8000, 8001)).get("ddp_backend") == backend
