"""Test DPO on two ranks, with gloo.

A reference measured beforehand gives the losses of one that stays in memory.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.e2e.test_resume import configure
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

SETTINGS = [
    *[
        "model.num_layers=2",
        "precision=fp32",
        "data.num_train=16",
        "hardware.gpus_per_node=2",
        "topology.num_gpus=2",
    ],
    *[
        "effective_batch=4",
        "method.args.per_device_train_batch_size=2",
        "method.args.max_steps=3",
        "method.args.save_strategy=no",
    ],
    *["method.args.learning_rate=1e-3", "method.args.warmup_steps=0"],
]
TWO_RANKS = [
    *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    *["-m", "tests.integration.dpo_ranks"],
]


@pytest.mark.parametrize("topology", ["ddp", "fsdp"])
def test_a_reference_measured_beforehand_gives_the_same_losses(topology, tmp_path):
    """Use random weights, which TRL could not load again by a name."""
    runs = [tmp_path / beforehand for beforehand in ("false", "true")]
    given = [*SETTINGS, f"topology={topology}"]
    configs = [
        str(configure(run, "dpo", *given, f"method.args.precompute_ref_log_probs={run.name}"))
        for run in runs
    ]
    done = subprocess.run(
        [sys.executable, *TWO_RANKS, *configs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [losses(run) for run in runs]
    assert found[0][-1] != pytest.approx(found[0][0], abs=1e-3), "it trains"
    assert found[1] == pytest.approx(found[0], rel=0, abs=1e-5)
