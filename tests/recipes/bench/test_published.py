"""Test the files of published figures, their arithmetic, and the comparison with our rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from launch.config.choose import choose
from launch.core.errors import UserError
from launch.estimate.speed import estimate_speed
from recipes.bench import published
from recipes.bench.published import Reference
from tests.conftest import ROOT, composed, host_with

CONF = ROOT / "conf/hardware"
HARDWARE = {path.stem for path in CONF.glob("*.yaml")} | {"a100"}  # only in rows of kind peak
BENCHMARKS = [path.stem for path in published.FOLDER.glob("*.yaml")]
REPORT = "AMD MI350X Training Benchmark Results"


approx = pytest.approx


def rows(benchmark: str, hardware: str, where: str = "") -> list[Reference]:
    of_hardware = (row for row in published.load(benchmark)[0] if hardware in row.hardware)
    return [row for row in of_hardware if row.where.startswith(where)]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_row_has_a_source_and_can_be_found(benchmark: str):
    """Check that keys find their measured row, and that no two rows match equally well."""
    content = yaml.safe_load((published.FOLDER / f"{benchmark}.yaml").read_text())
    references, _ = published.load(benchmark)
    assert references
    for row in references:
        types = {key: type(value).__name__ for key, value in row.match.items()}
        assert types.items() <= content["keys"].items()
        assert row.kind in published.KINDS
        assert re.search(r"\d{4}-\d\d-\d\d$", str(row.source["date"]))
        assert row.source["url"] is None or row.source["url"].startswith("https://")
        assert all((row.source["title"], row.where, row.unit, row.value > 0))
        assert set(row.hardware) <= HARDWARE
        for hardware in row.hardware if row.kind in published.COMPARED else ():
            match = published.find_reference(benchmark, hardware, row.match, row.figure)
            assert match == row if row.kind == "measured" else match is not None
            keys = [(r.kind, r.match, r.figure) for r in rows(benchmark, hardware)]
            assert keys.count((row.kind, row.match, row.figure)) == 1


def test_rates_follow_from_times():
    for row in rows("gemm", "mi350x", "Benchmark 1b"):
        if "ms" in row.also:
            m, n, k = map(int, str(row.match["shape"]).split())
            assert 2 * m * n * k / row.also["ms"] / 1e9 == approx(row.value, abs=2)
    for row in rows("matmul", "mi350x"):
        computed = 20 * 2 * int(row.match["size"]) ** 3 / 1e12
        assert computed / row.value == approx(row.also["total_s"], abs=0.0005)
    (mlp,) = rows("mlp_loop", "mi350x")
    assert 100 * 256 / mlp.also["total_s"] == approx(256e3 / mlp.also["ms"])
    for row in rows("transformer", "mi350x"):
        tokens = int(row.match["batch"]) * int(row.match["sequence"])
        assert 1e3 * tokens / row.also["ms"] == approx(row.value, 0.003)
    for row in rows("collectives", "mi300x", "AllReduce RCCL Test"):
        sent = 2 * 7 / 8 * int(row.match["bytes"])
        assert sent / row.also["us"] / 1e3 == approx(row.value, 1e-3, abs=0.006)


def test_tflops_and_totals_follow_from_tokens():
    for row in rows("transformer", "mi350x"):
        assert 6 * row.also["parameters"] * row.value / 1e12 == approx(row.also["tflops"], 0.005)
    one = rows("scaling", "mi350x", "Benchmark 4, scaling")[0].value
    for row in rows("scaling", "mi350x"):
        tflops = 6 * row.also.get("parameters", 5.24e9) * row.value / 1e12
        assert tflops == approx(row.also["tflops"], 0.002)
        if "efficiency" in row.also:
            share = row.value / one / int(row.match["num_gpus"])
            assert share == approx(row.also["efficiency"], abs=0.0005)
    for row in rows("finetune", "mi350x", "Benchmark 5"):
        if row.figure == "tokens_per_second_per_gpu":
            assert row.value * 8 == row.also["tokens_per_second"]


MLPERF = [row for row in published.load("finetune")[0] if "MLPerf" in row.source["title"]]
SHARED = ["precision=fp8", "method.args.max_length=8192"]
PLANS = {
    "llama2_70b": "model=llama3_1_70b adapter=lora adapter.rank=16 topology=fsdp",
    "llama3_1_8b": "model=llama3_1_8b topology=ddp",
}


def test_rows_of_mlperf_and_their_plans_are_those_of_the_page():
    page = (ROOT / "docs/benchmarks.md").read_text()
    for row in MLPERF:
        assert row.value == approx(row.also["samples_per_second"] * 8192 / 8, abs=0.6)
        name = {"llama2_70b": "Llama 2 70B, LoRA"}.get(str(row.match["model"]), "Llama 3.1 8B")
        cells = f"{name}, {row.hardware[0].upper()} | {row.value:,.0f} | {row.also['minutes']:.1f}"
        [plan] = re.findall(rf"^\| {re.escape(cells)} \| ([\d,]+) \|$", page, re.MULTILINE)
        if row.hardware == ["mi355x"]:
            size = int(row.match["batch"])
            steps = [f"per_device_train_batch_size={size}", f"gradient_accumulation_steps={size}"]
            overrides = [*PLANS[str(row.match["model"])].split(), "hardware=mi355x", *SHARED]
            config = composed(*overrides, *(f"method.args.{step}" for step in steps))
            predicted = (estimate_speed(choose(config, host_with(8))).tokens_per_second or 0) / 8
            assert predicted == approx(int(plan.replace(",", "")), rel=0.02)


GEMM: dict[str, Any] = {"shape": "8192 8192 8192", "dtype": "bf16", "op": "matmul"}
GEMM |= {"values": "normal", "padding": 0, "error": None}
FINETUNE: dict[str, Any] = {"model": "qwen3_8b", "precision": "bf16", "adapter": "none"}
FINETUNE |= {"sequence": 8192, "batch": 14, "num_gpus": 8, "setup": "plain_compiled_checkpointing"}
SCALING: dict[str, Any] = {"model": "7b", "num_gpus": 8, "strategy": "ddp", "batch": 8}


@pytest.mark.parametrize(("benchmark", "hardware", "row", "figure", "value"), [
    ("gemm", "mi350x", GEMM, "tflops", 1104),
    # A measurement is preferred to a minimum.
    ("gemm", "mi300x", GEMM, "tflops", 620),
    ("gemm", "mi355x", GEMM, "tflops", 600),
    # Peaks and estimates are not compared.
    ("matmul", "h100", {"size": 8192, "dtype": "fp16"}, "tflops", None),
    # The row with the batch is preferred.
    ("scaling", "mi350x", SCALING, "tokens_per_second", 101124),
    ("scaling", "mi350x", {**SCALING, "batch": 4}, "tokens_per_second", 70763),
    # All keys of the published row must match.
    ("finetune", "mi350x", {**FINETUNE, "setup": "plain"}, "tokens_per_second_per_gpu", None),
])  # fmt: skip
def test_the_published_figure_of_a_row(benchmark, hardware, row, figure, value):
    (compared,), _, _ = published.compare([row], benchmark, hardware, figure)
    assert compared["published"] == value


def compared(*rows, hardware="mi350x", figure="tflops", more=()):
    return published.compare(rows, "gemm", hardware, figure, *more)


def test_a_ratio_above_1_is_better_for_rates_and_times():
    (rate,), _, _ = compared({**GEMM, "tflops": 552.0})
    assert rate["published_source"] == f"{REPORT}, 2026-01-08, Benchmark 1b, BF16"
    assert rate["ratio"] == 0.5
    (time,), _, _ = compared({**GEMM, "ms": 1.992}, figure="ms", more=(False,))
    assert (time["published"], time["ratio"], time["shape"]) == (0.996, 0.5, GEMM["shape"])
    (least,), _, _ = compared(GEMM, hardware="mi355x")
    assert least["published_source"].startswith("at least: AMD-AGI/Primus")


def test_rows_below_the_gate():
    measured = [
        {**GEMM, "tflops": 1000.0},
        {**GEMM, "dtype": "fp16", "tflops": 900.0},
        {**GEMM, "dtype": "fp8", "tflops": 1.0},  # nothing was published
    ]
    (below,) = compared(*measured, more=(True, 0.9))[2]
    assert below == "8192 8192 8192 fp16 matmul: 0.85 of 1053 TFLOPS"
    assert compared(*measured, more=(True, 0.8))[2] == []
    (below,) = compared({**GEMM, "error": "out of memory"}, more=(True, 0.5))[2]
    assert below == "8192 8192 8192 bf16 matmul: out of memory, instead of 1104 TFLOPS"


@pytest.mark.parametrize(("hardware", "row"), [("mi50", GEMM), ("mi350x", {"shape": "1 1 1"})])
def test_a_gate_without_a_published_row_is_rejected(hardware, row):
    assert len(compared(row, hardware=hardware)[1]) == 1
    with pytest.raises(UserError, match="fail_below=0.9"):
        published.require("gemm", hardware, "tflops", 0.9, [row])
    with pytest.raises(UserError, match="fail_below=0.9"):
        compared(row, hardware=hardware, more=(True, 0.9))
