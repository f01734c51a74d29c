"""Define the result of a check."""

from __future__ import annotations

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
    threshold: str
    source: str
    cure: str = ""  # the command, or what to do; empty if it passes


@dataclass(frozen=True)
class Expected:
    """A threshold with its source, from which a check makes its finding."""

    threshold: str
    source: str

    def passed(self, read: str) -> Finding:
        return Finding(Status.passed, read, self.threshold, self.source)

    def warn(self, read: str, cure: str) -> Finding:
        return Finding(Status.warn, read, self.threshold, self.source, cure)

    def fail(self, read: str, cure: str) -> Finding:
        return Finding(Status.fail, read, self.threshold, self.source, cure)

    def unknown(self, read: str, cure: str) -> Finding:
        return Finding(Status.unknown, read, self.threshold, self.source, cure)

    def judge(self, value: object, passes: bool, cure: str, look: str) -> Finding:
        """Pass or warn about a value; if it is None, `look` is the command that would tell."""
        if value is None:
            return self.unknown("cannot be read here", look)
        return self.passed(str(value)) if passes else self.warn(str(value), cure)

    def pass_or_warn(self, passes: bool, read: str, cure: str) -> Finding:
        return self.passed(read) if passes else self.warn(read, cure)

    def fail_or_warn(self, fails: bool, read: str, cure: str) -> Finding:
        return self.fail(read, cure) if fails else self.warn(read, cure)


def boot_with(parameters: str) -> str:
    """Return the command that boots the kernel with these parameters."""
    return (
        f"add {parameters} to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub "
        f"(Fedora, RHEL: sudo grubby --update-kernel=ALL --args='{parameters}'), reboot"
    )


def some(words: list[str], most: int = 4) -> str:
    return "; ".join(words[:most])
