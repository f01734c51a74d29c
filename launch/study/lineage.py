"""Trace the model that each phase of a pipeline started from, and the gain of each evaluation.

A pipeline is a tree, because GRPO, RAFT and DPO may start from the same
SFT. The gain of each is relative to that SFT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.core import json_files

# Directories of RAFT's evaluations, as launch/study/cycles.py names them.
CYCLE = re.compile(r"\d+_(?:(.+)_)?cycle(\d+)_evaluate")


@dataclass(frozen=True)
class Phase:
    """A finished phase, with the path or name of the model that it started from."""

    folder: Path
    model: str | None
    num_steps: int = 0  # training steps
    score: float | None = None  # what an evaluation measured on held-out problems
    problems: str | None = None  # hash of the held-out problems
    measure: str = "accuracy"  # of `score`; or reward

    @property
    def name(self) -> str:
        return self.folder.name


def read_phase(folder: Path, model: Mapping[str, Any], trains: bool) -> Phase:
    """Return the phase in `folder`, with `model` of its composition."""
    rows = json_files.read_metrics(folder / "metrics.jsonl") if trains else []
    result = json_files.read_json(folder / "result.json") or {}
    # A trainer's reward is not a held-out one.
    measure, score = heldout_score({} if trains else result)
    return Phase(
        folder,
        next((str(model[key]) for key in ("path", "hub_id", "name") if model.get(key)), None),
        int(rows[-1]["step"]) if rows else 0,
        score,
        result.get("data_sha256"),
        measure,
    )


def heldout_score(result: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return what an evaluation measured, `accuracy` or the mean `reward`, and its value."""
    for measure in ("accuracy", "reward"):
        value: Any = result.get(measure)
        if type(value) in (int, float) and 0 <= value <= 1:
            return measure, value
    return "accuracy", None


def gain_points(phase: Phase, before: Phase) -> float:
    """Return the gain over an earlier evaluation, in percentage points."""
    return 100 * ((phase.score or 0.0) - (before.score or 0.0))


def parents(phases: Sequence[Phase]) -> dict[str, Phase | None]:
    """Map each phase to the earlier phase that produced its model, if any."""
    earlier: dict[tuple[str, str], Phase] = {}
    result = {}
    for phase in phases:
        # Compare only <pipeline>/<phase>/model, because the pipeline may have been moved.
        path = Path(phase.model or "")
        source = (path.parent.parent.name, path.parent.name)
        result[phase.name] = earlier.get(source) if path.name == "model" else None
        earlier[(phase.folder.parent.name, phase.name)] = phase
    return result


def ancestors(phases: Sequence[Phase], phase: Phase) -> list[Phase]:
    """Return the phases that trained the model `phase` started from, newest first."""
    parent = parents(phases)
    result, ancestor = [], parent[phase.name]
    while ancestor is not None:
        result.append(ancestor)
        ancestor = parent[ancestor.name]
    return result


def steps_before(phases: Sequence[Phase], phase: Phase) -> int:
    """Return the training steps of the model that `phase` started from."""
    return sum(before.num_steps for before in ancestors(phases, phase))


def gains(phases: Sequence[Phase]) -> list[tuple[Phase, Phase | None]]:
    """Pair each evaluation with the latest one of an ancestor on the same problems, if any."""
    parent = parents(phases)
    evaluations = [phase for phase in phases if phase.score is not None]

    def evaluation_before(phase: Phase, trained: Phase) -> Phase | None:
        """Return the first other evaluation of the model that `trained` started from."""
        start = parent[trained.name]
        for other in evaluations:
            is_same = parent[other.name] is start and (start or other.model == trained.model)
            measured = (other.problems, other.measure)
            if is_same and other is not phase and measured == (phase.problems, phase.measure):
                return other
        return None

    result = []
    for phase in evaluations:
        earlier = (evaluation_before(phase, trained) for trained in ancestors(phases, phase))
        result.append((phase, next(filter(None, earlier), None)))
    return result


def lineages(phases: Sequence[Phase]) -> list[list[Phase]]:
    """Return the evaluations of each lineage, oldest first. Lineages may share the oldest."""
    before = {phase.name: earlier for phase, earlier in gains(phases)}
    inner = {phase.name for phase in before.values() if phase is not None}
    result = []
    for phase in phases:
        if phase.score is None or phase.name in inner:
            continue
        line = [phase]
        while (earlier := before[line[0].name]) is not None:
            line.insert(0, earlier)
        result.append(line)
    return result


def cycles(phases: Sequence[Phase]) -> dict[str, list[tuple[int, float]]]:
    """Map each phase of method=raft to (cycle, held-out score) pairs; cycle 0 is its start.

    A RAFT that is not a phase has the key `raft`.
    """
    result: dict[str, list[tuple[int, float]]] = {}
    for phase in phases:
        match = CYCLE.fullmatch(phase.name)
        if match and phase.score is not None:
            points = result.setdefault(match.group(1) or "raft", [])
            points.append((int(match.group(2)), phase.score))
    return result
