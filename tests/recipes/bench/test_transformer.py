"""Test the MI350X report's transformers against its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from launch.core.errors import UserError
from recipes.bench import gpt, series, training, transformer
from recipes.bench.transformer import TransformerConfig
from tests.helpers.counted import Counter

CPU = torch.device("cpu")
# The MI350X report's benchmark 3: parameters in millions and the last digit's worth, tokens/s,
# TFLOPS.
REPORT = {
    "small": (30, 1, 950_586, 171.8),
    "medium": (124, 1, 298_957, 222.4),
    "large": (354, 1, 107_626, 228.7),
    "xl": (773, 1, 40_054, 185.8),
    "1.5b": (1440, 10, 24_195, 208.6),
    "3b": (2650, 10, 11_980, 190.3),
    "7b": (5240, 10, 18_381, 578.3),
    "13b": (10_120, 10, 7_941, 482.2),
}


def args(**given) -> TransformerConfig:
    return TransformerConfig(
        **{
            "output_dir": "out",
            "models": ["tiny"],
            "use_cpu": True,
            "warmup": 0,
            "steps": 1,
            **given,
        }
    )


def config(tmp_path=".", compute="fp32", weights="fp32"):
    precision = {"name": compute, "compute": compute, "weights": weights}
    hardware = {"name": "cpu", "peak_tflops": {"fp32": 0.5}}
    return OmegaConf.create(
        {"run_dir": str(tmp_path), "profile": "none", "precision": precision, "hardware": hardware}
    )


def counted(name: str) -> int:
    size = gpt.SIZES[name]
    with torch.device("meta"):
        return gpt.parameters(gpt.GPT(size, size.sequence))


@pytest.mark.parametrize("name", REPORT)
def test_parameters_are_the_reports_and_take_six_operations_a_token(name):
    """Hold within rounding in all eight rows, as with no other number of vectors in a layer."""
    millions, digit, tokens_per_second, tflops = REPORT[name]
    assert counted(name) / 1e6 == pytest.approx(millions, abs=digit / 2)
    low, high = (6 * counted(name) * (tokens_per_second + half) / 1e12 for half in (-0.5, 0.5))
    assert low - 0.05 <= tflops <= high + 0.05


def test_memory_of_the_report_comes_out_with_kept_scores_and_dropout(monkeypatch):
    name, gb = "7b", 107.9
    # What dropout calls on a GPU: its mask has a byte an element. A CPU's is as wide as the values.
    monkeypatch.setattr(F, "dropout", lambda x, p: torch.native_dropout(x, p, True)[0])
    size = replace(gpt.SIZES[name], attention="eager", dropout=0.1)
    counter = Counter((size.vocabulary, size.width))
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda weight, **_: weight)
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = gpt.GPT(size, size.sequence)
        finally:
            torch.set_default_dtype(torch.float32)
        counter.peak = counter.alive
        tokens = torch.zeros(size.batch, size.sequence, dtype=torch.long)
        model(tokens, tokens).backward()
    moments = 2 * 2 * gpt.parameters(model)
    assert (counter.peak + moments) / 1e9 == pytest.approx(gb, abs=0.2)


@pytest.mark.parametrize("attention", gpt.ATTENTION)
def test_no_token_sees_those_that_follow(attention):
    torch.manual_seed(0)
    block = gpt.Block(replace(gpt.SIZES["tiny"], attention=attention))
    x = torch.randn(1, 8, 64)
    changed = x.clone()
    changed[:, 5:] = 0
    assert torch.allclose(block(x)[:, :5], block(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(block(x)[:, 5:], block(changed)[:, 5:], atol=1e-3)


def test_both_kinds_of_attention_compute_the_same():
    torch.manual_seed(0)
    size = gpt.SIZES["tiny"]
    batch = gpt.random_batch(size.vocabulary, 2, 16, CPU)
    model = gpt.build(size, 16, CPU, torch.float32)
    loss = model(*batch)
    for block in model.blocks:
        block.attention = "eager"
    assert model(*batch).item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_row_says_what_its_own_figures_give(tmp_path):
    case = {"model": "tiny", "num_gpus": 1, "batch": 2, "sequence": 32}
    row = transformer.measure_one(case, config(tmp_path), args(), CPU)
    assert row["tokens_per_second"] == pytest.approx(64 / row["ms"] * 1e3)
    assert row["tflops"] == pytest.approx(6 * row["parameters"] * row["tokens_per_second"] / 1e12)
    assert row["share_of_peak"] == pytest.approx(row["tflops"] / 0.5)
    # The logarithm of 512 tokens, since nothing is learnt yet.
    assert row["loss"] == pytest.approx(6.24, abs=0.2)


def test_a_model_that_does_not_fit_is_a_row_and_the_next_is_measured(tmp_path, monkeypatch):
    build = gpt.build

    def built(size, *given):
        if size.width == 128:
            raise torch.OutOfMemoryError("64 GiB")
        return build(size, *given)

    monkeypatch.setattr(gpt, "build", built)
    monkeypatch.setitem(gpt.SIZES, "wide", gpt.Size(1, 2, 128, 128, 1, 8, vocabulary=512))
    changed = config(tmp_path)
    changed.trainer_args = {
        "output_dir": "out",
        "use_cpu": True,
        "models": ["wide", "tiny"],
        "warmup": 0,
        "steps": 1,
    }
    rows = transformer.transformer(changed)["rows"]
    assert [(row["model"], row["error"]) for row in rows] == [
        ("wide", "out of memory"),
        ("tiny", None),
    ]


def test_a_step_trains():
    torch.manual_seed(0)
    step, parameters = transformer.prepared(
        {"model": "tiny", "batch": 2, "sequence": 32}, config(), args(), CPU
    )
    losses = [step().item() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert parameters == counted("tiny")


def test_autocast_where_weights_are_wider(monkeypatch):
    seen = []
    monkeypatch.setattr(
        gpt.GPT,
        "forward",
        lambda self, *_: seen.append(torch.is_autocast_enabled("cpu")) or self.norm.weight.sum(),
    )
    for weights in ("fp32", "bf16"):
        step, _ = transformer.prepared(
            {"model": "tiny", "batch": 2, "sequence": 32},
            config(compute="bf16", weights=weights),
            args(),
            CPU,
        )
        step()
    assert seen == [True, False]
    assert "autocast" in training.numerics(config(compute="bf16"))
    assert "autocast" not in training.numerics(config(compute="bf16", weights="bf16"))


@pytest.mark.parametrize(("compute", "weights"), [("bf16", "nf4"), ("fp8", "bf16")])
def test_numerics_that_the_loop_does_not_have(compute, weights):
    with pytest.raises(UserError, match=f"precision={compute}"):
        training.weights_dtype(config(compute=compute, weights=weights))


def test_the_gate_holds_the_published_row(tmp_path):
    """Give a row of ours the keys by which published rows are found."""
    changed = config(tmp_path)
    changed.trainer_args = {
        "output_dir": "out",
        "use_cpu": True,
        "models": ["tiny"],
        "warmup": 0,
        "steps": 1,
    }
    actual = transformer.transformer(changed)
    assert {"model": "tiny", "num_gpus": 1, "batch": 2, "sequence": 32}.items() <= actual["rows"][
        0
    ].items()
    assert actual["figure"] == "tokens_per_second"
    assert any("attention=eager" in note for note in actual["notes"])
    assert series.earlier_rows(tmp_path / "metrics.jsonl", [{"model": "tiny"}])
