"""Steps of training a model of conf/model, in a loop with nothing around it: what batch_size, precision and checkpointing measure.

A step is that of method=sft: autocast, TRL's loss, which holds a tile of the logits at a time, gradients clipped at 1, AdamW.
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

from recipes.bench.series import Row, SeriesConfig
from recipes.bench.timing import steps_ms
from recipes.bench.training import fresh
from recipes.common.device import compute_dtype
from recipes.common.errors import UserError
from recipes.common.flops import flops_per_token
from recipes.common.model import adapter_config, build_model

MAX_NORM = 1.0  # conf/method/sft.yaml


@dataclass
class TrainingConfig(SeriesConfig):
    """`sequence`: tokens of a row. `steps` are timed, after `warmup` ones. Raises UserError for a value out of range."""

    sequence: int = 2048
    warmup: int = 3
    steps: int = 10
    learning_rate: float = 2e-5
    torch_compile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate <= 0:
            raise UserError(f"method.args.learning_rate={self.learning_rate}: above 0.")


class Steps:
    """The loop's state. Called with tokens (rows, sequence) on its device it takes one step, and returns the loss there."""

    def __init__(self, model: nn.Module, compute: torch.dtype, device: torch.device, args: TrainingConfig) -> None:
        self.model, self.compute, self.device = model.to(device).train(), compute, device
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))  # those of TRL's SFTTrainer
        self.forward: Callable[..., Any] = torch.compile(self.model, dynamic=False) if args.torch_compile else self.model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=args.learning_rate, weight_decay=0.0, fused=True)
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
    """The model, adapter and precision of the composition. Raises UserError where the rows are too long, or it does not fit."""
    check_sequence(config, args)
    try:
        model, adapter = build_model(config), adapter_config(config)
        return Steps(get_peft_model(model, adapter) if adapter else model, compute_dtype(config), device, args)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"model={config.model.name}: its weights alone are out of memory ({error}). Use precision.weights=bf16, adapter=lora or a "
            "smaller model."
        ) from error


def check_sequence(config: DictConfig, args: TrainingConfig) -> None:
    """Raises UserError."""
    if args.sequence > config.model.max_positions:
        raise UserError(f"method.args.sequence={args.sequence}: {config.model.name} has {config.model.max_positions} positions.")


def random_tokens(config: DictConfig, args: TrainingConfig, rows: int, device: torch.device) -> torch.Tensor:
    """(rows, sequence), the same for the same seed."""
    generator = torch.Generator().manual_seed(args.seed)
    return torch.randint(config.model.vocab_size, (rows, args.sequence), generator=generator).to(device)


def speed(steps: Steps, tokens: torch.Tensor, config: DictConfig, args: TrainingConfig) -> Row:
    """Figures of training on the same tokens (rows, sequence) over and over. `memory_gb` is the most allocated, None on a CPU."""
    # Moments that an earlier case put between its activations keep those blocks from the driver: a new run begins without.
    steps.optimizer.state.clear()
    fresh_memory(steps.device, args)
    ms = steps_ms(lambda: steps(tokens), steps.device, args.warmup, args.steps)
    rate = tokens.numel() / ms * 1e3
    tflops = rate * flops_per_token(steps.model, args.sequence) / 1e12
    peak = config.hardware.peak_tflops.get(config.precision.compute)
    return {
        "ms": ms,
        "tokens_per_second": rate,
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "memory_gb": peak_gb(steps.device),
    }


def fresh_memory(device: torch.device, args: TrainingConfig) -> None:
    """What an earlier case left is given back, compiled code too, and the peak is counted anew."""
    if args.torch_compile:
        torch._dynamo.reset()  # it compiles a function for eight shapes, and then no more
    fresh(device)


def peak_gb(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
