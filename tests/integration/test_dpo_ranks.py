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

SETTINGS = """
model.num_layers=2 precision=fp32 data.num_train=16 hardware.gpus_per_node=2 topology.num_gpus=2
effective_batch=4 method.args.per_device_train_batch_size=2 method.args.max_steps=3
method.args.save_strategy=no method.args.learning_rate=1e-3 method.args.warmup_steps=0
""".split()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_a_reference_measured_beforehand_gives_the_same_losses_under_fsdp(tmp_path):
    """Use random weights, which TRL could not load again by a name."""
    runs = [tmp_path / beforehand for beforehand in ("false", "true")]
    configs = [
        configure(
            run,
            "dpo",
            *SETTINGS,
            "topology=fsdp",
            f"method.args.precompute_ref_log_probs={run.name}",
        )
        for run in runs
    ]
    done = subprocess.run(
        [sys.executable, *TORCHRUN, "-m", "tests.integration.dpo_ranks", *configs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    in_memory, beforehand = map(losses, runs)
    assert in_memory[-1] != pytest.approx(in_memory[0], abs=1e-3), "it trains"
    assert beforehand == pytest.approx(in_memory, rel=0, abs=1e-5)
