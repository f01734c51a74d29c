"""Run the same training steps in every precision: tokens/s, memory, and the loss next to fp32's.

All start from the same fp32 weights and see the same rows, which count upwards from random numbers
so that the loss can fall. As in conf/precision, fp16 and bf16 keep fp32 weights under autocast,
fp16 with a loss scaler; fp8 is bf16 with torchao's fp8 linear layers; nf4 freezes the linear layers
in 4 bits and trains LoRA on them. method.args.precisions selects them; precision= takes no effect.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, get_peft_model
from torch import nn

from recipes.bench.language_model import Steps, TrainingConfig
from recipes.bench.series import Row, Table, columns, device_of, measure
from recipes.bench.training import steps_ms
from recipes.models.low_precision import package, to_float8
from recipes.models.model_build import build_model
from recipes.rank.device import DTYPES, memory_peak_gb
from recipes.rank.names import named
from recipes.rank.program import main

COMPUTE = {**DTYPES, "fp8": torch.bfloat16, "nf4": torch.bfloat16}
PERIOD = 97  # after which the rows repeat; a prime
LORA_RANK, LORA_ALPHA = 16, 32  # conf/adapter/qlora.yaml


@dataclass
class PrecisionConfig(TrainingConfig):
    """Hold the arguments. `batch_size`: rows of a step. The loss is that of the last step."""

    precisions: list[str] = named(lambda: COMPUTE)
    batch_size: int = 4


COLUMNS = columns("precision tokens_per_second ms slowdown memory_gb loss loss_difference")


def precision(config: DictConfig) -> dict[str, Any]:
    args = PrecisionConfig(**config.trainer_args)
    device = device_of(args)
    in_fp32 = {"precision": {"compute": "fp32", "weights": "fp32"}}
    start = build_model(OmegaConf.merge(config, in_fp32)).cpu()
    tokens = counting(config, args).to(device)
    table = Table("precision", COLUMNS, "slowdown", False, ["slowdown: times bf16."])
    if "nf4" in args.precisions:
        table.notes.append(
            f"nf4 trains LoRA of rank {LORA_RANK} on frozen weights, so its loss cannot be "
            "compared."
        )
    same = {"model": config.model.name, "sequence": args.sequence, "batch_size": args.batch_size}
    cases = [{**same, "precision": name} for name in args.precisions]

    def compare(rows: list[Row]) -> None:
        measured = {row["precision"]: row for row in rows if row["error"] is None}
        loss, ms = measured.get("fp32", {}).get("loss"), measured.get("bf16", {}).get("ms")
        for row in rows:
            known = loss is not None and row.get("loss") is not None
            row["loss_difference"] = row["loss"] - loss if known else None
            row["slowdown"] = row["ms"] / ms if ms and row["error"] is None else None

    def unsupported(case: Row, rows: list[Row]) -> str | None:
        if device.type == "cpu" or case["precision"] in config.hardware.precisions:
            return None
        return f"{config.hardware.name} trains in {', '.join(config.hardware.precisions)}"

    def work(case: Row) -> Row:
        name, batches, losses = case["precision"], iter(tokens), []
        model = copy.deepcopy(start)
        if name == "fp8":
            model = to_float8(model)
        elif name == "nf4":
            model = nf4(model, device)
        steps = Steps(model, COMPUTE[name], device, args)
        ms = steps_ms(lambda: losses.append(steps(next(batches))), device, args.warmup, args.steps)
        return {
            "ms": ms,
            "tokens_per_second": tokens[0].numel() / ms * 1e3,
            "memory_gb": memory_peak_gb(),
            "loss": float(losses[-1]),
        }

    return measure(config, args, table, cases, work, compare, unsupported)


def counting(config: DictConfig, args: PrecisionConfig) -> torch.Tensor:
    """Return tokens (warmup + steps, batch_size, sequence); each row counts up modulo PERIOD."""
    generator = torch.Generator().manual_seed(args.seed)
    period = min(PERIOD, config.model.vocab_size)
    shape = (args.warmup + args.steps, args.batch_size, 1)
    first = torch.randint(period, shape, generator=generator)
    return (first + torch.arange(args.sequence)) % period


def nf4(model: nn.Module, device: torch.device) -> nn.Module:
    """Quantize linear layers except the head to 4 bits and add LoRA to them (arXiv:2305.14314)."""
    bnb = package("bitsandbytes", "nf4", "bitsandbytes")
    model.to(torch.bfloat16)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or "lm_head" in name:
            continue
        small = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        small.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        small.bias = layer.bias
        model.set_submodule(name, small)
    model.is_loaded_in_4bit = True  # so that peft uses its 4-bit layer
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear"
    )
    return get_peft_model(model.to(device), lora)  # .to() quantizes


if __name__ == "__main__":
    main(precision)
