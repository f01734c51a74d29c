"""profile=torch and profile=memory: what a program's time and memory go into, measured in a few steady steps of it.

    with profiling.session(config, num_steps=20) as profile:
        for _ in range(20):
            ...
            profile.step()

A Trainer of transformers gets the same from recipes/common/training.py. Files and their content: docs/profiling.md.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from recipes.common import fp32_modules, kernels_table, memory_table
from recipes.common.files import write_json
from recipes.common.program import is_main_rank, rank, say

SKIPPED = 3  # the first step allocates, the second may compile anew for another shape; the last of these starts the profiler's machinery
PROFILED = 2  # one could be an odd one; each more makes the trace longer to load, by 100 MB of JSON for a 7B model
MEMORY_STEPS = 3  # the first holds no optimizer state before its end; from the second on every step is alike
MEMORY_EVENTS = 100_000  # allocations and frees; the tutorial of torch's memory snapshot bounds its history by as many


class Profile:
    """profile=none, and profile=rocprof, which needs nothing of the program it watches."""

    def begin(self, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None) -> None:
        """Before the first of `num_steps` steps (None: unknown). Work repeats after each `cycle` of them."""

    def step(self) -> None:
        """After each step."""

    def end(self) -> None:
        """After the last one, or where something failed."""


class TorchProfile(Profile):
    """trace-rank<N>.json.gz of every rank; kernels.json and, under mixed precision, fp32_modules.json of the main one."""

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.run_dir) / "profile"
        self.low_precision = config.precision.compute if config.precision.compute != "fp32" else None
        self.profiler: torch.profiler.profile | None = None

    def begin(self, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None) -> None:
        wait, warmup, active = steps(num_steps, cycle)
        self.at, self.edges = 0, (wait + warmup, wait + warmup + active)
        self.ranges = fp32_modules.Ranges(model if self.low_precision else None)
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=bool(self.low_precision),  # and dtypes, which tell what computes in fp32
        )
        self._edge()
        self.profiler.start()

    def step(self) -> None:
        if self.profiler is None:
            return
        self.at += 1
        self._edge()
        self.profiler.step()

    def end(self) -> None:
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        self.ranges.remove()
        if self.at >= self.edges[1]:
            profiler.stop()
            return
        profiler.on_trace_ready = None  # a part of a step is no measurement
        profiler.stop()
        say(
            f"profile=torch: {self.at} steps were taken, and those to profile are {self.edges[0] + 1} to {self.edges[1]}: there is no trace"
        )

    def _edge(self) -> None:
        """Nothing is under way on the GPU when the profiled steps begin and end: what they launched is theirs, all of it."""
        if self.at in self.edges and torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.at == self.edges[0]:
            self.ranges.add()
        elif self.at == self.edges[1]:
            self.ranges.remove()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"trace-rank{rank()}.json.gz"
        staged = trace.with_name(f".{trace.name}")  # its ending is what makes torch compress it
        profiler.export_chrome_trace(str(staged))
        staged.replace(trace)
        if not is_main_rank():
            return
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        found = kernels_table.summary(events)
        write_json(self.folder / "kernels.json", found)
        say(kernels_table.text(found))
        if self.low_precision:
            modules = fp32_modules.summary(events, found["time_s"])
            write_json(self.folder / "fp32_modules.json", modules)
            say(fp32_modules.text(modules, self.low_precision))
        say(f"profile: {trace} opens at ui.perfetto.dev")


class MemoryProfile(Profile):
    """memory.pickle, torch's snapshot with the history of the first steps, and memory.json. Of the main rank's GPU."""

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.run_dir) / "profile"
        self.recording = False

    def begin(self, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None) -> None:
        self.at, self.last = 0, max(cycle, min(MEMORY_STEPS, num_steps or MEMORY_STEPS))
        self.recording = is_main_rank()
        if self.recording:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")

    def step(self) -> None:
        self.at += 1
        if self.at == self.last:
            self.end()

    def end(self) -> None:
        """Also in the middle of a step that ran out of memory: then the snapshot is worth most."""
        if not self.recording:
            return
        self.recording = False
        self.folder.mkdir(exist_ok=True)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        found = memory_table.summary(snapshot, torch.cuda.memory_stats(), torch.cuda.current_device(), MEMORY_EVENTS)
        write_json(self.folder / "memory.json", {"steps": self.at, **found})
        say(memory_table.text(found))
        say(f"profile: {self.folder / 'memory.pickle'} opens at pytorch.org/memory_viz")


def of(config: DictConfig) -> Profile:
    return {"torch": TorchProfile, "memory": MemoryProfile}.get(config.profile, lambda _: Profile())(config)


@contextlib.contextmanager
def session(config: DictConfig, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None) -> Iterator[Profile]:
    """For a plain loop: call `step` of what is given after each of `num_steps` steps."""
    profile = of(config)
    profile.begin(num_steps, cycle, model)
    try:
        yield profile
    finally:
        profile.end()


def steps(num_steps: int | None, cycle: int = 1) -> tuple[int, int, int]:
    """How many steps are left out, warmed up in and profiled: whole cycles, after SKIPPED steps; of a short run the last ones."""
    active = -(-PROFILED // cycle) * cycle
    first = -(-SKIPPED // cycle) * cycle
    if num_steps is not None and first + active > num_steps:
        active = max(1, min(active, num_steps - 1))
        first = max(0, num_steps - active)
    warmup = min(first, 1)
    return first - warmup, warmup, active
