"""Combine the configured rewards: weight and chain them, and isolate harmful completions.

If a reward crashes or hangs on a completion, that score is 0, with the reason. Later completions
are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from recipes.rewards import reward_functions as functions
from recipes.rewards.reward_functions import Completion, Judged, Reward
from recipes.rewards.verify_code import CodeTests, check_tests
from recipes.rewards.verify_isolated import HANGS, IN_RANK, Isolated

Columns = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Hold the weighted mean of the `scores` that apply, from 0 to 1, and the first error."""

    score: float
    scores: dict[str, float]
    error: str | None


Judge = Callable[[list[Any], list[Completion], Columns], list[Judged]]
FEW = 3  # if a new function hangs on this many completions, the run fails


class Verifier:
    """Judge completions. `errors` counts those on which a reward crashed, hung or hit a limit."""

    def __init__(
        self, judges: dict[str, Judge], weights: dict[str, float], chain: list[str]
    ) -> None:
        self.judges, self.weights, self.chain = judges, weights, chain
        self.errors = 0
        self._last: tuple[Any, list[dict[str, Judged]]] | None = None

    def __call__(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[Verdict]:
        verdicts = []
        for judged in self._judge(prompts, completions, columns):
            scores = {name: j.score for name, j in judged.items() if j.score is not None}
            total = sum(abs(self.weights[name]) for name in scores)
            weighted = sum(self.weights[name] * value for name, value in scores.items())
            errors = (f"{name}: {j.error}" for name, j in judged.items() if j.error)
            score = weighted / total if total else 0.0
            verdicts.append(Verdict(score, scores, next(errors, None)))
        return verdicts

    def rewards(self) -> tuple[list[Reward], list[float]]:
        """Return functions for TRL, under the names of the rewards, and their weights."""
        return [self._function(name) for name in self.judges], [
            self.weights[name] for name in self.judges
        ]

    def _function(self, name: str) -> Reward:
        def reward(
            prompts: list[Any], completions: list[Completion], **columns: Any
        ) -> list[float | None]:
            # TRL calls the rewards one by one; judge a batch once.
            if self._last is None or self._last[0] is not completions:
                self._last = (completions, self._judge(prompts, completions, columns))
                if "log_metric" in columns:
                    # TRL averages over ranks and batches, so log a share, not a count.
                    errors = sum(any(j.error for j in of.values()) for of in self._last[1])
                    columns["log_metric"]("verifier_error_share", errors / len(completions))
            return [judged[name].score for judged in self._last[1]]

        reward.__name__ = name.rpartition(".")[2]  # for TRL's log
        return reward

    def _judge(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[dict[str, Judged]]:
        judged: list[dict[str, Judged]] = [{} for _ in completions]
        everyone = passing = list(range(len(completions)))
        for name in (*self.chain, *(name for name in self.judges if name not in self.chain)):
            chained = name in self.chain
            rows = passing if chained else everyone
            if rows:
                batch = _take(rows, prompts, completions, columns)
                for n, result in zip(rows, self.judges[name](*batch), strict=True):
                    judged[n][name] = result
            if chained:
                for results in judged:
                    results.setdefault(name, Judged(0.0))
                passing = [n for n in passing if judged[n][name].score == 1.0]
        self.errors += sum(any(j.error for j in results.values()) for results in judged)
        return judged


def _take(
    rows: Sequence[int], prompts: list[Any], completions: list[Completion], columns: Columns
) -> tuple[list[Any], list[Completion], Columns]:
    """Return the arguments of a judge for some rows of a batch.

    Values that are not columns come from TRL: its state and its logging functions.
    """
    arguments = {
        name: [values[n] for n in rows] if _is_column(values, completions) else values
        for name, values in columns.items()
    }
    return [prompts[n] for n in rows], [completions[n] for n in rows], arguments


def _is_column(values: Any, completions: list[Completion]) -> bool:
    return isinstance(values, list) and len(values) == len(completions)


def build_verifier(
    config: DictConfig, columns: list[str], rows: Iterable[Columns] = ()
) -> Verifier:
    """Return the verifier of `method.rewards`, `reward_chain` and `reward_pattern`.

    `columns` are those of `rows`. launch/rules/rewards.py has checked the names. Raises UserError
    for a function that cannot be imported, and as check_rows does.
    """
    method = config.method
    check_rows(config, columns, rows)
    confined = [name for name in method.rewards if "." in name and method.reward_confined]
    isolated = Isolated([*(set(method.rewards) & functions.REWARDS.keys()), *confined])
    judges: dict[str, Judge] = {}
    for name in method.rewards:
        if name == functions.CODE_TESTS:
            judges[name] = CodeTests(Path(config.run_dir))
        else:
            in_rank = "." in name and not method.reward_confined
            judges[name] = Function(name, None if in_rank else isolated, method.reward_pattern)
    if confined:
        isolated.start()  # fail before completions are generated
    elif isolated.names:
        isolated.begin()  # import while the model loads
    weights = {name: float(weight) for name, weight in method.rewards.items()}
    return Verifier(judges, weights, list(method.reward_chain))


def check_rows(
    config: DictConfig, columns: list[str], rows: Iterable[Columns], title: str = "the rows"
) -> None:
    """Raise UserError for a missing column, for two patterns, and for malformed tests."""
    pattern = config.method.reward_pattern
    if pattern is not None and "pattern" in columns:
        raise UserError(
            f"method.reward_pattern is set, but {title} also have a column 'pattern'. "
            "Use: method.reward_pattern=null, or data without that column."
        )
    for name in config.method.rewards:
        column = functions.NEEDED_COLUMN.get(name)
        if column and column not in columns and not (column == "pattern" and pattern is not None):
            raise UserError(
                f"method.rewards.{name} reads column {column!r}, but {title} have "
                f"{', '.join(columns)}."
            )
    if functions.CODE_TESTS in config.method.rewards:
        check_tests(rows)


@dataclass
class Function:
    """Judge one by one with a named reward, or with a user's function: all at once, if possible.

    In the process of `isolated`, which can be killed since one huge number may take forever, it
    gets only columns, no trainer state. Raises UserError if a user's function has never worked.
    """

    name: str
    isolated: Isolated | None
    pattern: str | None

    def __post_init__(self) -> None:
        self.own = "." in self.name
        self.works = not self.own
        self.ask = self.isolated.ask if self.isolated else functions.attempt
        if self.isolated is None:
            functions.imported(self.name)  # fail before completions are generated

    def __call__(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[Judged]:
        columns = self._read(columns, completions)
        judged: list[Judged] = []
        if self.own:
            scores, error = self.ask(self.name, prompts, completions, columns)
            if scores is not None:
                self.works = True
                return [Judged(score) for score in scores]
            judged = [Judged(0.0, error)] if len(completions) == 1 else []
        while len(judged) < len(completions):
            row = _take([len(judged)], prompts, completions, columns)
            scores, error = self.ask(self.name, *row)
            judged.append(Judged(0.0, error) if scores is None else Judged(scores[0]))
            hangs = all((j.error or "").startswith(HANGS) for j in judged)
            # Waiting for all of them, one by one, would exceed runtime.hang_timeout_s.
            if not self.works and len(judged) == FEW and hangs:
                break
        if not self.works and all(j.error for j in judged):
            names = [name for name, values in columns.items() if isinstance(values, list)]
            raise UserError(
                f"method.rewards.{self.name} fails for every completion: {judged[0].error}. The "
                f"columns are {', '.join(names) or '(none)'}. {IN_RANK if self.isolated else ''}"
            )
        self.works = True
        return judged

    def _read(self, columns: Columns, completions: list[Completion]) -> Columns:
        """Return the columns that the function gets."""
        if self.isolated is None:
            return columns
        column = functions.NEEDED_COLUMN.get(self.name)
        if column == "pattern" and self.pattern is not None:
            return {column: [self.pattern] * len(completions)}
        names = columns if self.own else filter(None, [column])
        return {name: columns[name] for name in names if _is_column(columns[name], completions)}
