"""Identify an adapter's base, load an adapter for further training, and merge it into the base.

A LoRA layer computes W x + s B A x with s = alpha/rank (rsLoRA: alpha/sqrt(rank)); DoRA then scales
each row of W + s B A to a learned length (arXiv:2402.09353). Merging computes the new weights in
fp32 and rounds once. PEFT would merge into the base in place. In 16 bits, merging and unmerging at
every weight transfer would change the frozen base, and 4-bit weights would be quantized again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from launch.core.errors import UserError
from launch.core.json_files import write_json
from recipes.models.low_precision import dequantize
from recipes.rank.program import is_main_rank, say

# File with the fingerprint of an adapter's base, in the run directory and next to the adapter
BASE = "base.json"
# Names of an adapter's A, B and DoRA magnitude
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
PREFIX = "base_model.model."  # PEFT's prefix of base weight names
Tensors = dict[str, Tensor]
Gather = Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[Any]]


def fingerprint(rows: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of the names and first rows of weights. Rows are hashed in bf16."""
    digest = hashlib.sha256()
    for name, row in sorted(rows, key=lambda item: item[0]):
        digest.update(f"{name} {tuple(row.shape)} ".encode())
        digest.update(
            row.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def fingerprint_of(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model in memory that is neither sharded nor quantized."""
    return fingerprint(
        (name, weight[:1]) for name, weight in model.state_dict().items() if ".layers." in name
    )


def fingerprint_of_files(directory: Path) -> str:
    """Return the fingerprint of a model directory, reading only the first rows of weights."""
    rows = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            rows += [(name, file.get_slice(name)[:1]) for name in file.keys() if ".layers." in name]  # noqa: SIM118 (no iterator)
    return fingerprint(rows)


def record_base(run_dir: Path, base: str) -> None:
    """Write the base's fingerprint to BASE. Raises UserError if a resumed run has another base."""
    file = run_dir / BASE
    if file.is_file() and json.loads(file.read_text())["fingerprint"] != base:
        raise UserError(
            f"resume={run_dir}: the run was trained on other base weights, and its checkpoints "
            "contain only the adapter. Use: resume=never."
        )
    if is_main_rank():
        write_json(file, {"fingerprint": base})


def load_adapter(model: PreTrainedModel, config: DictConfig, base: str) -> PeftModel:
    """Return the model with the trainable adapter of `config.adapter.path`.

    Raises UserError if the adapter was trained on other layers, or if the fingerprint of its base
    is not `base`.
    """
    path, base_name = Path(config.adapter.path), config.model.path or config.model.name
    adapter = LoraConfig.from_pretrained(str(path))
    adapter.lora_dropout = config.adapter.dropout  # dropout belongs to the run, not to the adapter
    if not (path / BASE).is_file():
        say(f"adapter.path={path} has no {BASE}, so only its layers and shapes are checked")
    elif json.loads((path / BASE).read_text())["fingerprint"] != base:
        raise UserError(
            f"adapter.path={path} was trained on another base than model={base_name}. Set model to "
            "the base of the adapter."
        )
    # Like TRL for new adapters: ZeRO-3 gathers weights together, so they need one dtype.
    autocast = config.topology.strategy != "zero3"
    adapted = PeftModel.from_pretrained(
        model, str(path), is_trainable=True, autocast_adapter_dtype=autocast, config=adapter
    )
    # PEFT only warns about missing and additional layers.
    with safe_open(path / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
        state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        mismatches = set(file.keys()) ^ set(state)
    if mismatches:
        raise UserError(
            f"adapter.path={path} was trained on other layers than model={base_name} has: "
            f"{min(mismatches)}. Set model to the base of the adapter."
        )
    return adapted


def merge_weight(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None
) -> Tensor:
    """Return the merged weight in fp32, (out, in).

    weight: (out, in), a: (rank, in), b: (out, rank), DoRA's magnitude: (out,).
    """
    merged = weight.float() + scaling * (b.float() @ a.float())
    if magnitude is None:
        return merged
    return merged * (magnitude.float() / merged.norm(dim=1)).unsqueeze(1)


def scaling_of(adapter: LoraConfig) -> float:
    return float(adapter.lora_alpha / (math.sqrt(adapter.r) if adapter.use_rslora else adapter.r))


def _merged_weights(
    model: PeftModel, state: Mapping[str, Tensor], gather: Gather
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield (name, base weight, merged weight) for each weight of the base.

    Base weights are dequantized. Merged weights are in fp32, or None for a layer without adapter.
    `gather` gathers ZeRO-3's shards, so every rank must iterate.
    """
    scaling = scaling_of(model.peft_config["default"])
    for name, weight in state.items():
        if ".lora_" in name:
            continue
        # Layers without an adapter may also be in 4 bits.
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        layer = name.removesuffix(".base_layer.weight")
        parts = [f"{layer}.{part}.default.weight" for part in PARTS] if layer != name else []
        adapters = [state[part] for part in parts if part in state]
        with gather([weight, *adapters]):
            base = dequantize(_full_tensor(weight))
            if not adapters:
                yield plain, base, None
                continue
            a, b, *magnitude = map(_full_tensor, adapters)
            yield plain, base, merge_weight(base, a, b, scaling, *magnitude)


def check_mergeable(model: nn.Module) -> None:
    """Raise UserError if an adapter is on a layer that is not linear, which merge() cannot add.

    all-linear includes GPT-2's convolutions, and the weights of experts in one tensor.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or isinstance(layer.get_base_layer(), nn.Linear):
            continue
        raise UserError(
            f"adapter.target_modules: {name.removeprefix(PREFIX)} is of the class "
            f"{type(layer.get_base_layer()).__name__} and not linear, so its adapter cannot be "
            "merged. Use: adapter.target_modules=[q_proj,k_proj,v_proj,o_proj], or adapter=none."
        )


def merge(model: PeftModel, state: Tensors | None) -> tuple[PreTrainedModel, float]:
    """Return the merged model on the CPU, and the share of the learned change that rounding loses.

    The model has the dtype of the base (nf4: before quantization). If ranks have shards, `state` is
    the gathered state. The share is |rounded - exact| / |exact - base| over all merged weights.
    """
    if state is None:
        state = dict(model.named_parameters())
    merged, lost, learned = {}, 0.0, 0.0
    for name, base, exact in _merged_weights(model, state, lambda _: contextlib.nullcontext()):
        rounded = base
        if exact is not None:
            rounded = exact.to(base.dtype)
            lost += (rounded.float() - exact).square().sum().item()
            learned += (exact - base.float()).square().sum().item()
        merged[name] = rounded.detach().cpu()
    config = copy.deepcopy(model.get_base_model().config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Otherwise ZeRO-3 would shard the new model, and wait for ranks that do not build it.
    unset_hf_deepspeed_config()
    with torch.device("meta"):
        merged_model = AutoModelForCausalLM.from_config(
            config, dtype=next(iter(merged.values())).dtype
        )
    buffers = {name.removeprefix(PREFIX): buffer for name, buffer in model.named_buffers()}
    merged |= {
        n: buffers[n].cpu() for n in merged_model.state_dict() if n in buffers.keys() - merged
    }
    missing = set(merged_model.load_state_dict(merged, strict=False, assign=True).missing_keys)
    merged_model.tie_weights()
    if missing - {"lm_head.weight"}:
        raise RuntimeError(f"weights are missing after merging: {sorted(missing)[:3]}")
    merged_model.generation_config = model.get_base_model().generation_config
    error = math.sqrt(lost / learned) if learned else 0.0
    dtype = str(merged_model.dtype).removeprefix("torch.")
    say(f"adapter merged in {dtype}: rounding loses {error:.1%} of the learned change")
    return merged_model, error


def merged_params(model: PeftModel, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, merged weight) for each weight of the base, which stays unchanged.

    Every rank must iterate, as for _merged_weights.
    """
    for name, base, exact in _merged_weights(model, dict(model.named_parameters()), gather):
        yield name, base if exact is None else exact.to(base.dtype)


def _full_tensor(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
