"""Profile a few steady steps of a program: profile=torch (time) and profile=memory.

    with profiling.session(config, num_steps=20) as profile:
        for _ in range(20):
            ...
            profile.step()

train_loop.py does the same in a Trainer. Files and their content: docs/profiling.md.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from launch.core.json_files import write_json
from recipes.measure import fp32_modules, kernels_table, memory_table
from recipes.rank.program import is_main_rank, rank, say

# The first step allocates memory, the second may compile for another shape, and the third warms up
# the profiler.
SKIPPED = 3
# One step could be an outlier; each further step adds 100 MB of JSON for a 7B model.
PROFILED = 2
MEMORY_STEPS = 3  # the first has no optimizer state until its end
MEMORY_EVENTS = 100_000  # allocations and frees, as in torch's memory snapshot tutorial


class Profile:
    """Do nothing, for profile=none and for profile=rocprof, which profiles from outside."""

    def begin(
        self, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None
    ) -> None:
        """Start before the first of `num_steps` steps (None: unknown); `cycle` steps repeat."""

    def step(self) -> None:
        """Record that a step has ended."""

    def end(self) -> None:
        """Finish after the last step, or after a failure."""

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class TorchProfile(Profile):
    """Write trace-rank<N>.json.gz on every rank and kernels.json on the main one.

    Under mixed precision the main rank also writes fp32_modules.json.
    """

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.run_dir) / "profile"
        self.low_precision = (
            config.precision.compute if config.precision.compute != "fp32" else None
        )
        self.profiler: torch.profiler.profile | None = None

    def begin(
        self, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None
    ) -> None:
        wait, warmup, active = steps(num_steps, cycle)
        self.at, self.edges = 0, (wait + warmup, wait + warmup + active)
        self.ranges = fp32_modules.Ranges(model if self.low_precision else None)
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=bool(self.low_precision),  # includes dtypes, for fp32_modules
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
        last = self.edges[1]
        if self.at < last:
            profiler.on_trace_ready = None  # do not write a partial measurement
            say(f"profile=torch: no trace after {self.at} of {last} steps. Take more steps.")
        profiler.stop()

    def _edge(self) -> None:
        """Wait for the GPU at both ends, so that the trace includes all work of the steps."""
        if self.at in self.edges and torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.at == self.edges[0]:
            self.ranges.add()
        elif self.at == self.edges[1]:
            self.ranges.remove()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"trace-rank{rank()}.json.gz"
        staged = trace.with_name(f".{trace.name}")  # keeps .gz, by which torch compresses
        profiler.export_chrome_trace(str(staged))
        staged.replace(trace)
        if not is_main_rank():
            return
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        kernels = kernels_table.summary(events)
        write_json(self.folder / "kernels.json", kernels)
        say(kernels_table.text(kernels))
        if self.low_precision:
            modules = fp32_modules.summary(events, kernels["time_s"])
            write_json(self.folder / "fp32_modules.json", modules)
            say(fp32_modules.text(modules, self.low_precision))
        say(f"profile: {trace} opens at ui.perfetto.dev")


class MemoryProfile(Profile):
    """Write memory.pickle, torch's snapshot, and memory.json, on the main rank."""

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.run_dir) / "profile"
        self.recording = False

    def begin(
        self, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None
    ) -> None:
        self.at, self.last = 0, max(cycle, min(MEMORY_STEPS, num_steps or MEMORY_STEPS))
        self.recording = is_main_rank()
        if self.recording:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")

    def step(self) -> None:
        self.at += 1
        if self.at == self.last:
            self.end()

    def end(self) -> None:
        """Write the snapshot, also after running out of memory, when it is most useful."""
        if not self.recording:
            return
        self.recording = False
        self.folder.mkdir(exist_ok=True)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        table = memory_table.summary(
            snapshot, torch.cuda.memory_stats(), torch.cuda.current_device(), MEMORY_EVENTS
        )
        write_json(self.folder / "memory.json", {"steps": self.at, **table})
        say(memory_table.text(table))
        say(f"profile: {self.folder / 'memory.pickle'} opens at pytorch.org/memory_viz")


def of(config: DictConfig) -> Profile:
    if config.profile == "torch":
        return TorchProfile(config)
    return MemoryProfile(config) if config.profile == "memory" else Profile()


def session(
    config: DictConfig, num_steps: int | None = None, cycle: int = 1, model: nn.Module | None = None
) -> Profile:
    """Return the profile of a plain loop, which calls `step` after each of `num_steps` steps."""
    profile = of(config)
    profile.begin(num_steps, cycle, model)
    return profile


def steps(num_steps: int | None, cycle: int = 1) -> tuple[int, int, int]:
    """Return the numbers of skipped, warm-up and profiled steps.

    The profiled steps are whole cycles after SKIPPED steps, or the last steps of a short run.
    """
    active = -(-PROFILED // cycle) * cycle
    first = -(-SKIPPED // cycle) * cycle
    if num_steps is not None and first + active > num_steps:
        active = max(1, min(active, num_steps - 1))
        first = max(0, num_steps - active)
    warmup = min(first, 1)
    return first - warmup, warmup, active
