"""DPO on two ranks, with gloo: a reference that is measured beforehand gives the losses of one that stays."""

from __future__ import annotations

import pytest

from tests.conftest import command
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

SETTINGS = [
    *["hardware=cpu", "method=dpo", "model=tiny", "model.num_layers=2", "precision=fp32", "data.num_train=16", "tracking=none"],
    *["hardware.gpus_per_node=2", "topology.num_gpus=2", "effective_batch=4", "method.args.per_device_train_batch_size=2"],
    *["method.args.max_steps=3", "method.args.learning_rate=1e-3", "method.args.warmup_steps=0"],
]


@pytest.mark.parametrize("topology", ["ddp", "fsdp"])
def test_a_reference_measured_beforehand_gives_the_same_losses(topology, tmp_path):
    """The weights are random: TRL could not load them again by a name."""
    found = []
    for beforehand in ("false", "true"):
        folder = tmp_path / beforehand
        folder.mkdir()
        done = command(*SETTINGS, f"topology={topology}", f"method.args.precompute_ref_log_probs={beforehand}", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        (record,) = folder.glob("runs/*/*/record.json")
        found.append(losses(record.parent))
    assert found[0][-1] != pytest.approx(found[0][0], abs=1e-3), "it trains"
    assert found[1] == pytest.approx(found[0], rel=0, abs=1e-5)
