"""Test that layers compiled by inductor have the losses of eager ones, also after resuming.

They run on one process and on two ranks with gloo. Needs a C++ compiler, since inductor writes C++
on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.core.errors import EXIT_INTERRUPTED
from recipes.measure.metrics import Metrics
from tests.conftest import command
from tests.e2e.test_resume import SMALL, STEPS, assert_equal, run
from tests.integration.conftest import lacking
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

SETTINGS = [
    *[
        "model.num_layers=2",
        "precision=fp32",
        "speed=off",
        "method.args.max_steps=3",
        "method.args.save_strategy=no",
    ],
    *["effective_batch=8", "method.args.per_device_train_batch_size=4"],
    # A step large enough that a gradient that is wrong shows in the next loss.
    *[
        "method.args.learning_rate=1e-3",
        "method.args.lr_scheduler_type=constant",
        "method.args.warmup_steps=0",
    ],
]
TWO = ["hardware.gpus_per_node=2", "topology.num_gpus=2"]
OF_METHOD = {"sft": ["step.rows=packed"], "dpo": ["adapter=lora", "adapter.rank=4"], "grpo": []}
PLAIN = ["method.args.gradient_checkpointing=false"]
ONE_RECOMPUTED = ["method.args.gradient_checkpointing=true", "step.checkpointed_layers=1"]  # of two


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    """Share one cache of compiled layers among all runs."""
    if shutil.which("g++") is None:
        return lacking("no g++ (Debian, Ubuntu: apt-get install g++)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    return None


@pytest.fixture(autouse=True)
def dynamo():
    """Forget after each test what it compiled."""
    yield
    torch._dynamo.reset()


def alone(folder: Path, method: str, compiled: bool) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of a run in this process, and its result.json."""
    code, result = run(
        folder,
        method,
        "topology=single",
        *SETTINGS,
        *OF_METHOD[method],
        *PLAIN,
        f"step.compile={str(compiled).lower()}",
    )
    assert code == 0
    return losses(folder), result


@pytest.fixture(scope="module")
def eager_sft(tmp_path_factory) -> list[float]:
    """Return the losses of one process whose layers are not compiled."""
    return alone(tmp_path_factory.mktemp("eager"), "sft", compiled=False)[0]


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_compiled_layers_give_the_losses_of_eager_ones(method, tmp_path):
    eager, _ = alone(tmp_path / "eager", method, compiled=False)
    found, result = alone(tmp_path / "compiled", method, compiled=True)
    assert result["compiled"] == "yes"
    assert found == pytest.approx(eager, rel=1e-5, abs=1e-6)
    assert found[0] != found[-1]


@pytest.mark.parametrize("topology", ["ddp", "fsdp"])
def test_compiled_layers_on_two_ranks_give_the_losses_of_eager_ones_on_one(
    topology, eager_sft, tmp_path
):
    """Recompute one layer and not the other, in both runs."""
    given = [
        *SMALL,
        "method=sft",
        *STEPS,
        *SETTINGS,
        *OF_METHOD["sft"],
        f"topology={topology}",
        *TWO,
        *ONE_RECOMPUTED,
        "step.compile=true",
    ]
    done = command(*given, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = tmp_path.glob("runs/*/*/record.json")
    found = losses(record.parent)
    assert json.loads((record.parent / "result.json").read_text())["compiled"] == "yes"
    assert found == pytest.approx(eager_sft, rel=1e-5, abs=1e-6)
    assert found[0] != found[-1]


def test_a_run_resumed_in_the_middle_equals_one_that_was_not(tmp_path, monkeypatch):
    """Compile again after resuming, as a new process would: dynamo forgets."""
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
