"""Whether a run still gets on: by what it has done (steps, micro-batches, generated tokens, saved bytes), not by how busy it is."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

# Counters of vLLM's /metrics; what grows while it answers.
TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
SAVES = ("checkpoints/.staging", ".model.staging", ".model_init.staging")  # where recipes/ write before they rename


@dataclass
class Watchdog:
    """Told now and then what has been done; says when that has not changed for too long. Times in seconds."""

    timeout_s: float
    last_change: float
    seen: Hashable = None

    def hung(self, done: Hashable, now: float) -> bool:
        if done != self.seen:
            self.seen, self.last_change = done, now
        return now - self.last_change > self.timeout_s

    def quiet_s(self, now: float) -> float:
        """How long nothing has changed."""
        return now - self.last_change


def steps_done(run_dir: Path) -> tuple[int, int]:
    """When a rank last got on, and how much it has logged; zeros before training begins."""
    return _stat(run_dir / "heartbeat", "st_mtime_ns"), _stat(run_dir / "metrics.jsonl", "st_size")


def bytes_saved(run_dir: Path) -> int:
    """Of a checkpoint or a model that is being written: a large one takes longer than a step."""
    folders = (walked for save in SAVES for walked in os.walk(run_dir / save))
    return sum(_stat(Path(folder, name), "st_size") for folder, _, names in folders for name in names)


def _stat(path: Path, what: str) -> int:
    try:
        return int(getattr(path.stat(), what))
    except OSError:
        return 0


def tokens(metrics: str) -> float:
    """Tokens that a server has read and generated, by its /metrics."""
    return sum(float(number) for number in TOKENS.findall(metrics))
