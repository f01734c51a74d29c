"""A training loop of three linear layers, 134M parameters: the MI350X report's second benchmark.

Started by the launcher:

    1 GPU:    python launch/run.py hardware=mi350x method=bench/mlp_loop
    In fp32:  python launch/run.py hardware=mi350x method=bench/mlp_loop precision=fp32

4096 - 8192 - 8192 - 4096 with ReLU between, 100 steps on one batch of 256. The report states neither precision nor optimizer nor loss; here
they are those of `precision`, fused AdamW and the mean squared error. 6 operations a weight and sample make the TFLOPS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure
from recipes.bench.training import fresh, numerics, timed, training_step, weights_dtype
from recipes.common.program import main


@dataclass
class MlpLoopConfig(SeriesConfig):
    """`batch`: samples of a step. `width` of the input and the output, `inner` of the layers between. Raises UserError."""

    batch: int = 256
    width: int = 4096
    inner: int = 8192
    warmup: int = 10
    iterations: int = 100


class Mlp(nn.Module):
    """Takes inputs and targets (batch, width), and returns the mean squared error."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(inputs), targets)


def mlp_loop(config: DictConfig) -> dict[str, Any]:
    args = MlpLoopConfig(**config.trainer_args)
    device, dtype = device_of(args), weights_dtype(config)
    columns = [
        Column("batch", "batch"),
        Column("parameters", "parameters", 0),
        Column("samples_per_second", "samples/s", 0),
        Column("ms", "ms/step", 2),
        Column("total_s", f"s of {args.iterations}", 3),
        Column("tflops", "TFLOPS", 1),
        Column("share_of_peak", "of peak", 2),
        Column("memory_gb", "GB", 1),
    ]
    table = Table("mlp_loop", columns, figure="samples_per_second", notes=[f"Here: {numerics(config)}; fused AdamW; mean squared error."])
    peak = config.hardware.peak_tflops.get(config.precision.compute)
    return measure(config, args, table, [{"batch": args.batch}], lambda case: one(config, args, peak, device, dtype))


def one(config: DictConfig, args: MlpLoopConfig, peak: float | None, device: torch.device, dtype: torch.dtype) -> Row:
    fresh(device)
    torch.manual_seed(args.seed)
    with torch.device(device):
        model = Mlp(args.width, args.inner).to(dtype)
        batch = [torch.randn(args.batch, args.width).to(dtype) for _ in range(2)]
    found = timed(training_step(model, batch, config), device, args.warmup, args.iterations)
    weights = sum(layer.weight.numel() for layer in model.layers if isinstance(layer, nn.Linear))
    tflops = 6 * weights * args.batch / found["ms"] / 1e9
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples_per_second": args.batch / found["ms"] * 1e3,
        "total_s": found["ms"] * args.iterations / 1e3,
        "tflops": tflops,
        "share_of_peak": tflops / peak if peak else None,
        **found,
    }


if __name__ == "__main__":
    main(mlp_loop)
