"""Define the result of a check, and functions that create it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    passed = "pass"
    warn = "warn"  # a run would be slower or at risk
    fail = "fail"  # a run would fail, hang or rely on wrong numbers
    unknown = "unknown"


@dataclass(frozen=True)
class Finding:
    status: Status
    read: str  # what the check found on this machine
    cure: str = ""  # the remedy, if possible as a command; empty if the check passes
    threshold: str = ""  # empty: as in checks.yaml
    source: str = ""  # empty: as in checks.yaml

    def expecting(self, threshold: str, source: str = "") -> Finding:
        """Return the finding with a threshold and source that replace those in checks.yaml."""
        return dataclasses.replace(self, threshold=threshold, source=source)


# Each takes what the check found and, except `passed`, the remedy.
passed = functools.partial(Finding, Status.passed)
warn = functools.partial(Finding, Status.warn)
fail = functools.partial(Finding, Status.fail)
unknown = functools.partial(Finding, Status.unknown)


def judge(value: object, passes: bool, remedy: str, command: str) -> Finding:
    """Pass or warn about a value. If it is None, return unknown with a command that shows it."""
    if value is None:
        return unknown("cannot be read here", command)
    return passed(str(value)) if passes else warn(str(value), remedy)


def fail_or_warn(fails: bool, reading: str, remedy: str) -> Finding:
    return fail(reading, remedy) if fails else warn(reading, remedy)


def boot_with(parameters: str) -> str:
    """Return how to boot the kernel with these parameters."""
    return (
        f"add {parameters} to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub "
        f"(Fedora, RHEL: sudo grubby --update-kernel=ALL --args='{parameters}'), reboot"
    )


def first_few(words: list[str], limit: int = 4) -> str:
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more" if words[limit:] else "")
