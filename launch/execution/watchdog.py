"""Detect hangs from the steps, tokens and saved bytes of a run; CPU or GPU load proves nothing."""

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

# Counters of vLLM's /metrics that grow while it answers requests.
TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
# Folders where recipes/ write checkpoints and models before they rename them.
SAVES = ("checkpoints/.staging", ".model.staging", ".model_init.staging")


@dataclass
class Watchdog:
    """Detect that the amount of completed work has not changed for `timeout_s` seconds."""

    timeout_s: float
    last_change: float
    last_progress: Hashable = None

    def hung(self, progress: Hashable, now: float) -> bool:
        if progress != self.last_progress:
            self.last_progress, self.last_change = progress, now
        return self.quiet_s(now) > self.timeout_s

    def quiet_s(self, now: float) -> float:
        """Return the seconds since the last progress."""
        return now - self.last_change


def steps_done(run_dir: Path) -> tuple[int, int]:
    """Return the time (ns) of the last heartbeat and the size of metrics.jsonl; 0 if missing."""
    return _stat(run_dir / "heartbeat", "st_mtime_ns"), _stat(run_dir / "metrics.jsonl", "st_size")


def bytes_saved(run_dir: Path) -> int:
    """Return the bytes written so far of checkpoints and models that are being saved.

    Saving a large checkpoint takes longer than a step.
    """
    folders = (walked for save in SAVES for walked in os.walk(run_dir / save))
    return sum(
        _stat(Path(folder, name), "st_size") for folder, _, names in folders for name in names
    )


def _stat(path: Path, field: str) -> int:
    try:
        return int(getattr(path.stat(), field))
    except OSError:
        return 0


def tokens(metrics: str) -> float:
    """Return the tokens that a server has read and generated so far, from its /metrics."""
    return sum(float(number) for number in TOKENS.findall(metrics))
