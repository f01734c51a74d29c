"""Which phase of a pipeline took whose model, and what each evaluation gained on that of the model before. Pure functions.

A pipeline is a tree: GRPO, RAFT and DPO may each start from the same SFT. What one of them gained says nothing of another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CYCLE = re.compile(r"\d+_(?:(.+)_)?cycle(\d+)_evaluate")  # as launch/pipelines/cycles.py names the evaluations of RAFT


@dataclass(frozen=True)
class Phase:
    """A phase as it ended. `model` is the path or the name of what it began with; `num_steps` are those that it trained."""

    folder: Path
    model: str | None
    num_steps: int = 0
    accuracy: float | None = None  # held out; None of a phase that is no evaluation
    problems: str | None = None  # hash of what it was asked

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Gain:
    """An evaluation, and the nearest one of a model that its own came from, on the same problems. `points` is None where there is none."""

    phase: Phase
    before: Phase | None

    @property
    def points(self) -> float | None:
        if self.before is None or self.before.accuracy is None or self.phase.accuracy is None:
            return None
        return 100 * (self.phase.accuracy - self.before.accuracy)


def parents(phases: Sequence[Phase]) -> dict[str, Phase | None]:
    """Phase -> the one whose model it took; None where that was none of the pipeline."""
    before: dict[tuple[str, str], Phase] = {}  # a phase takes from an earlier one, whatever a damaged file says
    found = {}
    for phase in phases:
        path = Path(phase.model or "")  # <pipeline>/<phase>/model, wherever the pipeline's directory has been moved
        found[phase.name] = before.get((path.parent.parent.name, path.parent.name)) if path.name == "model" else None
        before[(phase.folder.parent.name, phase.name)] = phase
    return found


def ancestors(phases: Sequence[Phase], phase: Phase) -> list[Phase]:
    """The phases whose trainings are in the model that `phase` took, the newest first."""
    parent, found = parents(phases), []
    at = parent[phase.name]
    while at is not None:
        found.append(at)
        at = parent[at.name]
    return found


def steps_before(phases: Sequence[Phase], phase: Phase) -> int:
    return sum(before.num_steps for before in ancestors(phases, phase))


def gains(phases: Sequence[Phase]) -> list[Gain]:
    """One for each evaluation, in their order."""
    parent = parents(phases)
    evaluations = [phase for phase in phases if phase.accuracy is not None]

    def of_model(given: Phase, trained: Phase | None, start: str | None) -> Phase | None:
        """The first evaluation of the model that `trained` left; of the one named `start`, where that is None."""
        for other in evaluations:
            same = parent[other.name] is trained and (trained is not None or other.model == start)
            if same and other is not given and other.problems == given.problems:
                return other
        return None

    found = []
    for phase in evaluations:
        line, before = ancestors(phases, phase), None
        for trained in line:
            before = before or of_model(phase, parent[trained.name], trained.model)
        found.append(Gain(phase, before))
    return found


def lines(phases: Sequence[Phase]) -> list[list[Phase]]:
    """The evaluations of each lineage from its first to its last; those that lead to several last ones stand in each."""
    before = {gain.phase.name: gain.before for gain in gains(phases)}
    inner = {phase.name for phase in before.values() if phase is not None}
    found = []
    for phase in phases:
        if phase.accuracy is None or phase.name in inner:
            continue
        line, at = [phase], before[phase.name]
        while at is not None:
            line.insert(0, at)
            at = before[at.name]
        found.append(line)
    return found


def cycles(phases: Sequence[Phase]) -> dict[str, list[tuple[int, float]]]:
    """Phase of method=raft (`raft` where it is the whole run) -> cycle and held-out accuracy after it; 0 is before the first."""
    found: dict[str, list[tuple[int, float]]] = {}
    for phase in phases:
        named = CYCLE.fullmatch(phase.name)
        if named and phase.accuracy is not None:
            found.setdefault(named.group(1) or "raft", []).append((int(named.group(2)), phase.accuracy))
    return found
