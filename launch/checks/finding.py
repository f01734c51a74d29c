"""Define the result of a check, and the functions with which checks create one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    passed = "pass"
    warn = "warn"  # slower, or a risk
    fail = "fail"  # a run would fail, hang or rely on wrong figures
    unknown = "unknown"


@dataclass(frozen=True)
class Finding:
    status: Status
    read: str
    cure: str = ""  # the command, or what to do; empty if it passes
    threshold: str = ""  # like source, empty for the one in checks.yaml
    source: str = ""

    def expecting(self, threshold: str, source: str = "") -> Finding:
        """Return the finding with its own threshold."""
        return dataclasses.replace(self, threshold=threshold, source=source)


def passed(read: str) -> Finding:
    return Finding(Status.passed, read)


def warn(read: str, cure: str) -> Finding:
    return Finding(Status.warn, read, cure)


def fail(read: str, cure: str) -> Finding:
    return Finding(Status.fail, read, cure)


def unknown(read: str, cure: str) -> Finding:
    return Finding(Status.unknown, read, cure)


def judge(value: object, passes: bool, cure: str, look: str) -> Finding:
    """Pass or warn about a value; if it is None, `look` is the command to find out."""
    if value is None:
        return unknown("cannot be read here", look)
    return passed(str(value)) if passes else warn(str(value), cure)


def fail_or_warn(fails: bool, read: str, cure: str) -> Finding:
    return fail(read, cure) if fails else warn(read, cure)


def boot_with(parameters: str) -> str:
    """Return the command that boots the kernel with these parameters."""
    return (
        f"add {parameters} to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub "
        f"(Fedora, RHEL: sudo grubby --update-kernel=ALL --args='{parameters}'), reboot"
    )


def some(words: list[str], most: int = 4) -> str:
    return "; ".join(words[:most])
