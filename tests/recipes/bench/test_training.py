"""Test the benchmarks of products, three layers, several GPUs and fine-tuning."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipes.bench import consensus, matmul, mlp_loop, transformer
from recipes.bench.mlp_loop import MlpLoopConfig
from recipes.bench.transformer import ScalingConfig
from recipes.models import low_precision
from tests.helpers.bench_config import bench_config


@pytest.fixture
def alone():
    """Initialize a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_matmul_counts_two_operations_per_pair_of_elements(tmp_path):
    args = {"sizes": [32, 48], "dtypes": ["fp32"], "warmup": 0, "iterations": 4}
    rows = matmul.matmul(bench_config(tmp_path, **args))["rows"]
    assert [(row["size"], row["dtype"]) for row in rows] == [(32, "fp32"), (48, "fp32")]
    for row in rows:
        assert row["tflops"] == pytest.approx(4 * 2 * row["size"] ** 3 / row["total_s"] / 1e12)
        assert row["share_of_peak"] == pytest.approx(row["tflops"] / 0.1)


def test_mlp_loop_has_the_shape_of_the_report(tmp_path):
    with torch.device("meta"):
        layers = mlp_loop.build(MlpLoopConfig("out").width, MlpLoopConfig("out").inner)
    weights = [layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear)]
    assert [round(count / 1e6, 1) for count in weights] == [33.6, 67.1, 33.6]
    assert sum(weights) / 1e6 == pytest.approx(134, abs=0.5)
    args = {"batch": 4, "width": 8, "inner": 16, "warmup": 0, "iterations": 3}
    (row,) = mlp_loop.mlp_loop(bench_config(tmp_path, **args))["rows"]
    assert row["samples_per_second"] == pytest.approx(4 * 3 / row["total_s"])
    operations = 6 * (8 * 16 + 16 * 16 + 16 * 8)
    assert row["tflops"] == pytest.approx(operations * row["samples_per_second"] / 1e12)


def test_one_gpu_is_measured_first_and_once():
    args = ScalingConfig("out", models=["tiny"], num_gpus=[4, 2, 1, 8], batch=3)
    cases = transformer.cases(args, world=4)
    assert [(c["num_gpus"], c["strategy"], c["global_batch"]) for c in cases] == [
        (1, "ddp", 3),
        (2, "ddp", 6),
        (2, "fsdp", 6),
        (4, "ddp", 12),
        (4, "fsdp", 12),
    ]


def test_efficiency_is_relative_to_one_gpu_of_the_same_model():
    speeds = [("7b", 1, 10.0), ("7b", 2, 15.0), ("13b", 2, 1.0), ("7b", 4, None)]
    rows = [{"model": m, "num_gpus": n, "tokens_per_second": speed} for m, n, speed in speeds]
    transformer.compare(rows)
    assert [row["efficiency"] for row in rows] == [1.0, 0.75, None, None]


def test_the_slowest_rank_determines_the_figures(alone, monkeypatch):
    def gather(results, mine, group):
        others = ({"ms": 3.0, "memory_gb": 1.0}, None)
        results[:] = [mine, *({"result": other} for other in others)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    slowest = consensus.slowest_rank(alone, lambda: {"ms": 2.0, "memory_gb": 4.0})
    assert slowest == {"ms": 3.0, "memory_gb": 4.0}


@pytest.mark.parametrize(("name", "module", "expected"), [
    ("model.layers.0.mlp.up_proj", nn.Linear(32, 64), True),
    ("lm_head", nn.Linear(32, 64), False),
    ("model.layers.0.mlp.up_proj.lora_A.default", nn.Linear(32, 16), False),
    ("odd", nn.Linear(30, 64), False),
    ("norm", nn.LayerNorm(32), False),
])  # fmt: skip
def test_layers_that_compute_in_fp8(name, module, expected):
    assert low_precision.supports_float8(module, name) is expected
