"""Run the checks of checks.yaml: all of them, or those before a run."""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launch.checks.facts import Facts
from launch.checks.finding import Finding
from launch.core.json_files import yaml_file

ACTIVE = "Active tests"


@dataclass(frozen=True)
class Check:
    """A row of checks.yaml, whose header describes the fields."""

    name: str
    check: str
    source: str
    subject: str
    expected: str = ""
    needs: str = "root"
    before_run: str = ""

    def run(self, facts: Facts) -> Finding | None:
        """Return the finding; None if the check does not apply to this machine."""
        value = operator.attrgetter(self.needs)(facts)
        if value is None or value is False or value == ():  # 0 is a value
            return None
        name, _, function = self.check.partition(".")
        module = importlib.import_module(f"launch.checks.{name}")
        finding: Finding | None = getattr(module, function)(facts)
        if finding is None:
            return None
        if facts.in_container and "sudo " in finding.cure:
            finding = dataclasses.replace(finding, cure=f"on the host: {finding.cure}")
        values = {**vars(module), "facts": facts}
        threshold = finding.threshold or self.expected.format(**values)
        return finding.expecting(threshold, finding.source or self.source.format(**values))


ROWS = yaml_file(Path(__file__).with_name("checks.yaml"))
ALL_CHECKS = tuple(Check(subject=subject, **row) for subject, rows in ROWS.items() for row in rows)
CHECKS = tuple(check for check in ALL_CHECKS if check.subject != ACTIVE)
ACTIVE_CHECKS = tuple(check for check in ALL_CHECKS if check.subject == ACTIVE)


def run(facts: Facts, checks: Iterable[Check] = CHECKS) -> dict[Check, Finding]:
    """Return the findings of the checks that apply to this machine, with any active tests."""
    if facts.active is not None:
        # If the tests failed or did not run, only the first check reports it.
        completed = facts.active.measured and not facts.active.failed
        checks = (*checks, *(ACTIVE_CHECKS if completed else ACTIVE_CHECKS[:1]))
    return {check: finding for check in checks if (finding := check.run(facts)) is not None}


def before_run(facts: Facts, in_container: bool) -> dict[str, Finding]:
    """Run the checks whose failure would make a run fail. Return name -> finding."""
    when = ("always",) if in_container else ("always", "local")
    findings = run(facts, (check for check in CHECKS if check.before_run in when))
    return {check.name: finding for check, finding in findings.items()}
