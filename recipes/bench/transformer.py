"""Train GPT-style transformers, 30M to 10.1B parameters: the MI350X report's third benchmark.

Every step trains on the same random tokens with fused AdamW. recipes/bench/gpt.py lists the known
settings of the report. TFLOPS are 6 N x tokens/s, where N is the number of parameters (the tied
embedding once). This formula reproduces all rows of the report to the last digit. It omits the
matrix products of attention, which would add 3 to 8%. precision= sets the dtypes. The report does
not state its dtypes. With fp32 weights and moments, 10.1B parameters would take 162 GB, but the
report says 119.7 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from recipes.bench import gpt
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure, rate
from recipes.bench.timing import weights_dtype
from recipes.rank.names import name_field
from recipes.rank.program import main


@dataclass
class TransformerConfig(SeriesConfig):
    """Arguments. `models`: names in gpt.SIZES. `attention`: sdpa, or eager, which saves the scores.

    `batch` is in sequences, `sequence` in tokens. An argument that is null has the default of each
    model size.
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

    def work(case: Row) -> Row:
        size = replace(gpt.SIZES[case["model"]], attention=args.attention, dropout=args.dropout)
        figures = gpt.train_case(size, case, config, args, device)
        tokens_per_second = case["batch"] * case["sequence"] / figures["ms"] * 1e3
        tflops = 6 * figures["parameters"] * tokens_per_second / 1e12
        return {"tokens_per_second": tokens_per_second, **rate(tflops, config), **figures}

    return measure(config, args, table, cases, work)


if __name__ == "__main__":
    main(transformer)
