"""Test the benchmarks of batch sizes, precisions and checkpointing."""

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.bench import language_model
from tests.helpers.bench_config import bench_config

CPU = torch.device("cpu")
BUILD = language_model.build
SMALL = {"sequence": 16, "warmup": 1, "steps": 2}


def memory_for(rows):
    """Return a `build` whose model runs out of memory if a batch has more than `rows` rows."""

    def build(config, device):
        def limit(_module, _args, kwargs):
            if len(kwargs["input_ids"]) > rows:
                raise torch.OutOfMemoryError("tried to allocate 64 GiB")

        model = BUILD(config, device)
        model.register_forward_pre_hook(limit, with_kwargs=True)
        return model

    return build


ADAPTER = {"name": "lora", "rank": 2, "alpha": 4}


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_the_loss_is_correct_without_computing_all_logits(tmp_path, adapter):
    config = bench_config(tmp_path, adapter=adapter)
    args = language_model.TrainingConfig(output_dir="x", use_cpu=True, **SMALL)
    model = language_model.build(config, CPU)
    if adapter:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert names
        assert all("lora_" in name for name in names)
    tokens = language_model.random_tokens(config, args, 2, CPU)
    with torch.no_grad():
        expected = float(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append("all logits"))
    assert float(language_model.sft_step(model, config, args)(tokens)) == pytest.approx(
        expected, rel=1e-5
    )
    assert calls == []


def test_an_interrupted_series_remembers_what_was_out_of_memory(tmp_path, monkeypatch):
    """Resume after three sizes, and skip the sizes above the one that ran out of memory."""
    monkeypatch.setattr(language_model, "build", memory_for(rows=2))
    language_model.batch_size(bench_config(tmp_path, batch_sizes=[4, 1, 2], **SMALL))
    # Every further measurement would fail.
    monkeypatch.setattr(language_model, "build", memory_for(rows=0))
    result = language_model.batch_size(
        bench_config(tmp_path, batch_sizes=[16, 1, 2, 8, 4], **SMALL)
    )
    errors = [row["error"] for row in result["rows"]]
    assert errors == [
        None,
        None,
        "out of memory",
        *["not measured: batch_size 4 already ran out of memory"] * 2,
    ]
    assert result["largest"] == 2
    assert f"largest batch 2, fastest batch {result['fastest']}" in result["notes"][0]


def test_precisions_are_compared_with_fp32_and_bf16(tmp_path):
    names = ["fp16", "fp32", "bf16", "fp8", "nf4"]
    args = {**SMALL, "precisions": names, "batch_size": 2, "learning_rate": 1e-2, "steps": 6}
    result = language_model.precision(bench_config(tmp_path, **args))
    rows = {row["precision"]: row for row in result["rows"]}
    assert rows["fp32"]["loss_difference"] == 0.0
    assert rows["fp32"]["loss"] < 5.5  # ln(512) = 6.2 at the start
    for name in ("bf16", "fp16"):
        assert 0 < abs(rows[name]["loss_difference"]) < 0.1
        assert rows[name]["loss_difference"] == rows[name]["loss"] - rows["fp32"]["loss"]
        assert rows[name]["slowdown"] == rows[name]["ms"] / rows["bf16"]["ms"]
    for name, package in (("fp8", "torchao"), ("nf4", "bitsandbytes")):
        if importlib.util.find_spec(package) is None:
            assert f"{name} needs {package}: No module named" in rows[name]["error"]
        else:
            assert rows[name]["loss"] < 6.1


class Products(TorchDispatchMode):
    """Count matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def products(model, tokens, mode):
    """Return the number of matrix products in a backward pass, and the loss."""
    language_model.switch(model, mode)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with Products() as counted:
        loss.backward()
    return counted.count, float(loss.detach())


def test_selective_checkpointing_does_not_recompute_products(tmp_path):
    config = bench_config(tmp_path)
    args = language_model.CheckpointingConfig(output_dir="x", use_cpu=True, **SMALL)
    model = language_model.build(config, CPU)
    tokens = language_model.random_tokens(config, args, 2, CPU)
    backward = {mode: products(model, tokens, mode) for mode in language_model.MODES}
    # Each of two layers recomputes six of seven products; the last one is not needed.
    assert backward["on"][0] == backward["off"][0] + 2 * 6
    assert backward["selective"] == backward["off"]
    result = language_model.checkpointing(bench_config(tmp_path, batch_size=2, **SMALL))
    rows = {row["mode"]: row for row in result["rows"]}
    assert rows["on"]["slowdown"] == rows["on"]["ms"] / rows["off"]["ms"]
    assert rows["on"]["memory_share"] == rows["on"]["memory_gb"] / rows["off"]["memory_gb"]
