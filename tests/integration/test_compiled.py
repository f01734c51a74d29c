"""Layers compiled by inductor, on one process and on two ranks with gloo: losses, and a resumed run, are those of eager layers.

Needs a C++ compiler: on a CPU inductor writes C++.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.errors import EXIT_INTERRUPTED
from recipes.common.metrics import Metrics
from tests.conftest import command
from tests.e2e.test_resume import assert_equal, run
from tests.integration.conftest import lacking
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

SETTINGS = [
    *["hardware=cpu", "model=tiny", "model.num_layers=2", "precision=fp32", "data.num_train=64", "tracking=none", "speed=off"],
    *["effective_batch=8", "method.args.per_device_train_batch_size=4", "method.args.max_steps=3", "method.args.save_strategy=no"],
    # A step large enough that a gradient that is wrong shows in the next loss.
    *["method.args.learning_rate=1e-3", "method.args.lr_scheduler_type=constant", "method.args.warmup_steps=0"],
]
TWO = ["hardware.gpus_per_node=2", "topology.num_gpus=2"]
METHODS = {
    "sft": ["step.rows=packed"],
    "dpo": ["adapter=lora", "adapter.rank=4"],
    "grpo": ["method.args.num_generations=4", "method.args.max_completion_length=6", "+method.rewards.length=0.1"],
}
PLAIN, RECOMPUTED = ["method.args.gradient_checkpointing=false"], ["method.args.gradient_checkpointing=true"]
COMPILED = {
    "sft-ddp": ["topology=ddp", *TWO, *PLAIN],
    "sft-fsdp-checkpointing": ["topology=fsdp", *TWO, *RECOMPUTED, "step.checkpointed_layers=1"],
    "dpo-single": ["topology=single", *PLAIN],
    "grpo-single": ["topology=single", *PLAIN],
}


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    """One cache of compiled layers for all runs."""
    if shutil.which("g++") is None:
        return lacking("no g++ (Debian, Ubuntu: apt-get install g++)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    return None


def trained(folder: Path, *overrides: str) -> tuple[list[float], dict[str, Any]]:
    """Losses, and result.json."""
    done = command(*SETTINGS, *overrides, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = folder.glob("runs/*/*/record.json")
    return losses(record.parent), json.loads((record.parent / "result.json").read_text())


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """`eager(method)` is the losses of one process whose layers are not compiled."""

    @functools.cache
    def once(method: str) -> list[float]:
        return trained(tmp_path_factory.mktemp("eager"), f"method={method}", "topology=single", *METHODS[method], *PLAIN)[0]

    return once


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_layers_give_the_losses_of_eager_ones(eager, case, tmp_path):
    method = case.partition("-")[0]
    found, result = trained(tmp_path, f"method={method}", *METHODS[method], *COMPILED[case], "step.compile=true")
    assert result["compiled"] == "yes"
    assert found == pytest.approx(eager(method), rel=1e-5, abs=1e-6)
    assert found[0] != found[-1]


def test_a_run_resumed_in_the_middle_equals_one_that_was_not(tmp_path, monkeypatch):
    """What is resumed compiles again, as a new process does: dynamo forgets what it has compiled."""
    given, log = ["step.compile=true", "step.rows=packed", "speed=off"], Metrics.on_log

    def signal_in_step_2(self, args, state, *rest, **kwargs):
        log(self, args, state, *rest, **kwargs)
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, "sft", *given)[0] == 0
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "on_log", signal_in_step_2)
        assert run(parts, "sft", *given)[0] == EXIT_INTERRUPTED
    torch._dynamo.reset()
    assert run(parts, "sft", *given)[0] == 0
    assert_equal(parts, whole)
