"""Train a model in a plain loop, by batch size, checkpointing or precision.

A step is as in method=sft: autocast, TRL's loss (one tile of the logits in memory at a time),
gradients clipped to norm 1, and AdamW. Choose model=, adapter= and precision= as for a run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from peft import PeftModel, get_peft_model
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from trl.trainer.utils import add_fused_lm_head

from launch.core.errors import UserError
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure, rate, skip_larger
from recipes.bench.timing import Step, free_leftovers, time_steps, training_step
from recipes.measure.flops import flops_per_token
from recipes.models.model_build import adapter_config, build_model
from recipes.rank.device import compute_dtype
from recipes.rank.names import name_field
from recipes.rank.program import main

MAX_NORM = 1.0  # conf/method/sft.yaml


@dataclass
class TrainingConfig(SeriesConfig):
    """Arguments. `sequence`: tokens per row. `steps` are timed, after `warmup` untimed steps."""

    sequence: int = 2048
    warmup: int = 3
    steps: int = 10
    learning_rate: float = 2e-5
    torch_compile: bool = False


def build(config: DictConfig, device: torch.device) -> nn.Module:
    """Build the configured model and adapter. Raise UserError if they do not fit in memory."""
    try:
        model, adapter = build_model(config), adapter_config(config)
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer does
        return (get_peft_model(model, adapter) if adapter else model).to(device).train()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"model={config.model.name}: the weights alone do not fit in memory ({error}). "
            "Use precision.weights=bf16, adapter=lora or a smaller model."
        ) from error


def sft_step(model: nn.Module, config: DictConfig, args: TrainingConfig) -> Step:
    """Return a function that trains one step on tokens (rows, sequence) and returns the loss."""
    run = torch.compile(model, dynamic=False) if args.torch_compile else model

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return run(input_ids=tokens, labels=tokens, fused_lm_head=True).loss

    compute = compute_dtype(config) if config.precision.compute != "fp32" else None
    return training_step(model, compute, args.learning_rate, MAX_NORM, loss_of)


def random_tokens(
    config: DictConfig, args: TrainingConfig, rows: int, device: torch.device
) -> torch.Tensor:
    """Return random tokens (rows, sequence)."""
    shape, generator = (rows, args.sequence), torch.Generator().manual_seed(args.seed)
    return torch.randint(config.model.vocab_size, shape, generator=generator).to(device)


def speed(model: nn.Module, tokens: torch.Tensor, config: DictConfig, args: TrainingConfig) -> Row:
    """Train repeatedly on the same tokens (rows, sequence), and return speed and memory."""
    step = sft_step(model, config, args)
    try:
        figures = time_steps(lambda: step(tokens), tokens.device, args.warmup, args.steps)
    finally:
        model.zero_grad()  # gradients lie between activations, so their blocks could not be freed
    tokens_per_second = tokens.numel() / figures["ms"] * 1e3
    tflops = rate(tokens_per_second * flops_per_token(model, args.sequence) / 1e12, config)
    mfu = {"tflops": tflops["tflops"], "mfu": tflops["share_of_peak"]}
    return {**figures, "tokens_per_second": tokens_per_second, **mfu}


# ---- bench/batch_size: the largest and the fastest batch


@dataclass
class BatchSizeConfig(TrainingConfig):
    """Arguments. `batch_sizes`: rows per step. `gradient_checkpointing`: as in method=sft."""

    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    gradient_checkpointing: bool = True


def batch_size(config: DictConfig) -> dict[str, Any]:
    args = BatchSizeConfig(**config.trainer_args)
    device = device_of(args)
    model = build(config, device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shown = "batch_size tokens_per_second ms tflops mfu memory_gb"
    table = Table("batch_size", shown, figure="tokens_per_second")
    cases = [
        {"model": config.model.name, "sequence": args.sequence, "batch_size": size}
        for size in sorted(set(args.batch_sizes))
    ]

    def work(case: Row) -> Row:
        tokens = random_tokens(config, args, case["batch_size"], device)
        return speed(model, tokens, config, args)

    def complete(rows: list[Row]) -> Row:
        measured = [row for row in rows if row["error"] is None]
        fastest = max(measured, key=lambda row: row["tokens_per_second"], default={})
        largest = max(measured, key=lambda row: row["batch_size"], default={})
        best = {"largest": largest, "fastest": fastest}
        sizes = {name: row["batch_size"] for name, row in best.items() if row}
        line = ", ".join(f"{name} batch {size}" for name, size in sizes.items()) or "no batch ran"
        table.notes.append(f"{config.model.name}, rows of {args.sequence} tokens: {line}.")
        return sizes

    return measure(config, args, table, cases, work, complete, skip_larger("batch_size"))


# ---- bench/checkpointing: its cost and its savings

# `off` saves all activations for the backward pass. `on` saves the input of each layer and
# recomputes the rest (use_reentrant=False, as in transformers). `selective` also saves the results
# of matrix products and attention, which are the most expensive to recompute.
MODES = ("off", "on", "selective")
ATEN = torch.ops.aten
SAVED = [
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass
class CheckpointingConfig(TrainingConfig):
    """Arguments. `modes`: measured in this order, and compared with `off`."""

    modes: list[str] = name_field(lambda: MODES)
    batch_size: int = 2


def checkpointing(config: DictConfig) -> dict[str, Any]:
    args = CheckpointingConfig(**config.trainer_args)
    device = device_of(args)
    model = build(config, device)
    tokens = random_tokens(config, args, args.batch_size, device)
    note = "slowdown: the time divided by off's. MFU does not count recomputed operations."
    shown = "mode batch_size tokens_per_second ms slowdown memory_gb memory_share mfu"
    table = Table("checkpointing", shown, "slowdown", higher_is_better=False, notes=[note])
    same = {"model": config.model.name, "sequence": args.sequence, "batch_size": args.batch_size}
    cases = [{**same, "mode": mode, "checkpointing": mode != "off"} for mode in args.modes]

    def work(case: Row) -> Row:
        switch(model, case["mode"])
        return speed(model, tokens, config, args)

    def compare(rows: list[Row]) -> None:
        off = next((row for row in rows if row["mode"] == "off"), {})
        for row in rows:
            for key, figure in (("slowdown", "ms"), ("memory_share", "memory_gb")):
                both = row.get(figure) and off.get(figure)
                row[key] = row[figure] / off[figure] if both else None

    return measure(config, args, table, cases, work, compare)


def switch(model: nn.Module, mode: str) -> None:
    model.gradient_checkpointing_disable()
    if mode == "on":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == "selective":
        context = functools.partial(create_selective_checkpoint_contexts, SAVED)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})


# ---- bench/precision: the same training steps in every precision

# All precisions start from the same weights and train on the same rows. Rows count upwards from
# random numbers, so the model can learn them. Each precision trains like a run with
# precision=<name>. nf4 freezes the linear layers and trains LoRA on them.
# name -> (precision.compute, precision.weights), as in conf/precision
PRECISIONS = {
    **{name: (name, "fp32") for name in ("fp32", "fp16", "bf16", "fp8")},
    "nf4": ("bf16", "nf4"),
}
PERIOD = 97  # rows count from 0 to 96 and start again
LORA_RANK, LORA_ALPHA = 16, 32  # from conf/adapter/qlora.yaml


@dataclass
class PrecisionConfig(TrainingConfig):
    """Arguments. `batch_size`: rows per step."""

    precisions: list[str] = name_field(lambda: PRECISIONS)
    batch_size: int = 4


def precision(config: DictConfig) -> dict[str, Any]:
    args = PrecisionConfig(**config.trainer_args)
    device = device_of(args)
    tokens = counting(config, args, args.warmup + args.steps).to(device)
    note = "slowdown: the time divided by bf16's. The loss is the last step's."
    shown = "precision tokens_per_second ms slowdown memory_gb loss loss_difference"
    table = Table("precision", shown, "slowdown", higher_is_better=False, notes=[note])
    if "nf4" in args.precisions:
        table.notes.append(
            f"nf4 trains LoRA of rank {LORA_RANK} on frozen weights, so do not compare its loss "
            "with the others."
        )
    same = {"model": config.model.name, "sequence": args.sequence, "batch_size": args.batch_size}
    cases = [{**same, "precision": name} for name in args.precisions]

    def compare(rows: list[Row]) -> None:
        measured = {row["precision"]: row for row in rows if row["error"] is None}
        loss, ms = measured.get("fp32", {}).get("loss"), measured.get("bf16", {}).get("ms")
        for row in rows:
            has_both = loss is not None and row.get("loss") is not None
            row["loss_difference"] = row["loss"] - loss if has_both else None
            row["slowdown"] = row["ms"] / ms if ms and row["error"] is None else None

    def unsupported(case: Row, rows: list[Row]) -> str | None:
        if device.type == "cpu" or case["precision"] in config.hardware.precisions:
            return None
        return f"{config.hardware.name} only trains in {', '.join(config.hardware.precisions)}"

    def work(case: Row) -> Row:
        compute, weights = PRECISIONS[case["precision"]]
        rank = LORA_RANK if case["precision"] == "nf4" else None
        adapter = {"rank": rank, "alpha": LORA_ALPHA, "path": None}
        precision = {"name": case["precision"], "compute": compute, "weights": weights}
        case_config = OmegaConf.merge(config, {"precision": precision, "adapter": adapter})
        model, batches = build(case_config, device), iter(tokens)
        free_leftovers()  # so that the peak memory does not include building the model
        step = sft_step(model, case_config, args)
        figures = time_steps(lambda: step(next(batches)), device, args.warmup, args.steps)
        return {**figures, "tokens_per_second": tokens[0].numel() / figures["ms"] * 1e3}

    return measure(config, args, table, cases, work, compare, unsupported)


def counting(config: DictConfig, args: Any, steps: int) -> torch.Tensor:
    """Return tokens (steps, batch_size, sequence). Each row counts up modulo PERIOD."""
    generator = torch.Generator().manual_seed(args.seed)
    period = min(PERIOD, config.model.vocab_size)
    shape = (steps, args.batch_size, 1)
    first = torch.randint(period, shape, generator=generator)
    return (first + torch.arange(args.sequence)) % period


if __name__ == "__main__":
    benchmarks = {f"bench/{f.__name__}": f for f in (batch_size, checkpointing, precision)}
    main(lambda config: benchmarks[config.method.name](config))
