"""Dump the stacks of hung processes with py-spy; without it, ranks print them into their logs."""

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

TIMEOUT_S = 30.0
NUM_THREADS = 16  # eight ranks with their dataloader workers need a few rounds


def dump(pids: list[int], folder: Path) -> None:
    """Write the stacks of each Python process among `pids` to rankN-PID.txt or PID.txt in `folder`.

    Raises OSError.
    """
    pythons = []
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has just exited
            if "python" in Path(os.readlink(f"/proc/{pid}/exe")).name:
                pythons.append(pid)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for pid, stacks in zip(pythons, pool.map(stacks_of, pythons), strict=True):
            # Children of a rank, such as dataloader workers, inherit RANK.
            rank = re.search(r"(?:^|\0)RANK=(\d+)", text(f"/proc/{pid}/environ") or "")
            name = f"rank{rank[1]}-{pid}.txt" if rank else f"{pid}.txt"
            command = (text(f"/proc/{pid}/cmdline") or "").replace("\0", " ")
            (folder / name).write_text(f"{command}\n\n{stacks}\n")


def stacks_of(pid: int) -> str:
    """Return the stacks from py-spy. If it fails, signal the rank to print them; return why."""
    folder_of_python = str(Path(sys.executable).parent)
    program = shutil.which("py-spy") or shutil.which("py-spy", path=folder_of_python)
    reason = "py-spy is not installed"
    if program is not None:
        argv = [program, "dump", "--pid", str(pid)]
        try:
            result = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
            )
            if result.returncode == 0:
                return result.stdout
            reason = result.stderr.strip() or f"py-spy exited with {result.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"py-spy did not answer within {TIMEOUT_S:g} s"
    # SIGUSR1 would kill a process that has no handler for it.
    caught = re.search(r"^SigCgt:\s*(\w+)", text(f"/proc/{pid}/status") or "", re.MULTILINE)
    if not caught or not int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
        return f"no stacks: {reason}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    return f"{reason}, so the stacks are in this rank's log"
