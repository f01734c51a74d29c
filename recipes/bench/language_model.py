"""Train a model of conf/model in a plain loop, for bench/batch_size, precision and checkpointing.

A step is as in method=sft: autocast, TRL's loss (one tile of the logits in memory at a time),
gradients clipped to norm 1, and AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from peft import PeftModel, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from launch.core.errors import UserError
from recipes.bench.benchmark import Row, SeriesConfig, rate
from recipes.bench.timing import Step, time_steps, training_step
from recipes.measure.flops import flops_per_token
from recipes.models.model_build import adapter_config, build_model
from recipes.rank.device import compute_dtype

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
