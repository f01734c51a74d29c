"""Test that layers compiled by Inductor have the losses of eager layers, on two ranks with gloo.

On a CPU, Inductor needs a C++ compiler.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.conftest import command
from tests.e2e.test_resume import SMALL, STEPS, run
from tests.integration.conftest import skip_without
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

SETTINGS = """
model.num_layers=2 precision=fp32 speed=off method.args.max_steps=3 method.args.save_strategy=no
effective_batch=8 method.args.per_device_train_batch_size=4 method.args.lr_scheduler_type=constant
method.args.warmup_steps=0 step.rows=packed
""".split()
# The learning rate is large, so that a wrong gradient changes the next loss.
SETTINGS.append("method.args.learning_rate=1e-3")
TWO = ["hardware.gpus_per_node=2", "topology.num_gpus=2"]
ONE_RECOMPUTED = ["method.args.gradient_checkpointing=true", "step.checkpointed_layers=1"]


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory):
    """Share one cache of compiled layers among all runs."""
    if shutil.which("g++") is None:
        return skip_without("no g++ (Debian, Ubuntu: apt-get install g++)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    return None


KEPT = "topology.fsdp.reshard_after_forward=false"


@pytest.mark.parametrize(("topology", "adapter"), [
    ("ddp", ["adapter=lora", "adapter.rank=4"]),
    (f"fsdp {KEPT} method.args.per_device_train_batch_size=2", []),
])  # fmt: skip
def test_compiled_layers_on_two_ranks_have_losses_of_one_eager_rank(topology, adapter, tmp_path):
    """Recompute one of the two layers. FSDP keeps weights gathered during two micro-batches."""
    settings = [*SETTINGS, *adapter]
    assert (
        run(tmp_path / "eager", "sft", "topology=single", *settings, "step.compile=false")[0] == 0
    )
    overrides = [*SMALL, "method=sft", *STEPS, *settings, *TWO, *ONE_RECOMPUTED]
    done = command(*overrides, *f"topology={topology}".split(), "step.compile=true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = tmp_path.glob("runs/*/[0-9]*/record.json")
    compiled = losses(record.parent)
    assert json.loads((record.parent / "result.json").read_text())["compiled"] == "yes"
    assert compiled == pytest.approx(losses(tmp_path / "eager"), rel=1e-5, abs=1e-6)
    assert compiled[0] != compiled[-1]
