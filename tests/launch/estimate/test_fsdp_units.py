"""Compare the planned buffers of FSDP2 with those of torch and accelerate.

The tests use one process with a fake process group. Units, hooks and prefetching are real.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from launch.estimate import rank_memory, rank_state
from launch.inputs import model_config
from launch.schema import shapes
from tests.conftest import composed

RANKS = 2
SHAPE = {
    "num_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "vocab_size": 640,
}  # fmt: skip
SHAPE_NAMES = {key: model_config.NAMES[key][0] for key in SHAPE}


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def prepared(tied: bool, reshards: bool, dtype: torch.dtype) -> torch.nn.Module:
    """Return a model that is sharded as in a training with bf16 products."""
    config = AutoConfig.for_model(
        "qwen3",
        **{SHAPE_NAMES.get(name, name): size for name, size in SHAPE.items()},
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    add_fused_lm_head(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshards,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
        torch_device_mesh={("shard",): init_device_mesh("cpu", (RANKS,))},
        mixed_precision="bf16",
        is_main_process=False,  # prints nothing
    )
    return fsdp2_prepare_model(accelerator, model)


def outside_layers(tied: bool, reshards: bool) -> dict[str, int]:
    """Return, by moment, the elements of embedding and head that are or are being gathered."""
    model = prepared(tied, reshards, torch.float32)
    units = {
        name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    groups = {
        id(g): g
        for name, m in units.items()
        if ".layers." not in name and (g := m._get_fsdp_state()._fsdp_param_group)
    }
    elements: dict[str, int] = {}

    def count(moment: str) -> None:
        gathered = [
            g for g in groups.values() if g.is_unsharded or g._all_gather_result is not None
        ]
        elements[moment] = sum(p._orig_size.numel() for g in gathered for p in g.fsdp_params)

    layers = model.model.layers
    for moment, layer in (
        ("backward of the last layer", layers[-1]),
        ("backward of the first layer", layers[0]),
    ):
        layer.mlp.register_full_backward_hook(lambda *_, moment=moment: count(moment))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = -model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs.sum()
    count("forward")
    loss.register_hook(lambda _: count("backward of the head"))
    loss.backward()
    return elements


@pytest.mark.parametrize(("tied", "reshards"), [(True, True), (False, True), (False, False)])
def test_embedding_and_head_are_counted_while_they_are_gathered(tied, reshards):
    overrides = [f"model.{name}={size}" for name, size in SHAPE.items()]
    overrides += [
        f"model.tied_embeddings={tied}",
        f"topology.fsdp.reshard_after_forward={reshards}",
        f"topology.num_gpus={RANKS}",
    ]
    config = copy.deepcopy(
        composed(
            *"hardware=h200 model=qwen3_0_6b method=sft precision=bf16 topology=fsdp".split(),
            *overrides,
        )
    )
    config.model.num_parameters = shapes.parameters(config.model)
    layers = (2 if reshards else SHAPE["num_layers"]) * shapes.layer_parameters(config.model)
    moments = rank_memory.moments(config)
    for moment, elements in outside_layers(tied, reshards).items():
        assert moments[moment]["communication"] / 2 - layers == pytest.approx(
            elements, abs=2 * SHAPE["hidden_size"]
        ), moment


def test_trained_weights_become_fp32():
    assert {parameter.dtype for parameter in prepared(True, True, torch.bfloat16).parameters()} == {
        torch.float32
    }
    base = ("hardware=mi300x", "model=qwen3_4b", "method=sft", "precision=bf16", "topology=fsdp")
    full, low = (
        rank_state.state(composed(*base, f"precision.weights={dtype}"))
        for dtype in ("fp32", "bf16")
    )
    assert low == full
    lora, lora_low = (
        rank_state.state(composed(*base, "adapter=lora", f"precision.weights={dtype}"))
        for dtype in ("fp32", "bf16")
    )
    assert lora_low["weights"] == lora["weights"] / 2
    assert lora_low["optimizer"] == lora["optimizer"]
