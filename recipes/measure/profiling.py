"""Profile a few steady steps of a program: profile=torch (time) and profile=memory.

    with profiling.session(config, num_steps=20) as profile:
        for _ in range(20):
            ...
            profile.step()

train_loop.py does the same for a trainer. docs/profiling.md describes the files.
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
MEMORY_STEPS = 3  # optimizer states do not exist before the end of the first step
MEMORY_EVENTS = 100_000  # allocations and frees, as in torch's memory snapshot tutorial


class Profile:
    """Do nothing, for profile=none, and for profile=rocprof, which runs outside the process."""

    def begin(self, num_steps: int, cycle: int, model: nn.Module | None) -> None:
        """Start before the first of `num_steps` steps; `cycle` is their period."""

    def step(self) -> None:
        """Record that a step has ended."""

    def end(self) -> None:
        """Finish after the last step, or after a failure."""

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class TorchProfile(Profile):
    """Write trace-rank<N>.json.gz on every rank, and kernels.json on the main rank.

    Below fp32, the main rank also writes fp32_modules.json.
    """

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.run_dir) / "profile"
        self.low_precision = (
            config.precision.compute if config.precision.compute != "fp32" else None
        )
        self.profiler: torch.profiler.profile | None = None

    def begin(self, num_steps: int, cycle: int, model: nn.Module | None) -> None:
        wait, warmup, active = steps(num_steps, cycle)
        self.at, self.edges = 0, (wait + warmup, wait + warmup + active)
        self.ranges = fp32_modules.ModuleRanges(model if self.low_precision else None)
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=bool(self.low_precision),  # includes dtypes, for fp32_modules
        )
        self._update_ranges()
        self.profiler.start()

    def step(self) -> None:
        if self.profiler is None:
            return
        self.at += 1
        self._update_ranges()
        self.profiler.step()

    def end(self) -> None:
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        self.ranges.remove()
        last = self.edges[1]
        if self.at < last:
            profiler.on_trace_ready = None  # do not write a partial measurement
            say(f"profile=torch needs {last} steps, but there were {self.at}, so there is no trace")
        profiler.stop()

    def _update_ranges(self) -> None:
        """Mark modules in the profiled steps. Wait for the GPU, so that the trace is complete."""
        if self.at in self.edges and torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.at == self.edges[0]:
            self.ranges.add()
        elif self.at == self.edges[1]:
            self.ranges.remove()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"trace-rank{rank()}.json.gz"
        staged = trace.with_name(f".{trace.name}")  # torch compresses files named .gz
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
    """Write memory.json and torch's snapshot memory.pickle on the main rank."""

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.run_dir) / "profile"
        self.recording = False

    def begin(self, num_steps: int, cycle: int, model: nn.Module | None) -> None:
        self.at, self.last = 0, max(cycle, min(MEMORY_STEPS, num_steps))
        self.recording = is_main_rank()
        if self.recording:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")

    def step(self) -> None:
        self.at += 1
        if self.at == self.last:
            self.end()

    def end(self) -> None:
        """Write the snapshot. It is most useful after running out of memory."""
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


def create_profile(config: DictConfig) -> Profile:
    if config.profile == "torch":
        return TorchProfile(config)
    return MemoryProfile(config) if config.profile == "memory" else Profile()


def session(config: DictConfig, num_steps: int, model: nn.Module | None = None) -> Profile:
    """Return the profile of a plain loop, which calls `step` after each of `num_steps` steps."""
    profile = create_profile(config)
    profile.begin(num_steps, 1, model)
    return profile


def steps(num_steps: int | None, cycle: int = 1) -> tuple[int, int, int]:
    """Return the numbers of steps to skip, warm up and profile.

    Complete cycles are profiled after SKIPPED steps. In a short run, the last steps are profiled.
    """
    active = -(-PROFILED // cycle) * cycle
    first = -(-SKIPPED // cycle) * cycle
    if num_steps is not None and first + active > num_steps:
        active = max(1, min(active, num_steps - 1))
        first = max(0, num_steps - active)
    warmup = min(first, 1)
    return first - warmup, warmup, active
