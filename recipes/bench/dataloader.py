"""Rows a second of the loader that SFT uses, by worker processes and pinned memory, alone and beside a step on the GPU.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/dataloader
    Longer:  python launch/run.py hardware=mi350x method=bench/dataloader method.args.sequence=8192 method.args.step_ms=200

The path is that of recipes/sft.py: tokenized rows in a `datasets.Dataset`, TRL's collator, torch's DataLoader, a copy to the GPU. The
step is matrix products that keep the GPU busy for `step_ms`; `wait_ms` is what a batch then still has to be waited for.

Where conf/hardware says that workers and pinning are off (Strix Halo: they hang it), they are measured only when the arguments name them.
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

from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure
from recipes.bench.timing import median_ms, synchronize
from recipes.common.errors import UserError
from recipes.common.program import main

NUM_WORKERS, PIN_MEMORY = [0, 1, 2, 4, 8], [False, True]
VOCABULARY = 32000  # tokens are random: only their number counts
TIMEOUT_S = 120  # without a batch, worker processes hang; their row says so


@dataclass
class DataloaderConfig(SeriesConfig):
    """`num_workers` and `pin_memory` empty: all of a series, or what the hardware is limited to. `steps`: for each, whether a step of
    `step_ms` runs beside the loader. `sequence`: tokens of a row. `batches` are timed, after `warmup` ones. Raises UserError."""

    num_workers: list[int] | None = None
    pin_memory: list[bool] | None = None
    steps: list[bool] | None = None
    step_ms: float = 50.0
    rows: int = 4096
    sequence: int = 1024
    batch_size: int = 8
    batches: int = 100
    warmup: int = field(default=10, metadata={"least": 1})  # the first waits for the workers to start

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("num_workers", "pin_memory", "steps")
        if self.step_ms <= 0:
            raise UserError(f"method.args.step_ms={self.step_ms}: above 0.")
        if self.rows < self.batch_size:
            raise UserError(f"method.args.rows={self.rows}: fewer than one batch of {self.batch_size}.")


def dataloader(config: DictConfig) -> dict[str, Any]:
    args = DataloaderConfig(**config.trainer_args)
    device = device_of(args)
    table = Table(
        "dataloader",
        figure="samples_per_second",
        columns=[
            Column("num_workers", "workers"),
            Column("pin_memory", "pinned"),
            Column("with_step", "with step"),
            Column("samples_per_second", "rows/s", 0),
            Column("batch_ms", "ms/batch", 2),
            Column("wait_ms", "waited ms", 2),
        ],
        notes=[f"batches of {args.batch_size} rows of {args.sequence} tokens; a step keeps the GPU busy for {args.step_ms:g} ms."],
    )
    workers, pins, note = series(args, config.hardware)
    if note:
        table.notes.append(note)
    cases = [
        {"num_workers": number, "pin_memory": pin, "with_step": step, "sequence": args.sequence, "batch_size": args.batch_size}
        for number, pin, step in itertools.product(workers, pins, args.steps or [False, True])
    ]
    rows, step = tokenized(args), busy(args.step_ms, device)
    return measure(config, args, table, cases, lambda case: one(case, args, rows, step, device))


def series(args: DataloaderConfig, hardware: DictConfig) -> tuple[list[int], list[bool], str | None]:
    """Numbers of workers, pinned or not, and what the hardware's own settings leave out. What the arguments name is measured."""
    limits = hardware.dataloader
    workers = [0] if limits.num_workers == 0 else NUM_WORKERS
    pins = PIN_MEMORY if limits.pin_memory else [False]
    left = []
    if args.num_workers is None and workers != NUM_WORKERS:
        left.append(("num_workers=0", f"method.args.num_workers={NUM_WORKERS}"))
    if args.pin_memory is None and pins != PIN_MEMORY:
        left.append(("pin_memory=false", "method.args.pin_memory=[false,true]"))
    note = None
    if left:
        only, override = (" and ".join(parts) for parts in zip(*left, strict=True))
        note = f"Only {only}: conf/hardware/{hardware.name}.yaml says so, and why. {override.replace(', ', ',')} would measure more."
    return args.num_workers or workers, args.pin_memory or pins, note


def tokenized(args: DataloaderConfig) -> datasets.Dataset:
    """Rows as SFTTrainer has them after it tokenized: tokens, and labels that leave out the first half, a prompt."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(VOCABULARY, (args.rows, args.sequence), generator=generator)
    labels = tokens.clone()
    labels[:, : args.sequence // 2] = -100
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()})


def busy(step_ms: float, device: torch.device) -> Callable[[], None]:
    """Matrix products that take about so long."""
    size, dtype = (4096, torch.float16) if device.type == "cuda" else (256, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    count = max(1, round(step_ms / median_ms(lambda: a @ a, device, warmup=3, repetitions=10)))

    def step() -> None:
        for _ in range(count):
            torch.matmul(a, a)

    return step


def one(case: Row, args: DataloaderConfig, rows: datasets.Dataset, step: Callable[[], None], device: torch.device) -> Row:
    """`wait_ms`: see `batch_ms`. Raises UserError where worker processes hang, die or cannot be started."""
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
    try:
        ms, wait_ms = batch_ms(loader, step if case["with_step"] else lambda: None, args, device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:
        raise UserError(f"the loader failed: {str(error).splitlines()[0]}") from error
    return {"samples_per_second": args.batch_size / ms * 1e3, "batch_ms": ms, "wait_ms": wait_ms}


def batch_ms(loader: DataLoader, work: Callable[[], None], args: DataloaderConfig, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a batch, and those of them until it was on the device. A step waits for the device, as one that logs its loss."""
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch, the start of new workers in it
    waited_s = 0.0
    for number in range(-args.warmup, args.batches):
        if number == 0:
            began, waited_s = time.perf_counter(), 0.0
        fetched = time.perf_counter()
        for tensor in next(batches).values():
            tensor.to(device, non_blocking=loader.pin_memory)
        synchronize(device)
        waited_s += time.perf_counter() - fetched
        work()
        synchronize(device)
    return (time.perf_counter() - began) * 1e3 / args.batches, waited_s * 1e3 / args.batches


if __name__ == "__main__":
    main(dataloader)
