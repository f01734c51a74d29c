"""Train GPT-style transformers, 30M to 10.1B parameters: the MI350X report's third benchmark.

Steps use one batch of random tokens and fused AdamW; recipes/bench/gpt.py lists what is known of
the report's settings. TFLOPS are 6 N x tokens/s, with N all parameters (the tied embedding once).
That reproduces all rows of the report to the last digit, and omits attention's own products, 3 to
8% more. Numerics are those of `precision`. The report does not state its numerics, but with fp32
weights and moments 10.1B parameters would take 162 GB, and it reports 119.7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig

from recipes.bench import gpt
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure, rate
from recipes.bench.timing import weights_dtype
from recipes.rank.names import name_field
from recipes.rank.program import main


@dataclass
class TransformerConfig(SeriesConfig):
    """Hold the arguments. `models`: names in gpt.SIZES. `attention`: sdpa, or eager (keeps scores).

    `batch` (sequences) and `sequence` null: the defaults of each model size.
    """

    models: list[str] = name_field(lambda: gpt.SIZES, [])
    batch: int | None = None
    sequence: int | None = None
    attention: str = name_field(lambda: gpt.ATTENTION, "sdpa")
    dropout: float = 0.0
    warmup: int = 5
    steps: int = 20


COLUMNS = "model parameters batch sequence tokens_per_second tflops share_of_peak memory_gb ms"


def transformer(config: DictConfig) -> dict[str, Any]:
    args = TransformerConfig(**config.trainer_args)
    device = device_of(args)
    weights_dtype(config)  # rejects an unsupported precision before the first row
    notes = [gpt.note(config, args.attention, args.dropout)]
    table = Table("transformer", COLUMNS, figure="tokens_per_second", notes=notes)
    cases = [
        {"model": name, "num_gpus": 1, **gpt.shape(name, args.batch, args.sequence)}
        for name in args.models
    ]
    return measure(config, args, table, cases, lambda case: measure_one(case, config, args, device))


def measure_one(
    case: Row, config: DictConfig, args: TransformerConfig, device: torch.device
) -> Row:
    size = replace(gpt.SIZES[case["model"]], attention=args.attention, dropout=args.dropout)
    figures = gpt.trained(size, case, config, args, device)
    tokens_per_second = case["batch"] * case["sequence"] / figures["ms"] * 1e3
    tflops = 6 * figures["parameters"] * tokens_per_second / 1e12
    return {"tokens_per_second": tokens_per_second, **rate(tflops, config), **figures}


if __name__ == "__main__":
    main(transformer)
