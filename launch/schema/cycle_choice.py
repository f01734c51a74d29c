"""Choose the cycle of a RAFT run whose model is the result, and the last cycle to run.

Both follow from method.selection and the accuracy after each cycle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.schema.data import Selection

RUN_KEYS = ("model", "evaluation", "last_evaluation")  # keys whose values name runs


def phase_name(raft: str, cycle: int, part: str) -> str:
    """Return the name of a phase. `raft` is the pipeline's phase with method=raft, or empty."""
    return f"{raft}_cycle{cycle}_{part}" if raft else f"cycle{cycle}_{part}"


@dataclass(frozen=True)
class CycleChoice:
    """The cycle whose model is the result of a RAFT run: the last cycle, until it is final."""

    raft: str  # as in phase_name
    selection: Selection
    num_cycles: int  # as planned
    # held-out accuracies or mean rewards: before the first cycle, and after each evaluated cycle
    # up to `last`
    accuracies: tuple[float, ...]
    cycle: int
    last: int  # last cycle to run

    @property
    def is_final(self) -> bool:
        """Return whether all cycles that run have been evaluated."""
        return self.selection.metric is not None and len(self.accuracies) > self.last

    def warnings(self, cycle: int) -> list[str]:
        """Return a warning about the unknown result, if `cycle` is the last one of a plan."""
        if self.is_final or cycle != self.num_cycles:
            return []
        warning = (
            f"method.selection.metric={self.selection.metric}: the result is the model of the "
            "best cycle, which is not known yet. This plan shows the last cycle's model instead."
        )
        if patience := self.selection.patience:
            warning += f" Training stops after {patience} cycle(s) in a row without improvement."
        return [warning]

    def record(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Return the chosen cycle's entry in record.json. `folders` maps phases to directories."""
        phases = ((self.cycle, "train"), (self.cycle, "evaluate"), (self.last, "evaluate"))
        return {
            "cycle": self.cycle,
            "num_cycles": self.last,
            "metric": self.selection.metric,
            "accuracy": self.accuracies[self.cycle],
            "stopped_early": self.last < self.num_cycles,
            "accuracies": list(self.accuracies),
            **{
                key: folders[phase_name(self.raft, *phase)]
                for key, phase in zip(RUN_KEYS, phases, strict=True)
            },
        }

    def line(self) -> str:
        """Return a final choice as one line of text."""
        accuracy, start = self.accuracies[self.cycle], self.accuracies[0]
        text = (
            f"{self.raft or 'raft'}: cycle {self.cycle} of {self.last} is the result, "
            f"held-out {self.selection.metric} {accuracy:.1%}"
        )
        if self.last < self.num_cycles:
            text += f"; stopped early after {self.selection.patience} cycle(s) without improvement"
        if start > accuracy:
            text += f"; the starting model was better, {start:.1%}"
        return text


def recorded(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the RUN_KEYS of each choice in a pipeline's record. Skip damaged choices."""
    choices = record.get("chosen")
    if not isinstance(choices, dict):
        return []
    return [
        {key: choice[key] for key in RUN_KEYS}
        for choice in choices.values()
        if isinstance(choice, dict) and all(isinstance(choice.get(key), str) for key in RUN_KEYS)
    ]


def choose(
    raft: str, selection: Selection, accuracies: Sequence[float], num_cycles: int
) -> CycleChoice:
    """Choose the best cycle; if several tie, the first.

    `accuracies` were measured before the first cycle and after each evaluated one. A cycle is an
    improvement if it exceeds all earlier accuracies, including the start, by more than `min_delta`.
    After `patience` cycles in a row without improvement, no more cycles run.
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
    return CycleChoice(raft, selection, num_cycles, known, best, last)
