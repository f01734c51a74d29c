"""Train three linear layers, 134M parameters, in a loop: the MI350X report's second benchmark.

The widths are 4096 - 8192 - 8192 - 4096 with ReLU in between. A run trains 100 steps on one batch
of 256 samples. The report does not state the precision, optimizer or loss. We use precision=, fused
AdamW and the mean squared error. TFLOPS count 6 operations per weight and sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure, rate
from recipes.bench.timing import autocast, numerics, time_steps, training_step, weights_dtype
from recipes.rank.program import main


@dataclass
class MlpLoopConfig(SeriesConfig):
    """Arguments. `width`: size of input and output. `inner`: size of the two hidden layers."""

    batch: int = 256
    width: int = 4096
    inner: int = 8192
    warmup: int = 10
    iterations: int = 100


def build(width: int, inner: int) -> nn.Sequential:
    hidden = [nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(inner, width))


def mlp_loop(config: DictConfig) -> dict[str, Any]:
    args = MlpLoopConfig(**config.trainer_args)
    device, dtype = device_of(args), weights_dtype(config)
    shown = "batch parameters samples_per_second ms total_s tflops share_of_peak memory_gb"
    note = f"Measured with {numerics(config)}; fused AdamW; mean squared error."
    table = Table("mlp_loop", shown, figure="samples_per_second", notes=[note])

    def work(case: Row) -> Row:
        with torch.device(device):
            model = build(args.width, args.inner).to(dtype)
            inputs, targets = (torch.randn(args.batch, args.width).to(dtype) for _ in range(2))

        def loss_of() -> torch.Tensor:
            return nn.functional.mse_loss(model(inputs), targets)

        step = training_step(model, autocast(config), loss_of=loss_of)
        figures = time_steps(step, device, args.warmup, args.iterations)
        weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "samples_per_second": args.batch / figures["ms"] * 1e3,
            "total_s": figures["ms"] * args.iterations / 1e3,
            **rate(6 * weights * args.batch / figures["ms"] / 1e9, config),
            **figures,
        }

    return measure(config, args, table, [{"batch": args.batch}], work)


if __name__ == "__main__":
    main(mlp_loop)
