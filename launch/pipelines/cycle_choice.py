"""Which cycle of a RAFT its result is, and after which its cycles stop: method.selection of method=raft. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.schema.data import Selection

PLACES = ("model", "evaluation", "last_evaluation")  # what a record names by its folder


def phase_name(raft: str, cycle: int, part: str) -> str:
    """`raft`: the phase of method=raft; empty where it is the whole run."""
    return f"{raft}_cycle{cycle}_{part}" if raft else f"cycle{cycle}_{part}"


@dataclass(frozen=True)
class Choice:
    """`cycle`: the one whose model is the result; `last`: the last one that is run. Both are the last of all until more is known."""

    raft: str  # as of phase_name
    selection: Selection
    num_cycles: int  # as planned
    accuracies: tuple[float, ...]  # held out: before the first cycle, and after each up to `last` that is evaluated by now
    cycle: int
    last: int

    @property
    def is_made(self) -> bool:
        return self.selection.metric is not None and len(self.accuracies) > self.last

    def record(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """What record.json says of one that is made. `folders`: of phases by their names."""
        places = ((self.cycle, "train"), (self.cycle, "evaluate"), (self.last, "evaluate"))
        return {
            "cycle": self.cycle,
            "num_cycles": self.last,
            "accuracy": self.accuracies[self.cycle],
            "stopped_early": self.last < self.num_cycles,
            "accuracies": list(self.accuracies),
            **{key: folders[phase_name(self.raft, *place)] for key, place in zip(PLACES, places, strict=True)},
        }

    def said(self) -> str:
        """One that is made, for a reader."""
        found, start = self.accuracies[self.cycle], self.accuracies[0]
        line = f"{self.raft or 'raft'}: cycle {self.cycle} of {self.last} is the result, held-out accuracy {found:.1%}"
        if self.last < self.num_cycles:
            line += f"; stopped early: {self.selection.patience} in a row were no better"
        return line + (f"; what it started from was better, {start:.1%}" if start > found else "")


def recorded(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Of the choices in a pipeline's record the folders `model`, `evaluation` and `last_evaluation`; of a damaged record those that are
    whole."""
    found = record.get("chosen")
    choices = [choice for choice in found.values() if isinstance(choice, dict)] if isinstance(found, dict) else []
    named = [{key: choice[key] for key in PLACES if isinstance(choice.get(key), str)} for choice in choices]
    return [folders for folders in named if len(folders) == len(PLACES)]


@dataclass(frozen=True)
class OfCycle:
    """A phase's place in a RAFT that chooses."""

    cycle: int
    choice: Choice

    @property
    def is_left_out(self) -> bool:
        return self.cycle > self.choice.last

    def warnings(self) -> list[str]:
        """Of the plan of a training: what it cannot know yet."""
        choice = self.choice
        if choice.is_made or self.cycle != choice.num_cycles:
            return []
        which = "the best of all cycles' models is the result, and what later phases take; this plan shows the last one's in its place"
        early = f". Cycles end after {choice.selection.patience} in a row that are no better" if choice.selection.patience else ""
        return [f"method.selection.metric={choice.selection.metric}: {which}{early}."]


def choose(raft: str, selection: Selection, accuracies: Sequence[float], num_cycles: int) -> Choice:
    """`accuracies`: before the first cycle and after each, as far as they are known. Of equal cycles the first is the best.

    A cycle that is not better by more than `min_delta` than all before it, the start among them, counts against `patience`.
    """
    last, misses = num_cycles, 0
    for cycle in range(1, len(accuracies)):
        is_better = accuracies[cycle] > max(accuracies[:cycle]) + selection.min_delta
        misses = 0 if is_better else misses + 1
        if misses == selection.patience:
            last = cycle
            break
    known = tuple(accuracies[: last + 1])
    chosen = last
    if selection.metric is not None and len(known) > last:
        chosen = max(range(1, last + 1), key=lambda cycle: known[cycle])
    return Choice(raft, selection, num_cycles, known, chosen, last)
