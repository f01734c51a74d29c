"""Search the last hour of the kernel log for errors of GPUs and memory."""

from __future__ import annotations

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
    records = _read_live() if facts.is_live else text(facts.root / "dev/kmsg")
    if records is not None and uptime_s is not None:
        return _recent(records, uptime_s)
    journal = _journal() if facts.is_live else None
    if journal is not None:
        return journal
    file = facts.root / "var/log/kern.log"
    status = status_of(file)
    if facts.is_live and status and status.st_mtime < time.time() - HOUR_S:
        return []
    return _kern_log(file)


def _recent(records: str, uptime_s: float) -> list[str]:
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


def _read_live() -> str | None:
    """Read /dev/kmsg. Each read returns one record, oldest first, and EAGAIN after the newest."""
    records: list[str] = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                record = b""
            except BrokenPipeError:  # overwritten while we read: continue with the next record
                continue
            if not record:  # returned at once if a container links another device there
                return "".join(records) or None
            records.append(record.decode(errors="replace"))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _journal() -> list[str] | None:
    """Return this boot's journal; None if it is empty, as for a user who may not read it."""
    argv = ["journalctl", "--dmesg", f"--lines={JOURNAL_LINES}", "--output=short-unix"]
    argv += ["--no-pager", "--quiet"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _recent_journal(done.stdout, time.time()) if done.stdout else None


def _recent_journal(output: str, now_s: float) -> list[str]:
    """Return the recent messages of `seconds.microseconds host kernel: message` lines."""
    rows = [line.split(" ", 3) for line in output.splitlines()]
    return [
        row[3]
        for row in rows
        if len(row) == 4 and (when := as_decimal(row[0])) is not None and when >= now_s - HOUR_S
    ]


def _kern_log(file: Path) -> list[str] | None:
    """Return the messages of the hour before the file's last line."""
    matches = filter(None, map(STAMP.match, (text(file) or "").splitlines()))
    rows = [(when, match[2]) for match in matches if (when := _when(match[1]))]
    if not rows:
        return None
    newest = rows[-1][0]
    return [message for when, message in rows if (newest - when).total_seconds() <= HOUR_S]


def _when(stamp: str) -> datetime.datetime | None:
    """Parse rsyslog's two time formats; differences within a day need no year."""
    try:
        if stamp[:4].isdecimal():
            when = datetime.datetime.fromisoformat(stamp)
            return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
        when = datetime.datetime.strptime(f"2000 {stamp}", "%Y %b %d %H:%M:%S")
        return when.replace(tzinfo=datetime.UTC)
    except ValueError:
        return None
