"""Dump the stacks of hung processes by py-spy, else by the rank itself into its log."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch.machine.sysfs import text

WITHIN_S = 30.0
AT_ONCE = 16  # so that eight ranks with their dataloader workers take a few rounds


def dump(pids: list[int], folder: Path) -> None:
    """Write a file for each Python process among `pids`, named by rank (if any) and pid.

    Raises OSError.
    """
    pythons = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            if "python" in Path(os.readlink(f"/proc/{pid}/exe")).name:
                pythons.append(pid)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for pid, stacks in zip(pythons, pool.map(stacks_of, pythons), strict=True):
            # Processes that a rank has started, such as dataloader workers, have its number too.
            rank = re.search(r"(?:^|\0)RANK=(\d+)", text(f"/proc/{pid}/environ") or "")
            name = f"rank{rank[1]}-{pid}.txt" if rank else f"{pid}.txt"
            command = (text(f"/proc/{pid}/cmdline") or "").replace("\0", " ")
            (folder / name).write_text(f"{command}\n\n{stacks}\n")


def stacks_of(pid: int) -> str:
    """Return the stacks from py-spy, or why it has none and where to find them."""
    folder_of_python = str(Path(sys.executable).parent)
    program = shutil.which("py-spy") or shutil.which("py-spy", path=folder_of_python)
    reason = "py-spy is not installed"
    if program is not None:
        argv = [program, "dump", "--pid", str(pid)]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=WITHIN_S
            )
            if done.returncode == 0:
                return done.stdout
            reason = done.stderr.strip() or f"py-spy ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"py-spy did not answer within {WITHIN_S:g} s"
    # SIGUSR1 would end a process without a handler for it.
    caught = re.search(r"^SigCgt:\s*(\w+)", text(f"/proc/{pid}/status") or "", re.MULTILINE)
    if not caught or not int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
        return f"no stacks: {reason}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    return f"its stacks are in its log: {reason}"
