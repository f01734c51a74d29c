"""Test exported models with vLLM's build for the CPU and with transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from recipes.models import quantize
from tests.conftest import command
from tests.helpers.exports import run_export, write_model
from tests.integration.conftest import skip_without

pytestmark = pytest.mark.integration

ENDS_WITHIN_S = 900  # timeout of four phases on two busy cores, one of which starts an engine
PHASES = [
    '{name: sft, overrides: ["method=sft"]}',
    '{name: export, model_from: sft, overrides: ["method=export", "method.args.weights=bf16"]}',
    '{name: vllm, model_from: export, overrides: ["method=evaluate", "method.args.engine=vllm"]}',
    '{name: transformers, model_from: export, overrides: ["method=evaluate"]}',
]


def answers(run: Path) -> list[tuple[str, int]]:
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(row["completion"], row["num_tokens"]) for row in rows]


def test_vllm_and_transformers_have_same_greedy_answers(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")
    done = command(
        "hardware=cpu",
        "smoke=true",
        f"phases=[{', '.join(PHASES)}]",
        cwd=tmp_path,
        timeout=ENDS_WITHIN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (by_vllm,) = tmp_path.glob("runs/*/[0-9]*/3_vllm")
    by_transformers = by_vllm.with_name("4_transformers")
    result, expected = (
        json.loads((run / "result.json").read_text()) for run in (by_vllm, by_transformers)
    )
    assert len(answers(by_vllm)) == result["num_samples"] == 8
    assert answers(by_vllm) == answers(by_transformers)
    assert result["data_sha256"] == expected["data_sha256"]


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_transformers_load_8_bit_weights(tmp_path, weights):
    if importlib.util.find_spec("compressed_tensors") is None:
        skip_without("no compressed-tensors, which comes with vLLM (make vllm)")
    source = write_model(tmp_path / "source")
    code, result, run = run_export(tmp_path, source, f"method.args.weights={weights}")
    before, written = (
        load_file(source / "model.safetensors"),
        load_file(run / "model/model.safetensors"),
    )
    linear = [name for name in before if name.endswith("_proj.weight")]
    assert (code, result["num_quantized"], len(linear)) == (0, 14, 14)
    assert {
        name
        for name, tensor in written.items()
        if tensor.dtype == quantize.EIGHT_BITS[weights].dtype
    } == set(linear)
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    model(torch.arange(4)[None])  # compressed-tensors decompresses weights here
    loaded = model.state_dict()
    for name in linear:
        wanted = written[name].float() * written[f"{name}_scale"].float()
        # transformers rounds to bf16 when it loads weights.
        assert torch.allclose(loaded[name].float(), wanted, rtol=2**-8, atol=0), name
    lost = sum(
        ((written[n].float() * written[f"{n}_scale"].float()) - before[n]).square().sum().item()
        for n in linear
    )
    lost += sum(
        (written[n].float() - before[n]).square().sum().item() for n in before if n not in linear
    )
    assert result["weights_error"] == pytest.approx(
        (lost / sum(w.square().sum().item() for w in before.values())) ** 0.5, rel=1e-4
    )
    card = (run / "model/README.md").read_text()
    assert f"weights: {weights}" in card
    assert "num_quantized: 14" in card
