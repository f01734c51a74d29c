"""Search the last hour of the kernel log for errors of GPUs and memory."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
import time
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine.sysfs import as_decimal, as_number, status_of, text

HOUR_S = 3600.0
SHOWN = 100  # characters shown of a line
JOURNAL_LINES = 10_000  # more than an hour's worth
# Events of the GPU or its link. Each pattern names the driver, because other devices have rings,
# resets and hangs too.
BAD = {
    "xGMI error": re.compile(r"xgmi.*(error|fail)", re.IGNORECASE),
    "ring timeout": re.compile(r"amdgpu.*\bring \S+ timeout", re.IGNORECASE),
    "GPU reset": re.compile(r"amdgpu.*gpu reset(?! method)", re.IGNORECASE),
    "GPU hang": re.compile(r"(amdgpu|kfd).*\b(hang|hung)\b", re.IGNORECASE),
    # From the firmware that schedules queues (HWS up to gfx10, MES from gfx11 on). Older kernels
    # wrote "failed to response".
    "queue that hangs": re.compile(
        r"(amdgpu|kfd).*(qcm fence wait loop timeout|queue preemption failed|\bMES(\(\d+\))? "
        r"failed to respon(d|se))",
        re.IGNORECASE,
    ),
    "lost GPU": re.compile(
        r"amdgpu.*(device lost from bus|fatal error during GPU init)", re.IGNORECASE
    ),
    "uncorrectable error": re.compile(
        r"amdgpu.*([1-9]\d* (new )?uncorrectable|uncorrectable hardware error\(|poison.*consum)",
        re.IGNORECASE,
    ),
    "NVIDIA Xid": re.compile(r"NVRM: Xid (?!.*: (13|31|43|45),)"),
}
# Events that a program caused, on the GPU or in itself, and tasks that wait for a GPU or a disk.
SUSPECT = {
    "page fault": re.compile(r"amdgpu.*page fault", re.IGNORECASE),
    "a program's Xid": re.compile(r"NVRM: Xid .*: (13|31|43|45),"),
    "stuck task": re.compile(r"blocked for more than \d+ seconds"),
}
OUT_OF_MEMORY = re.compile(r"out of memory: killed process|oom-kill:", re.IGNORECASE)
STAMP = re.compile(
    r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*|\w{3} [ \d]\d \d\d:\d\d:\d\d) \S+ kernel: (.*)$"
)


def kernel_log(facts: Facts) -> Finding:
    expected = Expected(
        "no XGMI, ring, reset, hang, fault or out-of-memory line in the last hour",
        "launch/checks/kernel_log.py (patterns)",
    )
    lines = last_hour(facts)
    if lines is None:
        read = "closed to this user" if facts.is_live else "not in this tree"
        return expected.unknown(read, "sudo dmesg --level err,warn")
    if bad := _matches(lines, BAD):
        name, line = bad[-1]
        reset = "sudo amd-smi reset --gpureset --gpu <N>"
        if name == "NVIDIA Xid":
            reset = "sudo nvidia-smi --gpu-reset -i <N>"
        cure = (
            f"stop what runs; {reset}, or reboot; if it comes back, leave that GPU out or "
            "replace it"
        )
        return expected.fail(f"{len(bad)} line(s); the last ({name}): {line[:SHOWN]}", cure)
    if killed := [line for line in lines if OUT_OF_MEMORY.search(line)]:
        cure = (
            "less host memory in use: fewer loader workers, no offload to the CPU, "
            "runtime.memory_gb=<limit>; free -h"
        )
        read = f"{len(killed)} process(es) killed for memory: {killed[-1][:SHOWN]}"
        return expected.warn(read, cure)
    if suspect := _matches(lines, SUSPECT):
        name, line = suspect[-1]
        cure = "look at the process that it names; a fault of a run of ours: debug=memory_fault"
        return expected.warn(f"{len(suspect)} line(s); the last ({name}): {line[:SHOWN]}", cure)
    return expected.passed(f"{len(lines)} lines, none of them")


def _matches(lines: list[str], patterns: dict[str, re.Pattern[str]]) -> list[tuple[str, str]]:
    return [(name, line) for line in lines for name, p in patterns.items() if p.search(line)]


def last_hour(facts: Facts) -> list[str] | None:
    """Return the last hour of the first readable source: kernel buffer, journal or kern.log."""
    uptime_s = as_decimal(facts.file("proc/uptime"))
    records = live_records() if facts.is_live else text(facts.root / "dev/kmsg")
    if records is not None and uptime_s is not None:
        return recent(records, uptime_s)
    if facts.is_live and (output := live_journal()):
        return recent_journal(output, time.time())
    file = facts.root / "var/log/kern.log"
    status = status_of(file)
    if facts.is_live and status and status.st_mtime < time.time() - HOUR_S:
        return []
    return kern_log(file)


def live_records() -> str | None:
    """Read /dev/kmsg. Each read returns one record, oldest first, and None after the newest."""
    records: list[bytes] = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            while True:
                # A record that is overwritten meanwhile raises; continue with the next one.
                with contextlib.suppress(BrokenPipeError):
                    if not (record := file.read(8192)):
                        break
                    records.append(record)
    except OSError:
        return None
    return b"".join(records).decode(errors="replace") or None


def recent(records: str, uptime_s: float) -> list[str]:
    """Return recent messages from `priority,sequence,microseconds since boot,flags;message` lines.

    Source: Documentation/ABI/testing/dev-kmsg.
    """
    messages = []
    for record in records.splitlines():
        head, _, message = record.partition(";")
        fields = head.split(",")
        since_boot_us = as_number(fields[2]) if len(fields) > 2 else None
        if since_boot_us is not None and since_boot_us / 1e6 >= uptime_s - HOUR_S:
            messages.append(message)
    return messages


def live_journal() -> str:
    """Return the end of this boot's journal; empty for a user who may not read it."""
    argv = ["journalctl", "--dmesg", f"--lines={JOURNAL_LINES}", "--output=short-unix"]
    argv += ["--no-pager", "--quiet"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def recent_journal(output: str, now_s: float) -> list[str]:
    """Return the recent messages of `seconds.microseconds host kernel: message` lines."""
    rows = [row for line in output.splitlines() if len(row := line.split(" ", 3)) == 4]
    return [row[3] for row in rows if (as_decimal(row[0]) or 0) >= now_s - HOUR_S]


def kern_log(file: Path) -> list[str] | None:
    """Return the messages of the file's last hour, in either of rsyslog's formats."""
    rows = []
    for match in filter(None, map(STAMP.match, (text(file) or "").splitlines())):
        with contextlib.suppress(ValueError):
            if match[1][:4].isdecimal():
                when = datetime.datetime.fromisoformat(match[1])
            else:  # differences within a day need no year
                when = datetime.datetime.strptime(f"2000 {match[1]}", "%Y %b %d %H:%M:%S")
            rows.append((when if when.tzinfo else when.replace(tzinfo=datetime.UTC), match[2]))
    if not rows:
        return None
    newest = rows[-1][0]
    return [message for when, message in rows if (newest - when).total_seconds() <= HOUR_S]
