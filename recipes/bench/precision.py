"""The same training steps in every precision: tokens/s, memory, and how far the loss ends from that of fp32.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/precision model=qwen3_0_6b model.init=random
    Longer:  python launch/run.py hardware=mi350x method=bench/precision model=qwen3_0_6b model.init=random method.args.steps=200

All start from the same fp32 weights and see the same rows, which count upwards from random numbers, so that a loss can fall. As in
conf/precision: fp16 and bf16 keep fp32 weights under autocast, fp16 with a loss scaler; fp8 is bf16 with torchao's fp8 linear layers; nf4
freezes the linear layers in 4 bits and trains LoRA on them, so its loss is that of another training. It takes `precisions` from its
arguments, whatever precision= says.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, get_peft_model
from torch import nn

from recipes.bench.language_model import Steps, TrainingConfig, check_sequence, fresh_memory, peak_gb
from recipes.bench.series import Column, Row, Table, device_of, measure_rows, refusals, result
from recipes.bench.timing import steps_ms
from recipes.common.errors import UserError
from recipes.common.low_precision import package, to_float8
from recipes.common.model import build_model
from recipes.common.names import named
from recipes.common.program import main

COMPUTE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "nf4": torch.bfloat16}
PERIOD = 97  # of the rows: a number that no power of two divides
LORA_RANK, LORA_ALPHA = 16, 32  # conf/adapter/qlora.yaml


@dataclass
class PrecisionConfig(TrainingConfig):
    """`batch_size` rows a step. The loss is that of the last of `steps`. Raises UserError."""

    precisions: list[str] = named(lambda: COMPUTE)
    batch_size: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("precisions")


def precision(config: DictConfig) -> dict[str, Any]:
    args = PrecisionConfig(**config.trainer_args)
    check_sequence(config, args)
    device = device_of(args)
    start = build_model(OmegaConf.merge(config, {"precision": {"compute": "fp32", "weights": "fp32"}})).cpu()
    tokens = counting(config, args).to(device)
    table = Table(
        "precision",
        figure="slowdown",
        higher_is_better=False,
        columns=[
            Column("precision", "precision"),
            Column("tokens_per_second", "tokens/s", 0),
            Column("ms", "ms/step", 1),
            Column("slowdown", "times bf16", 2),
            Column("memory_gb", "peak GB", 1),
            Column("loss", "last loss", 4),
            Column("loss_difference", "less fp32's", 4),
        ],
    )
    if "nf4" in args.precisions:
        table.notes.append(f"nf4 trains LoRA of rank {LORA_RANK} on frozen weights: its loss is that of another training.")
    same = {"model": config.model.name, "sequence": args.sequence, "batch_size": args.batch_size}
    cases = [{**same, "precision": name} for name in args.precisions]
    rows = measure_rows(config, args, table, cases, lambda case: one(case, start, tokens, config, args), [])
    loss, ms = (next((row.get(key) for row in rows if row["precision"] == name), None) for name, key in (("fp32", "loss"), ("bf16", "ms")))
    for row in rows:  # None where one of the two was not measured
        row["loss_difference"] = row["loss"] - loss if loss is not None and row.get("loss") is not None else None
        row["slowdown"] = row["ms"] / ms if ms is not None and row["error"] is None else None
    return result(config, args, table, rows)


def one(case: Row, start: nn.Module, tokens: torch.Tensor, config: DictConfig, args: PrecisionConfig) -> Row:
    """Raises UserError where the GPU or a package is not there for it."""
    name, device = case["precision"], tokens.device
    if device.type == "cuda" and name not in config.hardware.precisions:
        raise UserError(f"{config.hardware.name} does not train in it: {', '.join(config.hardware.precisions)}")
    fresh_memory(device, args)
    batches, losses = iter(tokens), []
    with refusals(name):
        steps = Steps(prepared(copy.deepcopy(start), name, device), COMPUTE[name], device, args)
        ms = steps_ms(lambda: losses.append(steps(next(batches))), device, args.warmup, args.steps)
    rate = tokens[0].numel() / ms * 1e3
    return {"ms": ms, "tokens_per_second": rate, "memory_gb": peak_gb(device), "loss": float(losses[-1])}


def counting(config: DictConfig, args: PrecisionConfig) -> torch.Tensor:
    """(warmup + steps, batch_size, sequence): each row counts upwards from a random number, around PERIOD."""
    generator = torch.Generator().manual_seed(args.seed)
    period = min(PERIOD, config.model.vocab_size)
    first = torch.randint(period, (args.warmup + args.steps, args.batch_size, 1), generator=generator)
    return (first + torch.arange(args.sequence)) % period


def prepared(model: nn.Module, name: str, device: torch.device) -> nn.Module:
    """The fp32 `model` as this precision trains it. Raises UserError where a package it needs is not installed."""
    if name == "fp8":
        return to_float8(model)
    return nf4(model, device) if name == "nf4" else model


def nf4(model: nn.Module, device: torch.device) -> nn.Module:
    """Linear layers but the head frozen in 4 bits, all else in bf16, LoRA beside them (arXiv:2305.14314)."""
    bnb = package("bitsandbytes", "nf4", "bitsandbytes")
    model.to(torch.bfloat16)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "lm_head" not in name]
    for name, layer in layers:
        small = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        small.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        small.bias = layer.bias
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, small)
    model.is_loaded_in_4bit = True  # so peft takes its layer for these
    lora = LoraConfig(task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear")
    return get_peft_model(model.to(device), lora)  # .to() quantizes


if __name__ == "__main__":
    main(precision)
