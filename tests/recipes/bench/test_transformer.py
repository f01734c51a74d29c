"""Compare the transformers with the figures of the MI350X report."""

from __future__ import annotations

import pytest
import torch

from launch.core.errors import UserError
from recipes.bench import gpt, published, timing, transformer
from tests.helpers.bench_config import bench_config

CPU = torch.device("cpu")
ARGS = {"models": ["tiny"], "warmup": 0, "steps": 1}
CASE = {"model": "tiny", "num_gpus": 1, "batch": 2, "sequence": 32}


def config(tmp_path=".", compute="fp32", weights="fp32"):
    run = bench_config(tmp_path, **ARGS)
    run.precision = {"name": compute, "compute": compute, "weights": weights}
    return run


def test_parameters_and_tflops_fit_the_report():
    """Check all eight rows to rounding. No other number of vectors per layer passes."""
    rows = [row for row in published.load("transformer")[0] if "layers" in row.also]
    assert len(rows) == 8
    for row in rows:
        size = gpt.SIZES[row.match["model"]]
        with torch.device("meta"):
            count = sum(p.numel() for p in gpt.GPT(size, size.sequence).parameters())
        assert count == pytest.approx(row.also["parameters"], rel=0.02)
        low, high = (6 * count * (row.value + half) / 1e12 for half in (-0.5, 0.5))
        assert low - 0.05 <= row.also["tflops"] <= high + 0.05


def test_both_kinds_of_attention_compute_the_same():
    torch.manual_seed(0)
    size = gpt.SIZES["tiny"]
    batch = gpt.random_batch(size.vocabulary, 2, 16, CPU)
    model = gpt.build(size, 16, CPU, torch.float32)
    loss = model(*batch)
    for block in model.blocks:
        block.attention = "eager"
    assert model(*batch).item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_model_that_runs_out_of_memory_does_not_end_the_series(tmp_path, monkeypatch):
    build = gpt.build

    def build_small(size, *more):
        if size.width == 128:
            raise torch.OutOfMemoryError("64 GiB")
        return build(size, *more)

    monkeypatch.setattr(gpt, "build", build_small)
    monkeypatch.setitem(gpt.SIZES, "wide", gpt.Size(1, 2, 128, 128, 1, 8, vocabulary=512))
    run = config(tmp_path)
    run.trainer_args.models = ["wide", "tiny"]
    result = transformer.transformer(run)
    wide, tiny = result["rows"]
    assert (wide["model"], wide["error"], tiny["error"]) == ("wide", "out of memory", None)
    assert CASE.items() <= tiny.items(), "keys that published rows match"
    assert tiny["tokens_per_second"] == pytest.approx(64 / tiny["ms"] * 1e3)
    operations = 6 * tiny["parameters"] * tiny["tokens_per_second"]
    assert tiny["tflops"] == pytest.approx(operations / 1e12)
    assert tiny["share_of_peak"] == pytest.approx(tiny["tflops"] / 0.1)
    assert tiny["loss"] == pytest.approx(6.24, abs=0.2)  # ln(512), the loss of an untrained model


def test_autocast_for_wider_weights():
    run = {weights: config(compute="bf16", weights=weights) for weights in ("fp32", "bf16")}
    assert {weights: timing.autocast(run[weights]) for weights in run} == {
        "fp32": torch.bfloat16,
        "bf16": None,
    }
    assert "autocast" in timing.numerics(run["fp32"])


@pytest.mark.parametrize(("compute", "weights"), [("bf16", "nf4"), ("fp8", "bf16")])
def test_unsupported_precisions_are_rejected(compute, weights):
    with pytest.raises(UserError, match=f"precision={compute}"):
        timing.weights_dtype(config(compute=compute, weights=weights))
