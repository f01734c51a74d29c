"""Decide whether a run makes progress, by steps, tokens and saved bytes rather than by load."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

# Counters of vLLM's /metrics that grow while it answers requests.
TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
# Where recipes/ write before they rename.
SAVES = ("checkpoints/.staging", ".model.staging", ".model_init.staging")


@dataclass
class Watchdog:
    """Notice if the amount of work done does not change for too long. Times are in seconds."""

    timeout_s: float
    last_change: float
    seen: Hashable = None

    def hung(self, done: Hashable, now: float) -> bool:
        if done != self.seen:
            self.seen, self.last_change = done, now
        return self.quiet_s(now) > self.timeout_s

    def quiet_s(self, now: float) -> float:
        """Return for how many seconds nothing has changed."""
        return now - self.last_change


def steps_done(run_dir: Path) -> tuple[int, int]:
    """Return when a rank last made progress, and how much it logged; zeros before training."""
    return _stat(run_dir / "heartbeat", "st_mtime_ns"), _stat(run_dir / "metrics.jsonl", "st_size")


def bytes_saved(run_dir: Path) -> int:
    """Return the size of what is being saved, since a large checkpoint takes longer than a step."""
    folders = (walked for save in SAVES for walked in os.walk(run_dir / save))
    return sum(
        _stat(Path(folder, name), "st_size") for folder, _, names in folders for name in names
    )


def _stat(path: Path, what: str) -> int:
    try:
        return int(getattr(path.stat(), what))
    except OSError:
        return 0


def tokens(metrics: str) -> float:
    """Return the tokens that a server has read and generated, according to its /metrics."""
    return sum(float(number) for number in TOKENS.findall(metrics))
