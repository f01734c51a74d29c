"""Show a run's logs and, on a terminal, a status line below them from metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from launch.execution.logs import Follower
from launch.schema.plan import Plan


class Progress:
    """A context manager that shows the status line; `update()` reads the newest metrics."""

    def __init__(self, plan: Plan) -> None:
        self.console = Console(stderr=True)
        self.metrics = Follower(plan.run_dir / "metrics.jsonl")
        self.label = f"{plan.config.method.name} {plan.config.model.name}"
        self.started = time.monotonic()
        is_service = plan.config.method.kind == "service"
        activity = "until Ctrl-C" if is_service else "starting (imports and model)"
        self.line = f"{self.label}: {activity}"
        self.status = Status(Text(self.line), console=self.console)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.status.start()
        else:
            self.console.print(self.line, highlight=False, markup=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def update(self) -> None:
        with contextlib.suppress(ValueError, IndexError):  # a damaged row, or none
            row = json.loads(self.metrics.lines()[-1])
            if isinstance(row, dict):
                self.line = f"{self.label}: {describe(row)}"
        if self.console.is_terminal:
            passed = (f" {time.monotonic() - self.started:.0f} s", "dim")
            self.status.update(Text.assemble(self.line, passed))

    def say(self, activity: str) -> None:
        """Show what the run is doing, until the next step is logged."""
        line = f"{self.label}: {activity}"
        if line != self.line:
            self.line = line
            if not self.console.is_terminal:
                self.console.print(line, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Print text above the status line."""
        self.console.print(Text(text), soft_wrap=True)

    def log(self, process: str, lines: list[str]) -> None:
        """Print lines of a process group's log, each after the group's name."""
        if lines:
            self.note("\n".join(f"{process} | {line}" for line in lines))


def describe(row: dict[str, Any]) -> str:
    """Return the row's step, loss or reward, tokens/s, time left and peak memory, if known."""
    done, total = row.get("step"), row.get("num_steps")
    parts = [f"step {done}/{total}" if total else f"step {done}"]
    for key in ("loss", "eval_loss", "reward", "accuracy"):
        if isinstance(row.get(key), (int, float)):
            parts.append(f"{key} {row[key]:.3g}")
    if row.get("tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("time_s") and done and total:
        minutes, seconds = divmod(round(row["time_s"] / done * (total - done)), 60)
        parts.append(f"{minutes} min {seconds:02d} s left")
    if row.get("memory_peak_gb"):
        parts.append(f"peak {row['memory_peak_gb']:.1f} GB")
    return ", ".join(parts)
