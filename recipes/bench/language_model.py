"""Train a model of conf/model in a bare loop, for batch_size, precision and checkpointing.

A step matches method=sft: autocast, TRL's loss (one tile of the logits in memory at a time),
gradients clipped at 1, and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from peft import PeftModel, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from launch.core.errors import UserError
from recipes.bench.series import Row, SeriesConfig, rate
from recipes.bench.training import steps_ms
from recipes.measure.flops import flops_per_token
from recipes.models.model_build import adapter_config, build_model
from recipes.rank.device import compute_dtype, memory_peak_gb

MAX_NORM = 1.0  # conf/method/sft.yaml


@dataclass
class TrainingConfig(SeriesConfig):
    """Hold the arguments. `sequence`: tokens of a row. `steps` are timed after `warmup` others."""

    sequence: int = 2048
    warmup: int = 3
    steps: int = 10
    learning_rate: float = 2e-5
    torch_compile: bool = False


class Steps:
    """Train a model: a call takes one step on tokens (rows, sequence) and returns the loss."""

    def __init__(
        self, model: nn.Module, compute: torch.dtype, device: torch.device, args: TrainingConfig
    ) -> None:
        self.model, self.compute, self.device = model.to(device).train(), compute, device
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer does
        self.forward: Callable[..., Any] = (
            torch.compile(self.model, dynamic=False) if args.torch_compile else self.model
        )
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=args.learning_rate, weight_decay=0.0, fused=True
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=compute == torch.float16)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32):
            loss = self.forward(input_ids=tokens, labels=tokens, fused_lm_head=True).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


def build_steps(config: DictConfig, args: TrainingConfig, device: torch.device) -> Steps:
    """Build the configured model, adapter and precision. Raise UserError if they do not fit."""
    try:
        model, adapter = build_model(config), adapter_config(config)
        model = get_peft_model(model, adapter) if adapter else model
        return Steps(model, compute_dtype(config), device, args)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"model={config.model.name}: its weights alone do not fit in memory ({error}). "
            "Use precision.weights=bf16, adapter=lora or a smaller model."
        ) from error


def random_tokens(
    config: DictConfig, args: TrainingConfig, rows: int, device: torch.device
) -> torch.Tensor:
    """Return random tokens (rows, sequence)."""
    shape, generator = (rows, args.sequence), torch.Generator().manual_seed(args.seed)
    return torch.randint(config.model.vocab_size, shape, generator=generator).to(device)


def speed(steps: Steps, tokens: torch.Tensor, config: DictConfig, args: TrainingConfig) -> Row:
    """Return the speed and memory of repeated training on the same tokens (rows, sequence)."""
    try:
        ms = steps_ms(lambda: steps(tokens), steps.device, args.warmup, args.steps)
    finally:
        # Gradients and moments lie between activations and keep those blocks from being freed.
        steps.optimizer.zero_grad()
        steps.optimizer.state.clear()
    tokens_per_second = tokens.numel() / ms * 1e3
    tflops = tokens_per_second * flops_per_token(steps.model, args.sequence) / 1e12
    return {
        "ms": ms,
        "tokens_per_second": tokens_per_second,
        "tflops": tflops,
        "mfu": rate(tflops, config)["share_of_peak"],
        "memory_gb": memory_peak_gb(),
    }
