"""Compile the recipes' Triton kernels for all AMD GPUs with hardware.triton, without a GPU.

Also compare recipes.tune.occupancy with real code. If a kernel no longer compiles without spills,
the GPU's file in conf/hardware must say so, and a rule must read it. Needs `make kernels`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from recipes.tune import occupancy, occupancy_rows
from recipes.tune.amdgpu import ARCHITECTURES, sgpr_waves, vgpr_waves
from recipes.tune.occupancy_rows import Row

MISSING = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} (make kernels)"),
]

MATMUL = Path(__file__).parents[2] / "data/matmul.py"
MATMUL_ARGS = "args=a_ptr=*bf16,b_ptr=*bf16,c_ptr=*bf16,m=i32:16,n=i32:16,k=i32:16"
MODELS = sorted(occupancy.MODELS.glob("*.yaml"))


@cache
def recipe_launches():
    """Return the launches of a step with TRL's head and use_liger_kernel=true.

    They include all models in bf16, with few and many tokens, and one model in fp16 and fp32.
    """
    from recipes.tune.kernels import library_launches

    shapes = [(model, tokens, "bf16") for model in MODELS for tokens in (512, 4096)]
    shapes += [(occupancy.MODELS / "qwen3_8b.yaml", 4096, dtype) for dtype in ("fp16", "fp32")]
    found = [
        (shape, one)
        for shape in shapes
        for name in occupancy.RECIPE_KERNELS
        for one in library_launches(name, *shape)
    ]
    return list(
        {
            one.identity: (f"{shape[0].stem} {shape[1]} tokens {shape[2]}", one)
            for shape, one in found
        }.values()
    )


@cache
def compiled(arch: str):
    """Return (purpose, launch, compiled kernel, row) of each recipe kernel."""
    from recipes.tune.compile import compile_all

    launches = recipe_launches()
    results = compile_all([(one, arch) for _, one in launches], os.cpu_count() or 1, timeout_s=300)
    return [
        (*launches[index], found, occupancy_rows.row_of(launches[index][1], arch, found))
        for index, found in results
    ]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    bad = [
        f"{what}: {launch.name}: {row.error or row.code.resources}"
        for what, launch, _, row in compiled(arch)
        if not row.code or row.code.resources.spills
    ]
    assert bad == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_occupancy_equals_llvms(arch: str) -> None:
    """Compare with the figure in LLVM's assembly, which considers only registers."""
    limits = ARCHITECTURES[arch]
    for _, launch, found, row in compiled(arch):
        needs = row.code.resources
        expected = int(re.search(r"^; Occupancy: (\d+)$", found.isa, re.MULTILINE)[1])
        assert min(vgpr_waves(limits, needs.vgprs), sgpr_waves(limits, needs.sgprs)) == expected, (
            launch.name
        )
        assert needs.wave_size == limits.wave_size
        assert re.findall(r"\.amdhsa_workgroup_processor_mode (\d)", found.isa) == (
            ["1"] if limits.wave_size == 32 else []
        )


# ---- Kernels that torch.compile generates for a decoder layer

# One model of each architecture, with fp32 weights and bf16 autocast (the default) or bf16 weights.
LAYERS = (("qwen3_4b", "amp"), ("qwen2_5_7b", "bf16"), ("llama3_1_8b", "bf16"))
# One GPU of each wave width, and gfx908, for which compilation is disabled. docs/kernels.md has the
# others, from `python -m recipes.tune.occupancy kernel=inductor:layer`.
LAYER_ARCHITECTURES = ("gfx908", "gfx942", "gfx1100")
# For gfx908, compile only the layer because of which compilation is disabled. Without AOTriton's
# attention, a layer has 1.5 times as many kernels.
LAYERS_OF = {arch: LAYERS[1:2] if arch == "gfx908" else LAYERS for arch in LAYER_ARCHITECTURES}


@cache
def generated():
    """Return architecture -> all configurations of all kernels of these layers.

    They include the attention of packed rows if the architecture has one.
    """
    from recipes.tune import layer_kernels

    def layers(arch: str) -> list[layer_kernels.Layer]:
        attention = layer_kernels.attentions_of(arch)
        return [
            layer_kernels.Layer(
                occupancy.MODELS / f"{model}.yaml",
                attention[-1 - number % len(attention)],
                4096,
                dtype,
            )
            for number, (model, dtype) in enumerate(LAYERS_OF[arch])
        ]

    return layer_kernels.generate_all(
        {arch: layers(arch) for arch in LAYER_ARCHITECTURES}, os.cpu_count() or 1
    )


@cache
def compiled_layers(arch: str) -> dict[str, list[Row]]:
    """Return kernel -> rows of its configurations."""
    from recipes.tune.compile import compile_all
    from recipes.tune.kernels import generated_launches

    ones = generated()[arch]
    launches = generated_launches(ones)
    distinct = {launch.identity: launch for launch in launches}
    results = compile_all(
        [(launch, arch) for launch in distinct.values()], os.cpu_count() or 1, timeout_s=300
    )
    keys = list(distinct)
    rows = {
        keys[index]: occupancy_rows.row_of(distinct[keys[index]], arch, found)
        for index, found in results
    }
    kernels: dict[str, list[Row]] = {}
    for one, launch in zip(ones, launches, strict=True):
        kernels.setdefault(f"{one.layer.model.stem} {one.layer.dtype} {launch.name}", []).append(
            rows[launch.identity]
        )
    return kernels


@pytest.mark.parametrize("arch", LAYER_ARCHITECTURES)
def test_layer_kernels_have_configuration_without_spills(arch: str) -> None:
    """Compare with `compile` in the hardware files, which is false if a kernel always spills."""
    from recipes.tune import layer_kernels

    kernels = compiled_layers(arch)
    errors = [row.error for rows in kernels.values() for row in rows if row.error]
    assert errors == [], "all configurations compile"
    unfit = [
        name
        for name, rows in kernels.items()
        if not any(row.code and not row.code.resources.spills for row in rows)
    ]
    gpus = [
        gpu
        for gpu in map(layer_kernels.read_hardware, layer_kernels.HARDWARE.glob("*.yaml"))
        if gpu.get("gfx") == arch
    ]
    assert gpus
    assert all(gpu.get("compile", True) == (unfit == []) for gpu in gpus), unfit


@pytest.mark.parametrize("arch", LAYER_ARCHITECTURES)
def test_kernels_are_generated_for_target(arch: str) -> None:
    ones, wave = generated()[arch], ARCHITECTURES[arch].wave_size
    for part in ("type='hip', index=0", f"cc='{arch}'", f"warp_size={wave}"):
        assert all(part in one.source for one in ones)
    for layer in {one.layer for one in ones}:
        labels = {one.label for one in ones if one.layer == layer}
        assert {label.split()[0] for label in labels} == {"forward", "backward"}
        assert len(labels) >= 12


# ---- Compiled kernels and launched kernels


@pytest.fixture
def undo_liger() -> Iterator[None]:
    """Restore the classes and functions of transformers that Liger replaces."""
    import torch
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    modules = (modeling_llama, modeling_qwen2, modeling_qwen3)
    classes = [
        found for module in modules for found in vars(module).values() if isinstance(found, type)
    ]
    before = [(owner, dict(vars(owner))) for owner in (*modules, *classes, torch.nn.functional)]
    yield
    for owner, names in before:
        for name, value in names.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


@pytest.mark.usefixtures("undo_liger")
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama"])
def test_model_launches_only_these_kernels(kind: str, tmp_path: Path) -> None:
    """Run a step with Liger's kernels, but record launches instead of running them."""
    import torch
    import transformers
    from transformers.integrations.liger import apply_liger_kernel

    from recipes.tune import kernels

    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        **shape, **heads, num_hidden_layers=1, max_position_embeddings=64
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    apply_liger_kernel(model, {"fused_linear_cross_entropy": False})
    with kernels.recording() as launched:
        model(input_ids=torch.zeros(1, 32, dtype=torch.int64)).logits.sum().backward()
    file = tmp_path / "model.yaml"
    file.write_text(
        json.dumps({**shape, "num_heads": 4, "num_kv_heads": 2, "architecture": config.model_type})
    )
    of_liger = [name for name in occupancy.RECIPE_KERNELS if name.startswith("liger:")]
    ours = {
        one.identity
        for name in of_liger
        for one in kernels.library_launches(name, file, 32, "bf16")
    }
    assert {one.identity for one in launched} == ours
    assert len(ours) == (8 if kind == "Qwen3" else 6)  # Qwen3 also normalizes heads


def test_trainers_launch_only_these_kernels(tmp_path: Path) -> None:
    """Run a step of each of TRL's trainers, but record launches instead of running them."""
    import trl
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from recipes.bench.vllm_engine import word_tokenizer
    from recipes.tune import kernels

    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"output_dir": str(tmp_path), "max_steps": 1, "per_device_train_batch_size": 2}
    settings |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    row = {"prompt": "w2 w3", "completion": " w4", "chosen": " w4 w2", "rejected": " w3"}
    columns = {"SFT": ["prompt", "completion"], "DPO": ["prompt", "chosen", "rejected"]}

    def model() -> Qwen3ForCausalLM:
        config = Qwen3Config(**shape, **heads, num_hidden_layers=1, eos_token_id=0)
        return Qwen3ForCausalLM(config)

    def reward(completions, **_) -> list[float]:
        return [float(number) for number in range(len(completions))]

    def step(method: str, **more) -> None:
        rows = Dataset.from_list([row] * 2).select_columns(columns.get(method, "prompt"))
        config = getattr(trl, f"{method}Config")(**settings, **more)
        own = {"DPO": {"ref_model": model()}, "GRPO": {"reward_funcs": [reward]}}.get(method, {})
        getattr(trl, f"{method}Trainer")(
            model(), args=config, train_dataset=rows, processing_class=word_tokenizer(64), **own
        ).train()

    generation = {"num_generations": 2, "max_completion_length": 4}
    with kernels.head_uses_triton(), kernels.recording() as launched:
        for method, more in (("SFT", {}), ("DPO", {}), ("GRPO", generation)):
            before = len(launched)
            step(method, **more)
            assert {one.name for one in launched[before:]} == {"forward_kernel", "backward_kernel"}
        step("DPO", use_weighting=True)
        step("GRPO", **generation, entropy_coef=0.01)
    file = tmp_path / "model.yaml"
    file.write_text(json.dumps(shape))
    assert {one.identity for one in launched} == {
        one.identity for one in kernels.library_launches("trl:lm_head", file, 32, "fp32")
    }


def test_specialize_arguments_like_triton() -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from recipes.tune import file_kernels, kernels

    kernel = file_kernels.load_kernels(MATMUL)["matmul"]
    backend = make_backend(GPUTarget("hip", "gfx942", 64))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    large = torch.empty(2**30 + 1, dtype=torch.bfloat16, device="meta")  # 2 bytes more than 2 GB
    small = torch.empty(16, dtype=torch.float32, device="meta")
    for values in (
        (small, large, None, 16, 17, 1),
        (small, small, small, 2**31, 2**31 + 16, True),
        (large, small, small, -1, 0, 2.5),
    ):
        bound, found, _ = bind(*values)
        _, signature, constants, attributes = kernel._pack_args(backend, {}, bound, found, None)
        ours = kernels.specialize(kernel, dict(zip(kernel.arg_names, values, strict=False)), {})
        assert ours.signature == signature
        assert {
            (kernel.arg_names.index(name),): value for name, value in ours.constants.items()
        } == constants
        assert ours.attributes == {
            position: given for position, given in attributes.items() if given
        }


# ---- The program


def rows(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[dict]:
    assert occupancy.main([*arguments, "format=json"]) == code
    return json.loads(capsys.readouterr().out)["rows"]


def test_sweep_of_custom_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (
        "arch=gfx942,gfx1100 num_warps=4,8,32 num_stages=2 matrix_instr_nonkdim=16,32 grid=32x16"
    )
    argv = [f"kernel={MATMUL}:matmul", MATMUL_ARGS, f"save={tmp_path}", *words.split()]
    found = rows(capsys, *argv)
    assert len(found) == 2 * 6
    cdna, rdna = found[:6], found[6:]
    assert {one["arch"] for one in cdna} == {"gfx942"}
    # 32 warps of 64 lanes are too many, of 32 they are not. What fails stands last.
    too_many = (
        "num_warps=32: 2048 threads per workgroup, but the maximum is 1024. Use num_warps=16."
    )
    assert [one["error"] for one in cdna] == [None] * 4 + [too_many] * 2
    assert [one["error"] for one in rdna] == [None] * 6
    waves = [one["code"]["occupancy"]["waves"] for one in cdna[:4]]
    assert waves == sorted(waves, reverse=True)
    for one in cdna[:4]:
        needs, counts = one["code"]["resources"], one["code"]["instructions"]
        size = one["options"]["matrix_instr_nonkdim"]
        assert needs["threads"] == 64 * one["options"]["num_warps"]
        # One of two stages is in LDS: two blocks of 128 x 64 values of 2 bytes.
        assert needs["lds_bytes"] == 2 * (128 * 64) * 2
        assert set(counts["global_loads"]) == {"b128"}
        assert all(f"v_mfma_f32_{size}x{size}x" in name for name in counts["matrix"])
        assert one["small_grid"]  # 512
    for one in rdna:
        assert all(name.startswith("v_wmma_") for name in one["code"]["instructions"]["matrix"])
        # With 4 warps on gfx1100, 128 x 128 fp32 results fill all 256 registers of a lane.
        spills = bool(one["code"]["resources"]["vgpr_spills"])
        assert spills == (one["options"]["num_warps"] == 4)
    assert [one["options"]["num_warps"] for one in rdna[-2:]] == [4, 4]
    assert len(list(tmp_path.iterdir())) == 2 * 10
    name = "matmul-gfx942-matrix_instr_nonkdim16-num_stages2-num_warps4"
    assert "v_mfma_f32_16x16x16" in (tmp_path / f"{name}.s").read_text()
    assert "#ttg." in (tmp_path / f"{name}.ttgir").read_text()
