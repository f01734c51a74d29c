"""Training of GPT-style transformers, 30M to 10.1B parameters: the MI350X report's third benchmark.

Started by the launcher:

    1 GPU:     python launch/run.py hardware=mi350x method=bench/transformer precision.weights=bf16
    As there:  python launch/run.py hardware=mi350x method=bench/transformer precision.weights=bf16 method.args.attention=eager \
               method.args.dropout=0.1

One batch of random tokens and fused AdamW; recipes/bench/gpt.py says what is known of the report's own settings. TFLOPS are 6 N x tokens/s,
N all parameters (the tied embedding once), which is what the report counts to the last digit of all its rows; attention's own products, 3
to 8% more, are in neither. Numerics are those of `precision`: the report does not state its own, but with fp32 weights and moments 10.1B
parameters take 162 GB, and it names 119.7. Rows that run out of memory say so, and the series goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig

from recipes.bench import gpt
from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure
from recipes.bench.training import Step, fresh, timed, training_step, weights_dtype
from recipes.common.errors import UserError
from recipes.common.names import named
from recipes.common.program import main


@dataclass
class TransformerConfig(SeriesConfig):
    """`models`: names of recipes.bench.gpt.SIZES. `batch` (sequences) and `sequence` (tokens) empty: each size's own.

    `attention`: sdpa, or eager, which keeps all scores. Raises UserError.
    """

    models: list[str] = named(lambda: gpt.SIZES, [])
    batch: int | None = None
    sequence: int | None = None
    attention: str = named(lambda: gpt.ATTENTION, "sdpa")
    dropout: float = 0.0
    warmup: int = 5
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("models")
        if not 0 <= self.dropout < 1:
            raise UserError(f"method.args.dropout={self.dropout:g}: from 0 to below 1.")


COLUMNS = [
    Column("model", "model"),
    Column("parameters", "parameters", 0),
    Column("batch", "batch"),
    Column("sequence", "tokens"),
    Column("tokens_per_second", "tokens/s", 0),
    Column("tflops", "TFLOPS", 1),
    Column("share_of_peak", "of peak", 3),
    Column("memory_gb", "GB", 1),
    Column("ms", "ms/step", 1),
]


def transformer(config: DictConfig) -> dict[str, Any]:
    args = TransformerConfig(**config.trainer_args)
    device = device_of(args)
    weights_dtype(config)  # refused before the first row
    table = Table("transformer", COLUMNS, figure="tokens_per_second", notes=gpt.notes(config, args.attention, args.dropout))
    cases = [
        {"model": name, "num_gpus": 1, "batch": args.batch or size.batch, "sequence": args.sequence or size.sequence}
        for name, size in ((name, gpt.SIZES[name]) for name in args.models)
    ]
    return measure(config, args, table, cases, lambda case: one(case, config, args, device))


def one(case: Row, config: DictConfig, args: TransformerConfig, device: torch.device) -> Row:
    fresh(device)
    step, parameters = prepared(case, config, args, device)
    found = timed(step, device, args.warmup, args.steps)
    tokens_per_second = case["batch"] * case["sequence"] / found["ms"] * 1e3
    tflops = 6 * parameters * tokens_per_second / 1e12
    peak = config.hardware.peak_tflops.get(config.precision.compute)
    return {
        "parameters": parameters,
        "tokens_per_second": tokens_per_second,
        "tflops": tflops,
        "share_of_peak": tflops / peak if peak else None,
        **found,
    }


def prepared(case: Row, config: DictConfig, args: TransformerConfig, device: torch.device) -> tuple[Step, int]:
    """The step of a case, and how many parameters it trains."""
    torch.manual_seed(args.seed)
    size = replace(gpt.SIZES[case["model"]], attention=args.attention, dropout=args.dropout)
    model = gpt.build(size, case["sequence"], device, weights_dtype(config))
    return training_step(model, gpt.random_batch(size, case["batch"], case["sequence"], device), config), gpt.parameters(model)


if __name__ == "__main__":
    main(transformer)
