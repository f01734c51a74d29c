"""Run the same training steps in every precision, and compare tokens/s, memory and loss.

All precisions start from the same weights and train on the same rows. Rows count upwards from
random numbers, so the model can learn them. Each precision trains like a run with
precision=<name>. nf4 freezes the linear layers and trains LoRA on them. Select precisions with
method.args.precisions; precision= takes no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from recipes.bench.benchmark import Row, Table, device_of, measure
from recipes.bench.language_model import TrainingConfig, build, sft_step
from recipes.bench.timing import free_leftovers, time_steps
from recipes.rank.names import name_field
from recipes.rank.program import main

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


COLUMNS = "precision tokens_per_second ms slowdown memory_gb loss loss_difference"


def precision(config: DictConfig) -> dict[str, Any]:
    args = PrecisionConfig(**config.trainer_args)
    device = device_of(args)
    tokens = counting(config, args, args.warmup + args.steps).to(device)
    note = "slowdown: the time divided by bf16's. The loss is the last step's."
    table = Table("precision", COLUMNS, "slowdown", higher_is_better=False, notes=[note])
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
    main(precision)
