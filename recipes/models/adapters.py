"""Identify an adapter's base, load an adapter for further training, and merge it into the base.

A LoRA layer computes W x + s B A x with s = alpha/rank (rsLoRA: alpha/sqrt(rank)); DoRA then scales
each row of W + s B A to a learned length (arXiv:2402.09353). Merging computes that in fp32 and
rounds once. PEFT's own merge changes the base in place: in 16 bits, merging and unmerging at every
weight transfer changes the frozen base, and 4-bit weights would be quantized again.
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
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from launch.core.errors import UserError
from launch.core.json_files import write_json
from recipes.models.low_precision import dequantized
from recipes.rank.program import is_main_rank, say

# The file with the fingerprint of an adapter's base, in the run directory and next to the adapter
BASE = "base.json"
# Names of an adapter's A, B and DoRA magnitude
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
PREFIX = "base_model.model."  # PEFT's prefix of the names of the base's weights
Tensors = dict[str, Tensor]
Gather = Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[Any]]


def fingerprint(rows: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of the first rows of the layers' weights in bf16, whatever their dtype."""
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
    """Return the fingerprint of a model directory, without reading whole files."""
    rows = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            rows += [(name, file.get_slice(name)[:1]) for name in file.keys() if ".layers." in name]  # noqa: SIM118 (no iterator)
    return fingerprint(rows)


def note_base(run_dir: Path, base: str) -> None:
    """Write an adapter run's BASE. Raises UserError if the run resumes on a different base."""
    file = run_dir / BASE
    if file.is_file() and json.loads(file.read_text())["fingerprint"] != base:
        raise UserError(
            f"{run_dir} was trained on other base weights, and its checkpoints hold the adapter "
            "only. Use: resume=never."
        )
    if is_main_rank():
        write_json(file, {"fingerprint": base})


def load_adapter(model: PreTrainedModel, config: DictConfig, base: str) -> PeftModel:
    """Return the model with the adapter of `config.adapter.path`, trainable.

    Raises UserError if the adapter was trained on a base whose fingerprint is not `base`, or on
    other layers.
    """
    path, base_name = Path(config.adapter.path), config.model.path or config.model.name
    adapter = LoraConfig.from_pretrained(str(path))
    adapter.lora_dropout = config.adapter.dropout  # dropout belongs to the run, not to the adapter
    if not (path / BASE).is_file():
        say(f"adapter.path={path} has no {BASE}, so only layers and shapes can be compared")
    elif json.loads((path / BASE).read_text())["fingerprint"] != base:
        raise UserError(
            f"adapter.path={path} was trained on another base than model={base_name}. Use the base "
            "that it was trained on."
        )
    # As TRL does for new adapters under ZeRO-3, which gathers weights of one dtype together.
    autocast = config.topology.strategy != "zero3"
    adapted = PeftModel.from_pretrained(
        model, str(path), is_trainable=True, autocast_adapter_dtype=autocast, config=adapter
    )
    # PEFT only warns about layers that the adapter lacks or has in addition.
    with safe_open(path / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
        other = set(file.keys()) ^ set(
            get_peft_model_state_dict(adapted, save_embedding_layers=False)
        )
    if other:
        raise UserError(
            f"adapter.path={path} was trained on other layers than those of model={base_name}: "
            f"{min(other)}. Use the base that it was trained on."
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


def _merged(
    model: PeftModel, state: Mapping[str, Tensor], gather: Gather
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield name, base and merged weight of each base weight; None in place of an unchanged one.

    The base is without quantization, the merged weight in fp32. `gather` gathers parameters that
    ZeRO-3 shards, so every rank must iterate.
    """
    scaling = scaling_of(model.peft_config["default"])
    for name, weight in state.items():
        if ".lora_" in name:
            continue
        # Layers that adapter.target_modules leaves out may also be in 4 bits.
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        layer = name.removesuffix(".base_layer.weight")
        parts = [f"{layer}.{part}.default.weight" for part in PARTS] if layer != name else []
        adapters = [state[part] for part in parts if part in state]
        with gather([weight, *adapters]):
            base = dequantized(_whole(weight))
            if not adapters:
                yield plain, base, None
                continue
            a, b, *magnitude = map(_whole, adapters)
            yield plain, base, merge_weight(base, a, b, scaling, *magnitude)


def merge(model: PeftModel, state: Tensors | None) -> tuple[PreTrainedModel, float]:
    """Return the base on the CPU with the adapter merged, in the base's dtype, and the rounding.

    For nf4 the dtype is the one before quantization. If ranks hold parts, `state` is the gathered
    state. The second value is |rounded - exact| / |exact - base| over all merged weights: the share
    of the learnt change that rounding to the dtype loses.
    """
    if state is None:
        state = dict(model.named_parameters())
    other = next((name for name in state if ".lora_embedding_" in name), None)
    if other:
        raise UserError(
            f"adapter.target_modules={model.peft_config['default'].target_modules}: {other} is "
            "not a linear layer. Use: all-linear."
        )
    merged, lost, learnt = {}, 0.0, 0.0
    for name, base, exact in _merged(model, state, lambda _: contextlib.nullcontext()):
        rounded = base
        if exact is not None:
            rounded = exact.to(base.dtype)
            lost += (rounded.float() - exact).square().sum().item()
            learnt += (exact - base.float()).square().sum().item()
        merged[name] = rounded.detach().cpu()
    config = copy.deepcopy(model.get_base_model().config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Otherwise ZeRO-3 would shard the new model, and wait for ranks that do not build it
    unset_hf_deepspeed_config()
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=next(iter(merged.values())).dtype)
    missing = set(whole.load_state_dict(merged, strict=False, assign=True).missing_keys)
    whole.tie_weights()
    if missing - {"lm_head.weight"}:
        raise RuntimeError(f"weights are missing after merging: {sorted(missing)[:3]}")
    whole.generation_config = model.get_base_model().generation_config
    error, dtype = math.sqrt(lost / learnt) if learnt else 0.0, str(whole.dtype)
    say(
        f"merged in {dtype.removeprefix('torch.')}: rounding is {error:.1%} of what the adapter "
        "changes"
    )
    return whole, error


def merged_params(model: PeftModel, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Yield name and merged weight of each base weight, without changing the base.

    Every rank must iterate, as for _merged.
    """
    for name, base, exact in _merged(model, dict(model.named_parameters()), gather):
        yield name, base if exact is None else exact.to(base.dtype)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
