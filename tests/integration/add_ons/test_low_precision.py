"""Test nf4 and fp8 on a CPU, with bitsandbytes and torchao (`make quantization`)."""

from __future__ import annotations

import contextlib
import importlib.util
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.models import adapters, low_precision
from recipes.models.model_build import build_model
from tests.e2e.test_raft import PHASES, folder, raft
from tests.e2e.test_resume import assert_equal, computed, run, signal_in_step_2
from tests.helpers.trainers import configured
from tests.integration.conftest import skip_without
from tests.recipes.models.test_adapters import base, with_adapter

pytestmark = pytest.mark.integration
QLORA = ["adapter=qlora", "adapter.rank=4", "precision=nf4"]


@pytest.fixture(scope="module", autouse=True)
def packages():
    for name in ("bitsandbytes", "torchao"):
        if importlib.util.find_spec(name) is None:
            skip_without(f"no {name} (make quantization)")


def test_merge_adapter_of_4_bit_base(tmp_path):
    base(hidden=128).save_pretrained(tmp_path)
    quantization = low_precision.nf4_config(torch.bfloat16)
    small = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": "cpu"}
    )
    model = with_adapter(small).train()  # eval() would repack weights
    tokens = torch.arange(16)[None]
    trained = model(tokens).logits
    saved, error = adapters.merge(model, None)
    assert saved.dtype == torch.bfloat16
    assert not hasattr(saved.config, "quantization_config")
    assert 0 < error < 1
    saved.save_pretrained(tmp_path / "merged")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    torch.testing.assert_close(read(tokens).logits, trained, atol=0.05, rtol=0.05)
    sent = dict(adapters.merged_params(model, lambda _: contextlib.nullcontext()))
    assert all(torch.equal(sent[name], weight) for name, weight in saved.named_parameters())


def test_fp8_trains_without_head():
    model = low_precision.to_float8(base())
    found = {
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    }
    assert len(found) == 7
    assert "lm_head" not in found
    tokens = torch.arange(15)[None]  # 15 tokens, which must be padded to 16
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, labels=tokens).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_random_weights_of_fp8_and_bf16_are_equal(tmp_path):
    config = configured(tmp_path, "sft")
    config.precision.compute = "fp8"
    weight = build_model(config).lm_head.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_dpo_and_grpo_train_an_adapter_on_nf4(tmp_path, method):
    code, result = run(tmp_path, method, *QLORA)
    assert (code, result["status"], result["steps"]) == (0, "done", 4)
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    assert all(math.isfinite(row["loss"]) for row in computed(tmp_path))


def test_raft_on_nf4_merges_adapter(tmp_path):
    results = raft(tmp_path, *QLORA)
    assert list(results) == PHASES
    assert {result["status"] for result in results.values()} == {"done"}
    run_dir = tmp_path / folder("cycle1_train")
    assert (run_dir / "adapter/adapter_model.safetensors").is_file()
    assert not (run_dir / "model/adapter_config.json").exists()
    assert results["cycle1_train"]["weights_sha256"] != results["start"]["weights_sha256"]


def test_resume_nf4_run_exactly(tmp_path, monkeypatch):
    assert run(tmp_path / "complete", "sft", *QLORA)[0] == 0
    with signal_in_step_2(monkeypatch):
        assert run(tmp_path / "stopped", "sft", *QLORA)[0] == 75
    assert run(tmp_path / "stopped", "sft", *QLORA)[0] == 0
    assert_equal(tmp_path / "stopped", tmp_path / "complete")
