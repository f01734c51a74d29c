"""Run the checks of checks.yaml, and the short set that a run starts with."""

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
        if value is None or value is False or value == ():  # 0 is a need
            return None
        name, _, function = self.check.partition(".")
        module = importlib.import_module(f"launch.checks.{name}")
        finding: Finding | None = getattr(module, function)(facts)
        if finding is None:
            return None
        threshold, source = (
            own or of_row.format(facts=facts, **vars(module))
            for own, of_row in (
                (finding.threshold, self.expected),
                (finding.source, self.source),
            )
        )
        return dataclasses.replace(finding, threshold=threshold, source=source)


ROWS = yaml_file(Path(__file__).with_name("checks.yaml"))
EVERY = tuple(Check(subject=subject, **row) for subject, rows in ROWS.items() for row in rows)
CHECKS = tuple(check for check in EVERY if check.subject != ACTIVE)
ACTIVE_CHECKS = tuple(check for check in EVERY if check.subject == ACTIVE)


def run(facts: Facts, checks: Iterable[Check] = CHECKS) -> dict[Check, Finding]:
    """Return the findings of the checks that apply to this machine, with any active tests."""
    if facts.active is not None:
        # Report tests that failed or were not run only once.
        is_whole = facts.active.measured and not facts.active.failed
        checks = (*checks, *(ACTIVE_CHECKS if is_whole else ACTIVE_CHECKS[:1]))
    return {check: finding for check in checks if (finding := check.run(facts)) is not None}


def before_run(facts: Facts, contained: bool) -> dict[str, Finding]:
    """Return the findings of the short set. A failure there would make a run fail."""
    when = ("always",) if contained else ("always", "local")
    chosen = run(facts, (check for check in CHECKS if check.before_run in when))
    return {check.name: finding for check, finding in chosen.items()}
