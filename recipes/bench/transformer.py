"""Train GPT-style transformers, 30M to 10.1B parameters, on one GPU and on several.

bench/transformer and bench/scaling are the MI350X report's third and fourth benchmarks. Every step
trains on the same random tokens with fused AdamW. recipes/bench/gpt.py lists the known settings of
the report. TFLOPS are 6 N x tokens/s, where N is the number of parameters (the tied embedding
once). This formula reproduces all rows of the report to the last digit. It omits the matrix
products of attention, which would add 3 to 8%. precision= sets the dtypes. The report does not
state its dtypes. With fp32 weights and moments, 10.1B parameters would take 162 GB, but the report
says 119.7 GB.

On several GPUs, DDP or FSDP2 train the same number of sequences per GPU, and reduce gradients in
the dtype of the weights. One run measures all numbers of GPUs up to the number that it has. For n
GPUs, the first n ranks train and the others wait without using their GPUs. The row for one GPU is
the loop without DDP or FSDP2; efficiency is relative to this row. Time and memory are the largest
of all ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from recipes.bench import consensus, gpt
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure, rate
from recipes.bench.timing import weights_dtype
from recipes.rank.names import name_field
from recipes.rank.program import main

STRATEGIES = ("ddp", "fsdp")


@dataclass
class GptConfig(SeriesConfig):
    """Arguments. `models`: names in gpt.SIZES. `batch`: sequences per GPU. `sequence`: tokens.

    A batch or sequence that is null has the default of each model size.
    """

    models: list[str] = name_field(lambda: gpt.SIZES, [])
    batch: int | None = None
    sequence: int | None = None
    warmup: int = 5
    steps: int = 20


@dataclass
class TransformerConfig(GptConfig):
    """Arguments, as of GptConfig. `attention`: sdpa, or eager, which saves the scores."""

    attention: str = name_field(lambda: gpt.ATTENTION, "sdpa")
    dropout: float = 0.0


@dataclass
class ScalingConfig(GptConfig):
    """Arguments, as of GptConfig. `num_gpus`: numbers above the run's number are skipped."""

    num_gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    strategies: list[str] = name_field(lambda: STRATEGIES)


def transformer(config: DictConfig) -> dict[str, Any]:
    args = TransformerConfig(**config.trainer_args)
    device = device_of(args)
    weights_dtype(config)  # rejects an unsupported precision before the first row
    notes = [gpt.note(config, args.attention, args.dropout)]
    shown = "model parameters batch sequence tokens_per_second tflops share_of_peak memory_gb ms"
    table = Table("transformer", shown, figure="tokens_per_second", notes=notes)
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


def scaling(config: DictConfig) -> dict[str, Any]:
    args = ScalingConfig(**config.trainer_args)
    shown = (
        "model num_gpus strategy batch global_batch sequence tokens_per_second efficiency "
        "tflops tflops_per_gpu memory_gb ms"
    )
    device = device_of(args)
    weights_dtype(config)  # rejects an unsupported precision before the first row
    with consensus.control_group(device) as control:
        world = dist.get_world_size()
        notes = [gpt.note(config)]
        unavailable = [str(n) for n in args.num_gpus if n > world]
        if unavailable:
            more = f"use topology.num_gpus={max(args.num_gpus)}"
            notes.append(
                f"{', '.join(unavailable)} GPUs are left out, because this run has {world}. "
                f"To measure them, {'leave out smoke=true' if config.get('smoke') else more}."
            )
        # torch requires every rank to create every group, even those it does not join.
        counts = sorted(n for n in set(args.num_gpus) if 1 < n <= world)
        groups = {n: dist.new_group(list(range(n))) for n in counts}
        table = Table("scaling", shown, figure="tokens_per_second", notes=notes)

        def work(case: Row) -> Row:
            n = case["num_gpus"]
            train = None  # None for a rank that only waits
            if dist.get_rank() < n:
                size = gpt.SIZES[case["model"]]
                group = groups.get(n)
                train = functools.partial(gpt.train_case, size, case, config, args, device, group)
            figures = consensus.slowest_rank(control, train)
            speed = case["global_batch"] * case["sequence"] / figures["ms"] * 1e3
            tflops = 6 * figures["parameters"] * speed / 1e12
            rates = {"tokens_per_second": speed, "tflops": tflops, "tflops_per_gpu": tflops / n}
            return {**figures, **rates}

        return measure(config, args, table, cases(args, world), work, compare)


def compare(rows: list[Row]) -> None:
    alone = {row["model"]: row.get("tokens_per_second") for row in rows if row["num_gpus"] == 1}
    for row in rows:
        speed, base_speed = row.get("tokens_per_second"), alone.get(row["model"])
        row["efficiency"] = speed / row["num_gpus"] / base_speed if speed and base_speed else None


def cases(args: ScalingConfig, world: int) -> list[Row]:
    """Return the cases of each model. One GPU has one case, because it uses no strategy."""
    rows = []
    for name in args.models:
        size = gpt.shape(name, args.batch, args.sequence)
        for n in sorted(n for n in set(args.num_gpus) if n <= world):
            for strategy in args.strategies[:1] if n == 1 else args.strategies:
                case = {"model": name, "num_gpus": n, "strategy": strategy}
                rows.append({**case, **size, "global_batch": n * size["batch"]})
    return rows


if __name__ == "__main__":
    benchmarks = {f"bench/{f.__name__}": f for f in (transformer, scaling)}
    main(lambda config: benchmarks[config.method.name](config))
