"""What a run is doing: its logs, and on a terminal a moving line below them, read from metrics.jsonl while that grows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.status import Status
from rich.text import Text

from launch.command_line.stream import Unwatched
from launch.plan import Plan


class Progress:
    """A context manager; `update()` reads what has been written since the last call."""

    def __init__(self, plan: Plan) -> None:
        self.console = Console(file=cast(TextIO, Unwatched(sys.stderr)))
        self.file: Path = plan.run_dir / "metrics.jsonl"
        self.label = f"{plan.config.method.name} {plan.config.model.name}"
        self.offset = self.file.stat().st_size if self.file.exists() else 0
        self.started = time.monotonic()
        self.line = f"{self.label}: starting (imports and model)"
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
        row = self._newest()
        if row:
            self.line = f"{self.label}: {describe(row)}"
        if self.console.is_terminal:
            self.status.update(Text.assemble(self.line, (f" {time.monotonic() - self.started:.0f} s", "dim")))

    def say(self, what: str) -> None:
        """What is going on now, where no step says it."""
        line = f"{self.label}: {what}"
        if line != self.line:
            self.line = line
            if not self.console.is_terminal:
                self.console.print(line, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """What stays on the screen and changes nothing of what is going on."""
        self.console.print(Text(text), soft_wrap=True)

    def log(self, process: str, lines: list[str]) -> None:
        """Lines of a process group's log, under its name."""
        if lines:
            self.console.print(Text("\n".join(f"{process} | {line}" for line in lines)), soft_wrap=True)

    def _newest(self) -> dict[str, Any] | None:
        """The last whole line added since the last look."""
        try:
            with self.file.open("rb") as file:
                size = file.seek(0, 2)
                self.offset = 0 if size < self.offset else self.offset  # a resumed run cut off what it will do again
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # nothing is logged yet
            return None
        self.offset += len(whole) + len(newline)
        try:
            row = json.loads(whole.splitlines()[-1]) if whole else None
        except ValueError:
            return None
        return row if isinstance(row, dict) else None


def describe(row: dict[str, Any]) -> str:
    """step 40/400, loss or reward, tokens/s, time left, most memory held (the GPU's where there is one): whatever the row has."""
    done, total = row.get("step"), row.get("num_steps")
    parts = [f"step {done}/{total}" if total else f"step {done}"]
    parts += [f"{key} {row[key]:.3g}" for key in ("loss", "eval_loss", "reward", "accuracy") if isinstance(row.get(key), (int, float))]
    if row.get("tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("time_s") and done and total:
        minutes, seconds = divmod(round(row["time_s"] / done * (total - done)), 60)
        parts.append(f"{minutes} min {seconds:02d} s left")
    if row.get("memory_peak_gb"):
        parts.append(f"peak {row['memory_peak_gb']:.1f} GB")
    return ", ".join(parts)
