"""Where processes stand, for one that hangs: py-spy looks from outside; where it may not, a rank writes its own stacks into its log."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WITHIN_S = 30.0
AT_ONCE = 16  # eight ranks with their dataloader workers are done in a few rounds


def dump(pids: list[int], folder: Path) -> None:
    """A file for each Python process among them, named by its rank, where it has one, and its pid. Raises OSError."""
    wanted = [pid for pid in pids if "python" in _program(pid)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for pid, found in zip(wanted, pool.map(_stacks, wanted), strict=True):
            (folder / f"{_rank(pid)}{pid}.txt").write_text(f"{_command(pid)}\n\n{found}\n")


def _stacks(pid: int) -> str:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        reason = "py-spy is not installed"
    else:
        try:
            done = subprocess.run([program, "dump", "--pid", str(pid)], capture_output=True, text=True, errors="replace", timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            reason = f"py-spy had no answer in {WITHIN_S:g} s"
        else:
            if done.returncode == 0:
                return done.stdout
            reason = done.stderr.strip() or f"py-spy ended with {done.returncode}"
    if not _catches(pid, signal.SIGUSR1):
        return f"no stacks: {reason}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    return f"its stacks are in its log: {reason}"


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether it has a handler for this signal, which would end it otherwise."""
    caught = next((line.split()[1] for line in _text(pid, "status").splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def _command(pid: int) -> str:
    return " ".join(_text(pid, "cmdline").split("\0"))


def _rank(pid: int) -> str:
    """`rank3-`, or nothing for what is no rank; what a rank started (dataloader workers, a verifier) has its number too."""
    found = next((pair for pair in _text(pid, "environ").split("\0") if pair.startswith("RANK=")), "")
    return f"rank{found.removeprefix('RANK=')}-" if found else ""


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
