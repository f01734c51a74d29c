"""Adapters: which base one belongs to, loading one to train it on, and adding it to the base's weights.

A LoRA layer computes W x + s B A x with s = alpha/rank (rsLoRA: alpha/sqrt(rank)); DoRA then scales each row of W + s B A to a learnt
length (arXiv:2402.09353). Merging computes that in fp32 and rounds once. PEFT's own merge changes the base in place: in 16 bits, merging
and unmerging at every weight transfer moves the frozen base, and 4-bit weights would be quantized anew.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from recipes.common.errors import UserError
from recipes.common.files import write_json
from recipes.common.low_precision import dequantized
from recipes.common.program import is_main_rank, say

BASE = "base.json"  # in the run directory, and beside an adapter: the fingerprint of the base it was trained on
PREFIX = "base_model.model."  # PEFT's, before the names of the base
Tensors = dict[str, torch.Tensor]
Gather = Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[Any]]


def fingerprint(rows: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash of the first row of each of the layers' weights, in bf16: the same whatever precision they are loaded in."""
    found = hashlib.sha256()
    for name, row in sorted(rows, key=lambda item: item[0]):
        found.update(f"{name} {tuple(row.shape)} ".encode())
        found.update(row.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def fingerprint_of(model: PreTrainedModel) -> str:
    """Of a model in memory, whole and not quantized."""
    return fingerprint((name, weight[:1]) for name, weight in model.state_dict().items() if ".layers." in name)


def fingerprint_of_files(directory: Path) -> str:
    """The same from a model directory, of which little is read."""
    rows = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            rows += [(name, file.get_slice(name)[:1]) for name in file.keys() if ".layers." in name]  # noqa: SIM118 (no iterator)
    return fingerprint(rows)


def note_base(run_dir: Path, found: str) -> None:
    """Write BASE of an adapter's run. Raises UserError where it is resumed on another base: its checkpoints hold the adapter only."""
    file = run_dir / BASE
    if file.is_file() and json.loads(file.read_text())["fingerprint"] != found:
        raise UserError(f"{run_dir} was trained on other base weights, and its checkpoints hold the adapter only. Use: resume=never.")
    if is_main_rank():
        write_json(file, {"fingerprint": found})


def load_adapter(model: PreTrainedModel, config: DictConfig, found: str) -> PeftModel:
    """The adapter of `config.adapter.path` on `model`, to be trained on; `found` is the fingerprint of `model`.

    Raises UserError where it is another adapter than `config.adapter`, or belongs to another base.
    """
    path = Path(config.adapter.path)
    given = LoraConfig.from_pretrained(str(path))
    _check_same_adapter(given, config)
    given.lora_dropout = config.adapter.dropout  # of training, and no part of what was learnt
    if not (path / BASE).is_file():
        say(f"adapter.path={path} has no {BASE}: that its shapes fit is all that is known of its base")
    elif json.loads((path / BASE).read_text())["fingerprint"] != found:
        raise UserError(f"adapter.path={path} was trained on another base than {_base_name(config)}. Give the base that it was trained on.")
    # As TRL makes a new one under ZeRO-3, which gathers weights of one dtype together.
    autocast = config.topology.strategy != "zero3"
    try:
        return PeftModel.from_pretrained(model, str(path), is_trainable=True, autocast_adapter_dtype=autocast, config=given)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise UserError(f"adapter.path={path} does not fit {_base_name(config)}: {str(error).strip().splitlines()[1].strip()}") from error


def _check_same_adapter(given: LoraConfig, config: DictConfig) -> None:
    wanted = config.adapter
    pairs = [("rank", "r"), ("alpha", "lora_alpha"), ("rslora", "use_rslora"), ("dora", "use_dora")]
    for key, name in pairs:
        if getattr(given, name) != wanted[key]:
            raise UserError(f"adapter.{key}={wanted[key]}: that of adapter.path={wanted.path} has {key}={getattr(given, name)}. Give that.")


def _base_name(config: DictConfig) -> str:
    return f"model.path={config.model.path}" if config.model.path else f"model={config.model.name}"


def merge_weight(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, magnitude: torch.Tensor | None = None
) -> torch.Tensor:
    """In fp32, (out, in): `weight` (out, in) with its adapter `a` (rank, in) and `b` (out, rank), and DoRA's `magnitude` (out,)."""
    merged = weight.float() + scaling * (b.float() @ a.float())
    return merged if magnitude is None else merged * (magnitude.float() / merged.norm(dim=1)).unsqueeze(1)


def scaling_of(adapter: LoraConfig) -> float:
    return float(adapter.lora_alpha / (math.sqrt(adapter.r) if adapter.use_rslora else adapter.r))


def _parts(name: str) -> tuple[str, str, str, str]:
    """Names of a base weight's own adapter: its layer, A, B and DoRA's magnitude."""
    layer = name.removesuffix(".base_layer.weight")
    return layer, f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight", f"{layer}.lora_magnitude_vector.default.weight"


def merge(model: PeftModel, state: Tensors | None) -> tuple[PreTrainedModel, float]:
    """The base on the CPU with the adapter added, in the dtype of the base (nf4: of what it was quantized from), and what rounding took.

    `state` is the gathered one where ranks hold parts. The second value is |rounded - exact| / |exact - base| over all merged weights:
    the share of what was learnt that the dtype cannot hold.
    """
    if state is None:
        state = dict(model.named_parameters())
    other = next((name for name in state if ".lora_embedding_" in name), None)
    if other:
        raise UserError(
            f"adapter.target_modules={model.peft_config['default'].target_modules}: {other} is no linear layer's. Use: all-linear."
        )
    scaling, merged, lost, learnt = scaling_of(model.peft_config["default"]), {}, 0.0, 0.0
    for name, weight in state.items():
        if name.endswith(".base_layer.weight"):
            layer, a, b, magnitude = _parts(name)
            base = dequantized(weight)
            exact = merge_weight(base, state[a], state[b], scaling, state.get(magnitude))
            rounded = exact.to(base.dtype)
            lost += (rounded.float() - exact).square().sum().item()
            learnt += (exact - base.float()).square().sum().item()
            merged[f"{layer}.weight".removeprefix(PREFIX)] = rounded.detach().cpu()
        elif ".lora_" not in name:
            # In 4 bits too, where adapter.target_modules leaves layers out.
            merged[name.removeprefix(PREFIX).replace(".base_layer.", ".")] = dequantized(weight).cpu()
    config = copy.deepcopy(model.get_base_model().config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    unset_hf_deepspeed_config()  # ZeRO-3 would cut the new model's weights apart, and wait for the ranks that are not here
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=next(iter(merged.values())).dtype)
    missing = set(whole.load_state_dict(merged, strict=False, assign=True).missing_keys)
    whole.tie_weights()
    if missing - {"lm_head.weight"}:
        raise RuntimeError(f"weights are missing after merging: {sorted(missing)[:3]}")
    whole.generation_config = model.get_base_model().generation_config
    return whole, math.sqrt(lost / learnt) if learnt else 0.0


def merged_params(model: PeftModel, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight of the base with the adapter added, one at a time, the base left as it is.

    `gather` makes parameters whole that ZeRO-3 keeps in parts. Every rank takes part.
    """
    own, scaling = dict(model.named_parameters()), scaling_of(model.peft_config["default"])
    for name, weight in own.items():
        if ".lora_" in name:
            continue
        layer, *names = _parts(name)
        parts = [own[part] for part in names if part in own] if name.endswith(".base_layer.weight") else []
        with gather([weight, *parts]):
            base = dequantized(_whole(weight))
            value = merge_weight(base, _whole(parts[0]), _whole(parts[1]), scaling, *map(_whole, parts[2:])) if parts else base
            plain = f"{layer}.weight" if parts else name.replace(".base_layer.", ".")
            yield plain.removeprefix(PREFIX), value.to(base.dtype)


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
