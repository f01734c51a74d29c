"""What the kernel wrote of GPUs and memory in the last hour."""

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
SHOWN = 100  # characters of a line
JOURNAL_LINES = 10_000  # of an hour, with room
# What the GPU, or its link, did. Each names the driver: other devices have rings, resets and hangs too.
BAD = {
    "xGMI error": re.compile(r"xgmi.*(error|fail)", re.IGNORECASE),
    "ring timeout": re.compile(r"amdgpu.*\bring \S+ timeout", re.IGNORECASE),
    "GPU reset": re.compile(r"amdgpu.*gpu reset(?! method)", re.IGNORECASE),
    "GPU hang": re.compile(r"(amdgpu|kfd).*\b(hang|hung)\b", re.IGNORECASE),
    # Of the firmware that schedules queues (HWS up to gfx10, MES from gfx11 on); earlier kernels wrote "failed to response".
    "queue that hangs": re.compile(
        r"(amdgpu|kfd).*(qcm fence wait loop timeout|queue preemption failed|\bMES(\(\d+\))? failed to respon(d|se))", re.IGNORECASE
    ),
    "lost GPU": re.compile(r"amdgpu.*(device lost from bus|fatal error during GPU init)", re.IGNORECASE),
    "uncorrectable error": re.compile(
        r"amdgpu.*([1-9]\d* (new )?uncorrectable|uncorrectable hardware error\(|poison.*consum)", re.IGNORECASE
    ),
    "NVIDIA Xid": re.compile(r"NVRM: Xid (?!.*: (13|31|43|45),)"),
}
# What a program did, to the GPU or to itself; and tasks that wait, for a GPU or for a disk.
SUSPECT = {
    "page fault": re.compile(r"amdgpu.*page fault", re.IGNORECASE),
    "a program's Xid": re.compile(r"NVRM: Xid .*: (13|31|43|45),"),
    "stuck task": re.compile(r"blocked for more than \d+ seconds"),
}
OUT_OF_MEMORY = re.compile(r"out of memory: killed process|oom-kill:", re.IGNORECASE)
STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*|\w{3} [ \d]\d \d\d:\d\d:\d\d) \S+ kernel: (.*)$")


def kernel_log(facts: Facts) -> Finding:
    expected = Expected(
        "no XGMI, ring, reset, hang, fault or out-of-memory line in the last hour", "launch/checks/kernel_log.py (patterns)"
    )
    lines = last_hour(facts)
    if lines is None:
        return expected.unknown(
            "closed to this user" if facts.is_live else "not in this tree",
            "sudo dmesg --level err,warn",
        )
    bad, suspect = (
        [(name, line) for line in lines for name, pattern in patterns.items() if pattern.search(line)] for patterns in (BAD, SUSPECT)
    )
    killed = [line for line in lines if OUT_OF_MEMORY.search(line)]
    if bad:
        name, line = bad[-1]
        tool = "sudo nvidia-smi --gpu-reset -i <N>" if name == "NVIDIA Xid" else "sudo amd-smi reset --gpureset --gpu <N>"
        cure = f"stop what runs; {tool}, or reboot; if it comes back, leave that GPU out or replace it"
        return expected.fail(f"{len(bad)} line(s); the last ({name}): {line[:SHOWN]}", cure)
    if killed:
        cure = "less host memory in use: fewer loader workers, no offload to the CPU, runtime.memory_gb=<limit>; free -h"
        return expected.warn(f"{len(killed)} process(es) killed for memory: {killed[-1][:SHOWN]}", cure)
    if suspect:
        name, line = suspect[-1]
        cure = "look at the process that it names; a fault of a run of ours: debug=memory_fault"
        return expected.warn(f"{len(suspect)} line(s); the last ({name}): {line[:SHOWN]}", cure)
    return expected.passed(f"{len(lines)} lines, none of them")


def last_hour(facts: Facts) -> list[str] | None:
    """Messages of the kernel's own buffer, of the journal, or of kern.log: the first that may be read."""
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
        return []  # its last line is older than that
    return _kern_log(file)


def _recent(records: str, uptime_s: float) -> list[str]:
    """`priority,sequence,microseconds since boot,flags;message` (Documentation/ABI/testing/dev-kmsg)."""
    found = []
    for record in records.splitlines():
        head, _, message = record.partition(";")
        fields = head.split(",")
        since_boot_us = as_number(fields[2]) if len(fields) >= 3 else None
        if since_boot_us is not None and since_boot_us / 1e6 >= uptime_s - HOUR_S:
            found.append(message)
    return found


def _read_live() -> str | None:
    """/dev/kmsg gives a record a read, from the oldest, and EAGAIN after the newest."""
    found: list[str] = []
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
            except BrokenPipeError:  # overwritten while we read: go on with the next
                continue
            if not record:  # at once where a container has a link to another device there
                return "".join(found) or None
            found.append(record.decode(errors="replace"))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _journal() -> list[str] | None:
    """Of this boot. One that is empty is one that this user may not read."""
    command = ["journalctl", "--dmesg", f"--lines={JOURNAL_LINES}", "--output=short-unix", "--no-pager", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _recent_journal(done.stdout, time.time()) if done.stdout else None


def _recent_journal(output: str, now_s: float) -> list[str]:
    """`seconds.microseconds host kernel: message`"""
    rows = [line.split(" ", 3) for line in output.splitlines()]
    return [row[3] for row in rows if len(row) == 4 and (when := as_decimal(row[0])) is not None and when >= now_s - HOUR_S]


def _kern_log(file: Path) -> list[str] | None:
    """The hour before its last line."""
    rows = [
        (when, match.group(2))
        for line in (text(file) or "").splitlines()
        if (match := STAMP.match(line)) and (when := _when(match.group(1)))
    ]
    if not rows:
        return None
    newest = rows[-1][0]
    return [message for when, message in rows if (newest - when).total_seconds() <= HOUR_S]


def _when(stamp: str) -> datetime.datetime | None:
    """Of rsyslog's two forms; the older one has no year, and differences within a day need none."""
    try:
        if stamp[:4].isdecimal():
            when = datetime.datetime.fromisoformat(stamp)
            return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
        return datetime.datetime.strptime(f"2000 {stamp}", "%Y %b %d %H:%M:%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return None
