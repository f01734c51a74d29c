"""Search the last hour of the kernel log for GPU and memory errors."""

from __future__ import annotations

import contextlib
import datetime
import re
import subprocess
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, passed, unknown, warn
from launch.core.json_files import yaml_file

HOUR = datetime.timedelta(hours=1)
MAX_SHOWN = 100  # characters of a line
# The first command that prints a log is used. Both start each line with an ISO time, like kern.log.
COMMANDS = (
    ["dmesg", "--time-format=iso"],
    ["journalctl", "--dmesg", "--lines=10000", "--output=short-iso", "--no-pager", "--quiet"],
)
PATTERNS: dict[str, dict[str, str]] = yaml_file(Path(__file__).with_name("kernel_log.yaml"))


def kernel_log(facts: Facts) -> Finding:
    lines = last_hour(facts)
    if lines is None:
        reading = "this user may not read it" if facts.is_live else "not in this tree"
        return unknown(reading, "sudo dmesg --level err,warn")
    if bad := _matches(lines, "bad"):
        name, line = bad[-1]
        reset = "sudo amd-smi reset --gpureset --gpu <N>"
        if name == "NVIDIA Xid":
            reset = "sudo nvidia-smi --gpu-reset -i <N>"
        remedy = (
            f"stop all processes on the GPU, then {reset}, or reboot; if the error returns, "
            "exclude or replace that GPU"
        )
        return fail(f"{len(bad)} line(s); the last ({name}): {line[:MAX_SHOWN]}", remedy)
    if killed := _matches(lines, "memory"):
        remedy = (
            "use less host memory: hardware.dataloader.num_workers=<fewer>, no offload to the "
            "CPU, or runtime.memory_gb=<limit>; free -h shows the use"
        )
        line = killed[-1][1][:MAX_SHOWN]
        return warn(f"{len(killed)} process(es) killed for lack of memory: {line}", remedy)
    if suspect := _matches(lines, "suspect"):
        name, line = suspect[-1]
        remedy = (
            "check the process that the line names; debug=memory_fault locates the problem in a run"
        )
        return warn(f"{len(suspect)} line(s); the last ({name}): {line[:MAX_SHOWN]}", remedy)
    return passed(f"{len(lines)} lines, none of them an error")


def _matches(lines: list[str], kind: str) -> list[tuple[str, str]]:
    return [
        (name, line) for line in lines for name, p in PATTERNS[kind].items() if re.search(p, line)
    ]


def last_hour(facts: Facts) -> list[str] | None:
    """Return the kernel's messages of the last hour; None if the log cannot be read.

    In a copied tree, return the messages of the hour before the newest line of var/log/kern.log.
    """
    if facts.is_live:
        content = next(filter(None, map(_output, COMMANDS)), "")
    else:
        content = facts.file("var/log/kern.log") or ""
    rows = []
    for line in content.splitlines():
        stamp, _, message = line.partition(" ")
        with contextlib.suppress(ValueError):
            when = datetime.datetime.fromisoformat(stamp)
            rows.append((when if when.tzinfo else when.replace(tzinfo=datetime.UTC), message))
    if not rows:
        return None
    end = datetime.datetime.now(datetime.UTC) if facts.is_live else rows[-1][0]
    return [message for when, message in rows if end - when <= HOUR]


def _output(command: list[str]) -> str:
    """Return a command's output; empty if the user may not read the log."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=False, errors="replace"
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
