"""Trace which model each phase of a pipeline started from, and the gain of each evaluation.

These are pure functions. A pipeline is a tree: GRPO, RAFT and DPO may each start from the same SFT,
and the gain of one does not depend on another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# launch/study/cycles.py names RAFT's evaluations like this.
CYCLE = re.compile(r"\d+_(?:(.+)_)?cycle(\d+)_evaluate")


@dataclass(frozen=True)
class Phase:
    """A finished phase, with the path or name of the model that it began with."""

    folder: Path
    model: str | None
    num_steps: int = 0  # steps that it trained
    accuracy: float | None = None  # held-out accuracy; None if the phase is not an evaluation
    problems: str | None = None  # hash of its problems

    @property
    def name(self) -> str:
        return self.folder.name


def ended(
    folder: Path,
    model: Mapping[str, Any],
    trains: bool,
    rows: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
) -> Phase:
    """Return a phase from its composition's model, the lines of its metrics, and its result."""
    accuracy: Any = result.get("accuracy")
    if trains or type(accuracy) not in (int, float) or not 0 <= accuracy <= 1:
        accuracy = None
    return Phase(
        folder,
        next((str(model[key]) for key in ("path", "hub_id", "name") if model.get(key)), None),
        int(rows[-1]["step"]) if trains and rows else 0,
        accuracy,
        result.get("data_sha256"),
    )


def points(phase: Phase, before: Phase) -> float:
    """Return the gain in accuracy over an earlier evaluation, in points."""
    return 100 * ((phase.accuracy or 0.0) - (before.accuracy or 0.0))


def parents(phases: Sequence[Phase]) -> dict[str, Phase | None]:
    """Map each phase to the earlier one that produced its model; None if there is none."""
    earlier: dict[tuple[str, str], Phase] = {}
    result = {}
    for phase in phases:
        # <pipeline>/<phase>/model, wherever the pipeline's directory has been moved.
        path = Path(phase.model or "")
        source = (path.parent.parent.name, path.parent.name)
        result[phase.name] = earlier.get(source) if path.name == "model" else None
        earlier[(phase.folder.parent.name, phase.name)] = phase
    return result


def ancestors(phases: Sequence[Phase], phase: Phase) -> list[Phase]:
    """Return the phases that trained the model `phase` started from, newest first."""
    parent = parents(phases)
    line, at = [], parent[phase.name]
    while at is not None:
        line.append(at)
        at = parent[at.name]
    return line


def steps_before(phases: Sequence[Phase], phase: Phase) -> int:
    return sum(before.num_steps for before in ancestors(phases, phase))


def gains(phases: Sequence[Phase]) -> list[tuple[Phase, Phase | None]]:
    """Pair each evaluation with the nearest earlier one in its lineage on the same problems."""
    parent = parents(phases)
    evaluations = [phase for phase in phases if phase.accuracy is not None]

    def of_same_start(phase: Phase, trained: Phase) -> Phase | None:
        """Return the first other evaluation of the model that `trained` began with."""
        start = parent[trained.name]
        for other in evaluations:
            is_same = parent[other.name] is start and (start or other.model == trained.model)
            if is_same and other is not phase and other.problems == phase.problems:
                return other
        return None

    result = []
    for phase in evaluations:
        earlier = (of_same_start(phase, trained) for trained in ancestors(phases, phase))
        result.append((phase, next(filter(None, earlier), None)))
    return result


def lines(phases: Sequence[Phase]) -> list[list[Phase]]:
    """Return the evaluations of each lineage, first to last; lineages may share the first ones."""
    before = {phase.name: earlier for phase, earlier in gains(phases)}
    inner = {phase.name for phase in before.values() if phase is not None}
    result = []
    for phase in phases:
        if phase.accuracy is None or phase.name in inner:
            continue
        line, at = [phase], before[phase.name]
        while at is not None:
            line.insert(0, at)
            at = before[at.name]
        result.append(line)
    return result


def cycles(phases: Sequence[Phase]) -> dict[str, list[tuple[int, float]]]:
    """Map each phase of method=raft (`raft` if alone) to its cycles and their held-out accuracy.

    Cycle 0 is before the first.
    """
    result: dict[str, list[tuple[int, float]]] = {}
    for phase in phases:
        match = CYCLE.fullmatch(phase.name)
        if match and phase.accuracy is not None:
            points = result.setdefault(match.group(1) or "raft", [])
            points.append((int(match.group(2)), phase.accuracy))
    return result
