"""Test nf4 and fp8 on a CPU, with bitsandbytes and torchao (`make quantization`)."""

from __future__ import annotations

import contextlib
import importlib.util
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.models import adapters, low_precision
from tests.e2e.test_adapter_runs import resumes_exactly
from tests.e2e.test_raft import check_adapter_is_trained_and_merged
from tests.e2e.test_resume import computed, run
from tests.integration.conftest import lacking
from tests.recipes.models.test_adapters import base, with_adapter
from tests.recipes.rank.test_program import (
    test_random_weights_are_rounded_to_the_compute_dtype as assert_weights_are_rounded,
)

pytestmark = pytest.mark.integration
QLORA = ["adapter=qlora", "adapter.rank=4", "precision=nf4"]


@pytest.fixture(scope="module", autouse=True)
def packages():
    for name in ("bitsandbytes", "torchao"):
        if importlib.util.find_spec(name) is None:
            lacking(f"no {name} (make quantization)")


def test_a_base_in_4_bits_is_merged_unpacked(tmp_path):
    base(hidden=128).save_pretrained(tmp_path)
    quantization = low_precision.nf4_config(torch.bfloat16)
    small = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": "cpu"}
    )
    model = with_adapter(small).train()  # bitsandbytes repacks weights for inference on a CPU
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


def test_fp8_on_a_cpu_learns_and_keeps_the_head_out():
    model = low_precision.to_float8(base())
    found = {
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    }
    assert len(found) == 7
    assert "lm_head" not in found
    tokens = torch.arange(15)[None]  # 15 tokens: products of 16 are made by padding
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, labels=tokens).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_random_weights_that_compute_in_fp8_are_those_of_bf16(tmp_path):
    assert_weights_are_rounded(tmp_path, "fp8", True)


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_dpo_and_grpo_train_an_adapter_on_nf4(tmp_path, method):
    code, result = run(tmp_path, method, *QLORA)
    assert (code, result["status"], result["steps"]) == (0, "done", 4)
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    assert all(math.isfinite(row["loss"]) for row in computed(tmp_path))


def test_raft_trains_an_adapter_on_nf4_and_continues_with_it_merged(tmp_path):
    check_adapter_is_trained_and_merged(tmp_path, *QLORA)


def test_an_nf4_run_resumes_exactly(tmp_path, monkeypatch):
    assert resumes_exactly(tmp_path, monkeypatch, *QLORA) == (0, 75, 0)
