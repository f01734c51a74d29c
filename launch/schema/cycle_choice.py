"""Choose the cycle whose model a RAFT run returns, and the last cycle to run.

These are pure functions of method.selection and the accuracy after each cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.schema.data import Selection

PLACES = ("model", "evaluation", "last_evaluation")  # keys of a record that name a run directory


def phase_name(raft: str, cycle: int, part: str) -> str:
    """Return a phase's name. `raft` is the phase of method=raft, or empty if the run is one."""
    return f"{raft}_cycle{cycle}_{part}" if raft else f"cycle{cycle}_{part}"


@dataclass(frozen=True)
class Choice:
    """The cycle of a RAFT whose model is the result: the last cycle until a choice is made."""

    raft: str  # as for phase_name
    selection: Selection
    num_cycles: int  # as planned
    # held-out accuracies: before the first cycle, and after each evaluated one up to `last`
    accuracies: tuple[float, ...]
    cycle: int
    last: int  # the last cycle that runs

    @property
    def is_made(self) -> bool:
        return self.selection.metric is not None and len(self.accuracies) > self.last

    def record(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Return a made choice as an entry of record.json.

        `folders` maps phase names to run directories.
        """
        places = ((self.cycle, "train"), (self.cycle, "evaluate"), (self.last, "evaluate"))
        return {
            "cycle": self.cycle,
            "num_cycles": self.last,
            "accuracy": self.accuracies[self.cycle],
            "stopped_early": self.last < self.num_cycles,
            "accuracies": list(self.accuracies),
            **{
                key: folders[phase_name(self.raft, *place)]
                for key, place in zip(PLACES, places, strict=True)
            },
        }

    def line(self) -> str:
        """Return a made choice as one line."""
        accuracy, start = self.accuracies[self.cycle], self.accuracies[0]
        text = (
            f"{self.raft or 'raft'}: cycle {self.cycle} of {self.last} is the result, "
            f"held-out accuracy {accuracy:.1%}"
        )
        if self.last < self.num_cycles:
            text += f"; stopped early: {self.selection.patience} in a row brought no improvement"
        if start > accuracy:
            text += f"; the starting model was better, {start:.1%}"
        return text


def recorded(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the PLACES of each choice in a pipeline's record; skip damaged choices."""
    choices = record.get("chosen")
    if not isinstance(choices, dict):
        return []
    return [
        {key: choice[key] for key in PLACES}
        for choice in choices.values()
        if isinstance(choice, dict) and all(isinstance(choice.get(key), str) for key in PLACES)
    ]


@dataclass(frozen=True)
class OfCycle:
    """A phase's place in a RAFT that chooses its cycle."""

    cycle: int
    choice: Choice

    @property
    def is_left_out(self) -> bool:
        return self.cycle > self.choice.last

    def warnings(self) -> list[str]:
        """Return warnings about facts that a training's plan cannot know yet."""
        choice = self.choice
        if choice.is_made or self.cycle != choice.num_cycles:
            return []
        warning = (
            f"method.selection.metric={choice.selection.metric}: the best of all cycles' models is "
            "the result, which later phases use; this plan shows the last one instead."
        )
        if patience := choice.selection.patience:
            warning += f" Cycles end after {patience} in a row that are no better."
        return [warning]


def choose(raft: str, selection: Selection, accuracies: Sequence[float], num_cycles: int) -> Choice:
    """Return the best cycle as the choice; of equal ones, the first.

    `accuracies` are those before the first cycle and after each, as far as known. A cycle counts
    against `patience` unless it beats all before it, including the start, by more than `min_delta`.
    """
    last, misses = num_cycles, 0
    for cycle in range(1, len(accuracies)):
        is_better = accuracies[cycle] > max(accuracies[:cycle]) + selection.min_delta
        misses = 0 if is_better else misses + 1
        if misses == selection.patience:
            last = cycle
            break
    known = tuple(accuracies[: last + 1])
    best = last
    if selection.metric is not None and len(known) > last:
        best = max(range(1, last + 1), key=lambda cycle: known[cycle])
    return Choice(raft, selection, num_cycles, known, best, last)
