"""Test that adapters have the losses and weights of one process, on two ranks with gloo."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.test_resume import configure
from tests.integration.conftest import skip_without
from tests.integration.ranks import run_ranks
from tests.integration.test_strategies import losses

pytestmark = pytest.mark.integration

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
KINDS = {
    "qlora": ["adapter=qlora", "precision=nf4"],
    "lora": ["adapter=lora", "precision=fp32"],
    "dora": ["adapter=dora", "precision=fp32"],
}
# The learning rate is large, so that a wrong gradient changes the next loss.
LARGE = [
    "method.args.learning_rate=1e-2",
    "method.args.lr_scheduler_type=constant",
    "method.args.warmup_steps=0",
]
BATCH = ["effective_batch=8", "method.args.per_device_train_batch_size=4", "adapter.rank=4"]
SHARDED = ("fsdp", "zero3")  # the launcher rejects nf4 for them
PAIRS = [
    (strategy, kind)
    for strategy in STRATEGIES
    for kind in KINDS
    if not (kind == "qlora" and strategy in SHARDED)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Return topology -> the directory of its runs, one of each kind and `resumed`."""
    if importlib.util.find_spec("bitsandbytes") is None:
        skip_without("no bitsandbytes (make quantization)")
    folders = {}
    for topology in ("single", *STRATEGIES):
        folder = folders[topology] = tmp_path_factory.mktemp(topology)
        ranks = 1 if topology == "single" else 2
        shared = f"topology={topology} hardware.gpus_per_node={ranks} topology.num_gpus={ranks}"
        settings = [*shared.split(), *BATCH, *LARGE]
        kinds = [kind for kind in KINDS if kind != "qlora" or topology not in SHARDED]
        for name, kind in (*((kind, kind) for kind in kinds), ("resumed", "dora")):
            configure(folder / name, "sft", *settings, *KINDS[kind])
        resumed = f"{folder}/dora:{folder}/resumed:2"
        run_ranks("sft", *(folder / kind for kind in kinds), resumed, num_ranks=ranks)
    return folders


@pytest.mark.parametrize(("strategy", "kind"), PAIRS)
def test_strategies_have_losses_and_weights_of_one_process(runs, strategy, kind):
    alone, spread = runs["single"] / kind, runs[strategy] / kind
    assert len(losses(alone)) == 4
    assert losses(alone)[0] - losses(alone)[-1] > 1  # the loss decreases
    # nf4's adapter is in bf16. DeepSpeed updates an fp32 copy, the others the adapter itself.
    close = 0.05 if (kind, strategy) == ("qlora", "zero2") else 1e-5
    assert losses(spread) == pytest.approx(losses(alone), rel=0, abs=close)
    for saved in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        weights, expected = load_file(spread / saved), load_file(alone / saved)
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert weights[name].shape == weight.shape
            apart = (weights[name].float() - weight.float()).abs().mean()
            assert apart < (1e-3 if kind == "qlora" else 1e-5), name
    bases = [json.loads((run / "base.json").read_text()) for run in (alone, spread)]
    assert bases[0] == bases[1]
    assert not (spread / ".random_weights").exists()


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_checkpoint_has_no_base_and_resumes_exactly(runs, strategy):
    whole, resumed = runs[strategy] / "dora", runs[strategy] / "resumed"
    base = (whole / "model/model.safetensors").stat().st_size
    held = {
        path.name: path.stat().st_size
        for path in (whole / "checkpoints/checkpoint-4").rglob("*")
        if path.is_file()
    }
    assert max(held.values()) < base, held
    assert losses(resumed) == losses(whole)[2:]
    saved = [load_file(run / "adapter/adapter_model.safetensors") for run in (resumed, whole)]
    assert all(bool((saved[0][name] == weight).all()) for name, weight in saved[1].items())
