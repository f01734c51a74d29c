"""Compare the planned memory with bytes that torch counts and with measured runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from launch.estimate import activations, batch_counts, margin, memory, rank_memory
from launch.machine import placement, this_python
from launch.plan.planning import make_plan, prepare
from launch.schema import Config
from launch.schema.plan import Memory
from recipes.models import head
from tests.conftest import ROOT, composed, host_with
from tests.gpu import predictions
from tests.helpers import counted

RUN = Path("/runs/x/1")
LINES = map(json.loads, predictions.MEASURED.read_text().splitlines())
ROWS = [row for row in LINES if "peak_gb" in row]
QWEN_4B = 4_022_468_096


def planned(*overrides: str) -> Memory:
    config, _ = prepare(composed(*" ".join(overrides).split()))
    host = host_with(config.hardware.gpus_per_node)
    return memory.memory(config, placement.process_groups(config, host))[-1]


def parts_of(*overrides: str) -> dict[str, float]:
    return planned(*overrides).parts_gb


def plan_of(*overrides: str, gfx: str = "gfx942"):
    config, _ = prepare(composed(*" ".join(overrides).split()))
    return make_plan(config, host_with(8, gfx), RUN)


NUMERICS = {
    "autocast": "precision=bf16",
    "cast": "precision=bf16 precision.weights=bf16",
    "fp32": "precision=fp32",
}


def six_layers(model: str, numerics: str, rows: int, length: int, *more: str) -> Config:
    overrides = [
        f"hardware=h200 method=sft topology=single model={model} model.num_layers=6",
        f"{NUMERICS[numerics]} method.args.per_device_train_batch_size={rows}",
        f"method.args.max_length={length}",
    ]
    config = composed(*" ".join([*overrides, *more]).split())
    config.model.num_parameters = memory.shapes.parameters(config.model)
    return config


def counted_by_torch(model: str, *step: object) -> float:
    shape = SimpleNamespace(**OmegaConf.load(ROOT / f"conf/model/{model}.yaml"))
    shape.num_layers = 6
    with pytest.MonkeyPatch.context() as patch, counted.as_on_a_gpu(patch):
        return counted.micro_step(shape, *step)


@pytest.fixture
def fused(monkeypatch):
    """Plan fused attention, because fake tensors use that of the CPU, even in fp32."""
    monkeypatch.setattr(activations.MicroStep, "score_bytes", lambda self: 0.0)


@pytest.mark.parametrize(("model", "numerics", "rows", "length", "checkpointing", "accumulates"), [
    ("qwen3_0_6b", "autocast", 4, 2048, True, True),
    ("qwen3_4b", "cast", 2, 8192, False, True),
    ("qwen3_8b", "cast", 4, 2048, True, True),
    ("llama3_1_8b", "fp32", 1, 2048, False, True),
    ("qwen2_5_1_5b", "autocast", 4, 2048, False, False),
])  # fmt: skip
def test_micro_step_matches_torch(fused, model, numerics, rows, length, checkpointing, accumulates):
    config = six_layers(
        *(model, numerics, rows, length),
        f"method.args.gradient_checkpointing={checkpointing}",
        f"method.args.gradient_accumulation_steps={1 + accumulates}",
    )
    moments = rank_memory.moments(config)
    del moments["optimizer step"]
    gradients = config.model.num_parameters * (2 if numerics == "cast" else 4) * accumulates
    peak = max(sum(parts.values()) for parts in moments.values()) - gradients
    expected = counted_by_torch(model, numerics, rows, length, checkpointing, accumulates)
    assert peak == pytest.approx(expected, rel=0.09)


@pytest.mark.parametrize("tokens", [40, 1024])
def test_head_without_triton_needs_what_is_planned(tokens):
    config = six_layers("qwen3_4b", "cast", 1, tokens, "adapter=lora hardware.triton=false")
    step = activations.micro_step(config, batch_counts.batch(config))
    with FakeTensorMode(allow_non_fake_inputs=True), counted.Counter((0, 0)) as counter:
        hidden = torch.empty(tokens, 8, dtype=torch.float16, requires_grad=True)
        weight = torch.empty(config.model.vocab_size, 8, dtype=torch.float16)
        start, counter.peak = counter.alive, counter.alive
        head.NllHead.apply(hidden, weight, torch.zeros(tokens, dtype=torch.long), True)
    assert counter.peak - start == pytest.approx(step.tile(), rel=0.15)


ADAPTERS = {  # name -> overrides, arguments of peft
    "lora": ("", {}),
    "dropout": ("adapter.dropout=0.05", {"lora_dropout": 0.05}),
    "dora of two layers": (
        "adapter.dora=true adapter.target_modules=[q_proj,v_proj]",
        {"use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    "dora with dropout": (
        "adapter.dora=true adapter.dropout=0.05",
        {"use_dora": True, "lora_dropout": 0.05},
    ),
}


@pytest.mark.parametrize(
    ("adapter", "model", "numerics", "rows", "length", "checkpointing", "strategy"),
    [
        ("lora", "qwen3_8b", "cast", 1, 8192, False, "single"),
        ("lora", "qwen3_8b", "cast", 1, 8192, True, "fsdp"),
        ("dropout", "qwen2_5_1_5b", "fp32", 4, 4096, True, "single"),
        ("dora of two layers", "llama3_1_8b", "cast", 4, 1024, False, "fsdp"),
        ("dora with dropout", "qwen3_8b", "autocast", 1, 8192, True, "single"),
    ],
)
def test_micro_step_with_an_adapter_matches_torch(
    fused, monkeypatch, adapter, model, numerics, rows, length, checkpointing, strategy
):
    """Peft's weights are fp32 under autocast, and in 16 bits if a strategy casts all weights."""
    overrides, arguments = ADAPTERS[adapter]
    config = six_layers(
        *(model, numerics, rows, length, "adapter=lora", overrides),
        f"method.args.gradient_checkpointing={checkpointing}",
        "method.args.gradient_accumulation_steps=1",
    )
    casts, excluded = strategy == "fsdp", {"optimizer step"}
    if casts:  # compare only activations, without gathered weights and sharded gradients
        excluded.add("backward of the first layer")
        fsdp = composed("hardware=h200", "topology=fsdp", "precision=bf16", "adapter=lora")
        assert activations.micro_step(fsdp, batch_counts.batch(fsdp)).adapter.width == 2
        step = activations.micro_step(config, batch_counts.batch(config))
        low = dataclasses.replace(step.adapter, width=2, recast=False)
        step = dataclasses.replace(step, adapter=low)
        monkeypatch.setattr(rank_memory, "micro_step", lambda *_: step)
    moments = {name: m for name, m in rank_memory.moments(config).items() if name not in excluded}
    arguments = {"r": 16, "target_modules": "all-linear", **arguments}
    step = (numerics, rows, length, checkpointing, False, arguments, casts)
    peak = max(sum(parts.values()) for parts in moments.values())
    assert peak == pytest.approx(counted_by_torch(model, *step), rel=0.09)


def test_compiled_layer_saves_as_much_as_torch_does(fused):
    """Subtract two layers from three. With an odd length, tokens differ from weights in size."""
    rows, length, saved = 2, 251, []
    shape = SimpleNamespace(num_experts=0, **OmegaConf.load(ROOT / "conf/model/llama3_1_8b.yaml"))
    with pytest.MonkeyPatch.context() as patch, counted.as_on_a_gpu(patch):
        for shape.num_layers in (2, 3):
            saved.append(counted.saved_when_compiled(shape, "autocast", rows, length))
    numerics = activations.Numerics.autocast
    step = activations.MicroStep(shape, numerics, rows, length, None, False, compiled=True)
    assert step.saved_by_layer() == pytest.approx(saved[1] - saved[0], rel=0.01)
    assert step.saved_by_layer() < 0.85 * dataclasses.replace(step, compiled=False).saved_by_layer()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_measured_peaks_are_predicted(row):
    """Errors are at most 5%, or 10% for split and offload, as docs/results/memory.md promises."""
    overrides = " ".join(row["overrides"])
    is_rough = any(word in overrides for word in ("split", "colocate", "offload"))
    predicted = predictions.planned_row(row)[0].allocated_gb
    assert predicted == pytest.approx(row["peak_gb"], rel=0.10 if is_rough else 0.05)


B, LARGE = QWEN_4B / 1e9, 8_190_735_360 / 1e9
SFT, DPO = (f"hardware=mi300x model=qwen3_4b method={method}" for method in ("sft", "dpo"))
SFT_8B = "hardware=mi300x model=qwen3_8b method=sft"
DPO_ON_2 = "hardware=h200 model=qwen3_1_7b topology=fsdp topology.num_gpus=2 method=dpo"
TWICE = "method.args.gradient_accumulation_steps=2"
OPTIM = f"{SFT} topology=single method.args.optim"
NF4 = f"{SFT_8B} adapter=qlora adapter.rank=16 topology"
# Qwen3-8B has 36 layers of 192,937,984 weights in linear layers. Embedding, head and norms stay in
# 16 bits, and so does the adapter: 43,646,976 parameters of rank 16, with two moments each.
PACKED = 36 * 192_937_984 / 1e9
IN_4_BITS = {"weights": 0.5625 * PACKED + 2 * (LARGE - PACKED), "adapter": 2 * 0.043646976}
OFFLOAD = "topology.zero.offload_optimizer=true topology.zero.offload_parameters=true"


@pytest.mark.parametrize(("overrides", "parts"), [
    # Sharding divides by the number of ranks. DDP's gradients are in its buckets. ZeRO has 16-bit
    # weights and an fp32 copy.
    (f"{SFT} topology=ddp",
     {"weights": 4 * B, "optimizer": 8 * B, "master weights": None, "communication": None}),
    (f"{SFT} topology=zero2", {"weights": 2 * B, "optimizer": B, "master weights": B / 2}),
    (f"{SFT} topology=zero3", {"weights": B / 4, "optimizer": B, "master weights": B / 2}),
    (f"{SFT} topology=fsdp", {"weights": B / 2, "optimizer": B, "master weights": None}),
    (f"{SFT} topology=zero3 {OFFLOAD}",
     {"weights": None, "optimizer": None, "master weights": None}),
    (f"{SFT} topology=fsdp topology.fsdp.cpu_offload=true", {"weights": None, "optimizer": None}),
    # FSDP accumulates unsharded gradients, in the dtype of the reduction.
    (f"{SFT_8B} topology=fsdp {TWICE}", {"gradients": 4 * LARGE}),
    (f"{SFT_8B} topology=fsdp {TWICE} topology.fsdp.reduce_dtype=bf16", {"gradients": 2 * LARGE}),
    # The strategy applies to the reference too. FSDP gathers all of it.
    (f"{DPO} topology=single", {"reference": 4 * B}),
    (f"{DPO} topology=zero2", {"reference": 2 * B}),
    (f"{DPO} topology=zero3", {"reference": B / 4}),
    (f"{DPO} topology=fsdp", {"reference": B / 2}),
    (f"{DPO} topology=single adapter=lora", {"reference": None}),
    (f"{DPO} topology=single method.args.precompute_ref_log_probs=true", {"reference": None}),
    (f"{DPO} topology=fsdp topology.fsdp.cpu_offload=true", {"reference": None}),
    (f"{DPO.replace('dpo', 'grpo')} topology=single method.args.beta=0.04", {"reference": 4 * B}),
    (DPO_ON_2, {"reference as gathered": 3.4412, "reference in parameters": 3.4412}),
    (f"{DPO_ON_2} adapter=lora", {"reference as gathered": None}),
    # ZeRO casts only floating-point numbers, but packed weights are bytes.
    (f"{NF4}=single", {**IN_4_BITS, "optimizer": 4 * 0.043646976}),
    (f"{NF4}=zero2", IN_4_BITS),
    # adamw_8bit has 2.03 bytes per weight for 3.63e9 weights, and 8 for 389e6 of the embedding.
    (f"{OPTIM}=adamw_torch", {"optimizer": 8 * B, "optimizer's copies": 4 * B}),
    (f"{OPTIM}=adafactor", {"optimizer": None, "optimizer's copies": None}),
    (f"{OPTIM}=adamw_8bit", {"optimizer": 10.49}),
    (f"{OPTIM}=adamw_torch_8bit", {"optimizer": 8.17}),
    (f"{OPTIM}=lion_32bit", {"optimizer": 8 * B}),
])  # fmt: skip
def test_parts_follow_from_counts(overrides, parts):
    planned_parts = parts_of(overrides)
    absent = [name for name, size in parts.items() if size is None and name in planned_parts]
    assert absent == []
    sizes = {name: size for name, size in parts.items() if size is not None}
    assert {name: planned_parts[name] for name in sizes} == pytest.approx(sizes, rel=0.005)


def test_random_weights_are_complete_before_sharding():
    """Accelerate has 8B in fp32 (32.8 GB) in memory until all of it is sharded."""
    base = "hardware=h200 model=qwen3_8b method=sft adapter=lora topology=fsdp topology.num_gpus=2"
    drawn, read = planned(base, "model.init=random"), planned(base)
    assert drawn.moment == "sharding"
    assert drawn.parts_gb["whole weights"] == pytest.approx(32.94, abs=0.01)
    assert read.moment not in ("sharding", "loading")
    assert read.allocated_gb < drawn.allocated_gb / 2


def test_precomputed_reference_is_counted_before_the_first_step():
    base = "hardware=h200 model=qwen3_32b topology=fsdp method=dpo"
    base += " method.args.gradient_accumulation_steps=1"
    precompute = "method.args.precompute_ref_log_probs=true"
    stays, before = planned(base), planned(base, precompute)
    assert before.moment == "measuring the reference"
    assert before.parts_gb["reference in parameters"] == pytest.approx(2 * 32.762, abs=0.01)
    assert (2 * 2 + 4 / 8) * 32.762 < before.allocated_gb < stays.allocated_gb
    drawn = planned(base, precompute, "model.init=random")
    assert drawn.parts_gb["weights"] == pytest.approx(4 * 32.762, abs=0.01)


def test_attention_without_a_fused_kernel_stores_scores():
    base = "model=qwen3_0_6b method=sft topology=single precision=bf16 method.args.max_length=4096"
    fused, unfused = planned("hardware=mi300x", base), planned("hardware=mi100", base)
    # scores and their gradients, 4 rows x 16 heads
    assert unfused.total_gb - fused.total_gb > 3 * 4 * 4 * 16 * 4096**2 / 1e9 - 2
    eager = planned("hardware=mi300x", base, "hardware.attention=eager")
    assert eager.total_gb == pytest.approx(unfused.total_gb)


def test_generation_by_transformers_is_counted():
    """Keys and values have 2 x 36 layers x 1024 x 2 bytes per token, for 512 + 256 tokens."""
    four = "method=evaluate method.args.samples_per_prompt=4 method.args.temperature=1"
    parts = parts_of("hardware=mi300x model=qwen3_4b", four)
    assert parts["keys and values"] == pytest.approx(2 * 36 * 1024 * 2 * 64 * 4 * 768 / 1e9)
    lora = "hardware=mi300x model=qwen3_4b method=grpo adapter=lora topology=zero3"
    many = planned(lora, "method.args.steps_per_generation=64")
    assert many.moment == "generation"
    # TRL gathers the weights
    assert many.parts_gb["communication"] == pytest.approx(2 * QWEN_4B / 1e9)
    assert many.parts_gb["keys and values"] == pytest.approx(2 * 36 * 1024 * 2 * 8 * 64 * 768 / 1e9)


@pytest.mark.parametrize(("engine", "by_design"), [("transformers", False), ("vllm", True)])
def test_only_vllm_fills_its_gpu_by_design(engine, by_design):
    overrides = f"hardware=mi300x model=qwen3_4b method=evaluate method.args.engine={engine}"
    assert margin.fills_capacity(planned(overrides)) == by_design


def test_sleeping_vllm_frees_memory_for_training():
    base = "hardware=mi300x model=qwen3_4b method=grpo topology=colocate"
    awake, asleep = planned(base), planned(base, "method.args.vllm_enable_sleep_mode=true")
    assert awake.parts_gb["vllm"] == pytest.approx(0.3 * 192 * 1.073741824)
    alone = planned(base.replace("colocate", "single"))
    assert awake.total_gb - alone.total_gb == pytest.approx(awake.parts_gb["vllm"])
    assert asleep.total_gb < awake.total_gb


def test_server_on_a_cpu_has_a_fixed_cache(monkeypatch):
    """VLLM_CPU_KVCACHE_SPACE=1 (GiB) is independent of the memory of the configured GPU."""
    monkeypatch.setattr(this_python, "has_vllm_of_cpu", lambda: True)
    smoke = "hardware=mi350x model=qwen3_4b smoke=true method=evaluate method.args.engine=vllm"
    (server,) = plan_of(smoke).memory
    assert server.parts_gb["kv cache"] == pytest.approx(2**30 / 1e9)
    assert server.total_gb < 2
    cpu = "hardware=cpu method=grpo topology=split hardware.vllm=true hardware.gpus_per_node=2"
    cpu += " topology.num_gpus=2 topology.server_cache_gb=3"
    (process,) = [process for process in plan_of(cpu).processes if process.kind == "server"]
    argument = process.argv.index("--kv-cache-memory-bytes") + 1
    assert process.argv[argument] == "3000000000"
    assert "VLLM_CPU_KVCACHE_SPACE" not in process.env  # it would override the argument


@pytest.mark.parametrize(("parallel", "heads"), [(2, 4), (16, 1)])
def test_server_cache_fits_the_longest_sequence(parallel, heads):
    """Two tensors x 36 layers x 128 x 2 bytes per head and token, 40,960 tokens."""
    split = (
        "hardware=rx7900xtx hardware.gpus_per_node=32 model=qwen3_8b method=grpo topology=split "
        "hardware.memory_gb=20 topology.num_gpus=18 effective_batch=272 "
        "method.args.per_device_train_batch_size=1 "
        f"topology.server_tensor_parallel={parallel} "
        f"topology.server_memory_share={0.9 / parallel:.3f}"
    )
    config = composed(*split.split())
    whole = make_plan(config, host_with(32), RUN).memory[0]
    assert whole.parts_gb["kv cache"] == pytest.approx(2 * 36 * 128 * 2 * heads * 40960 / 1e9)
    assert not whole.fits
    short = composed(*split.split(), "topology.server_max_length=2048")
    cache = make_plan(short, host_with(32), RUN).memory[0].parts_gb["kv cache"]
    assert cache < whole.parts_gb["kv cache"]


@pytest.mark.parametrize(("cache_gb", "fits"), [(40, True), (400, False)])
def test_server_cache_overrides_the_share(cache_gb, fits):
    split = "hardware=mi300x model=qwen3_4b method=grpo topology.server_memory_share=0.1"
    server = plan_of(split, f"topology.server_cache_gb={cache_gb}").memory[0]
    assert (server.parts_gb["kv cache"], server.fits) == (cache_gb, fits)


def test_trainer_gets_the_memory_that_the_server_leaves():
    base = "hardware=h200 model=qwen3_0_6b method=grpo topology=split"
    base += " topology.overlap=false topology.server_memory_share=0.25"
    shared = plan_of(base, "topology.num_gpus=1", gfx="sm_90")
    server, trainer = shared.memory
    assert [process.gpus for process in shared.processes] == [[0], [0]]
    whole = server.capacity_gb / 0.25
    assert trainer.capacity_gb == pytest.approx(whole - server.total_gb)
    apart = plan_of(base, "topology.num_gpus=2", gfx="sm_90").memory[1]
    assert apart.capacity_gb == pytest.approx(whole)
    assert apart.parts_gb == trainer.parts_gb
    full = plan_of(base, "topology.num_gpus=1 topology.server_cache_gb=1000", gfx="sm_90")
    assert full.memory[1].capacity_gb == 0.0


def test_evaluation_is_the_peak_if_its_batches_are_larger():
    base = "hardware=mi300x model=qwen3_0_6b topology=single method=sft"
    evaluates = f"{base} method.selection.metric=eval_loss"
    equal = planned(evaluates)
    assert equal.total_gb == planned(base).total_gb
    larger = planned(evaluates, "method.args.per_device_eval_batch_size=512")
    assert larger.moment == "evaluation"
    # only the tensors of one layer, for 512 x 1024 tokens, without gradients
    assert equal.total_gb < larger.total_gb < equal.total_gb * 128


GRPO_ON_2 = """
hardware=h200 method=grpo model=qwen3_4b topology=ddp method.args.gradient_checkpointing=true
method.args.per_device_train_batch_size=8 method.args.steps_per_generation=16
method.args.max_completion_length=2048
"""
SELECTING = (
    "hardware=h200 method=sft model=qwen3_0_6b topology=ddp method.selection.metric=eval_loss"
)


@pytest.mark.parametrize(("overrides", "moment"), [
    (GRPO_ON_2, "generation"), (SELECTING, "evaluation"),
])  # fmt: skip
def test_ddp_keeps_its_gradients_between_steps(overrides, moment):
    config, _ = prepare(composed(*overrides.split()))
    trained = 4.0 * config.model.num_parameters
    assert rank_memory.moments(config)[moment]["gradients"] == pytest.approx(trained)
