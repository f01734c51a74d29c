"""Measure SFT's data loader by number of workers and pinned memory, with and without GPU steps.

Batches are made as in recipes/sft.py: tokenized rows in a `datasets.Dataset`, TRL's collator,
torch's DataLoader, and a copy to the GPU. A step multiplies matrices to keep the GPU busy for
`step_ms`. `wait_ms` is the time after a step until the next batch is on the GPU.

If conf/hardware turns workers and pinning off because they hang the GPU (Strix Halo), they are
measured only if method.args requests them. On MI50, they are off until this benchmark tries them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, grid, measure
from recipes.bench.timing import median_ms, synchronize
from recipes.rank.program import main

NUM_WORKERS = [0, 1, 2, 4, 8]
VOCABULARY = 32000  # any size works, because the speed does not depend on the random tokens
TIMEOUT_S = 120  # the row fails if workers produce no batch for this time


@dataclass
class DataloaderConfig(SeriesConfig):
    """Arguments. `num_workers`, `pin_memory` null: all values that the hardware allows.

    `steps`: a list of true (a step of `step_ms` after each batch) and false (no steps). `sequence`:
    tokens per row. `batches` are timed after `warmup` others, which wait until the workers start.
    """

    num_workers: list[int] | None = None
    pin_memory: list[bool] | None = None
    steps: list[bool] | None = None
    step_ms: float = 50.0
    rows: int = 4096
    sequence: int = 1024
    batch_size: int = 8
    batches: int = 100
    warmup: int = field(default=10, metadata={"minimum": 1})


COLUMNS = "num_workers pin_memory with_step samples_per_second batch_ms wait_ms"


def dataloader(config: DictConfig) -> dict[str, Any]:
    args = DataloaderConfig(**config.trainer_args)
    device = device_of(args)
    notes = [
        f"Batches have {args.batch_size} rows of {args.sequence} tokens. A step keeps the GPU busy "
        f"for {args.step_ms:g} ms.",
    ]
    hardware, name = config.hardware, config.hardware.name
    # Hangs are known only of GPUs that share the host's memory.
    limited = hardware.unified_memory or hardware.vendor == "none"
    no_workers = limited and not hardware.dataloader.num_workers
    no_pinning = limited and not hardware.dataloader.pin_memory
    if (args.num_workers is None and no_workers) or (args.pin_memory is None and no_pinning):
        notes.append(
            f"conf/hardware/{name}.yaml limits workers or pinning, and states the reason. To "
            "measure all: method.args.num_workers=[0,1,2,4,8] method.args.pin_memory=[false,true]."
        )
    table = Table("dataloader", COLUMNS, figure="samples_per_second", notes=notes)
    cases = grid(
        num_workers=args.num_workers or ([0] if no_workers else NUM_WORKERS),
        pin_memory=args.pin_memory or ([False] if no_pinning else [False, True]),
        with_step=args.steps or [False, True],
        sequence=[args.sequence],
        batch_size=[args.batch_size],
    )
    rows, step = tokenized(args), busy(args.step_ms, device)

    def work(case: Row) -> Row:
        loader = DataLoader(
            rows,
            batch_size=args.batch_size,
            shuffle=True,
            collate_fn=DataCollatorForLanguageModeling(pad_token_id=0),
            num_workers=case["num_workers"],
            pin_memory=case["pin_memory"],
            drop_last=True,
            timeout=TIMEOUT_S if case["num_workers"] else 0,
            generator=torch.Generator().manual_seed(args.seed),
        )
        ms, waited_ms = batch_ms(loader, step if case["with_step"] else None, args, device)
        speed = args.batch_size / ms * 1e3
        return {"samples_per_second": speed, "batch_ms": ms, "wait_ms": waited_ms}

    return measure(config, args, table, cases, work)


def tokenized(args: DataloaderConfig) -> datasets.Dataset:
    """Return rows as SFTTrainer tokenizes them. The first half is a prompt, with labels of -100."""
    generator = torch.Generator().manual_seed(args.seed)
    count = max(args.rows, args.batch_size)  # the loader drops incomplete batches
    tokens = torch.randint(VOCABULARY, (count, args.sequence), generator=generator)
    labels = tokens.clone()
    labels[:, : args.sequence // 2] = -100
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()})


def busy(step_ms: float, device: torch.device) -> Callable[[], None]:
    """Return a step of matrix products that takes about `step_ms`."""
    size, dtype = (4096, torch.float16) if device.type == "cuda" else (256, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    count = max(1, round(step_ms / median_ms(lambda: a @ a, device, warmup=3, repetitions=10)))

    def step() -> None:
        for _ in range(count):
            torch.matmul(a, a)

    return step


def batch_ms(
    loader: DataLoader,
    step: Callable[[], None] | None,
    args: DataloaderConfig,
    device: torch.device,
) -> tuple[float, float]:
    """Return milliseconds per batch, and how many of them were spent waiting for the batch.

    Each step waits for the device, like a training step that logs its loss. Epochs repeat, so the
    times include the start of new workers.
    """
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    waited_s = 0.0
    for number in range(-args.warmup, args.batches):
        if number == 0:
            start, waited_s = time.perf_counter(), 0.0
        fetch_start = time.perf_counter()
        for tensor in next(batches).values():
            tensor.to(device, non_blocking=loader.pin_memory)
        synchronize(device)
        waited_s += time.perf_counter() - fetch_start
        if step:
            step()
            synchronize(device)
    return (time.perf_counter() - start) * 1e3 / args.batches, waited_s * 1e3 / args.batches


if __name__ == "__main__":
    main(dataloader)
