"""Combine the configured rewards: weighted, chained, and isolated from harmful completions.

If a reward crashes or hangs on a completion, that score is 0, with the reason. Later completions
are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from recipes.rewards import reward_functions as functions
from recipes.rewards.reward_functions import Completion, Judged, Reward
from recipes.rewards.verify_code import CodeTests
from recipes.rewards.verify_isolated import HANGS, Isolated

Columns = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Hold the weighted mean of the `scores` that apply, from 0 to 1, and the first error."""

    score: float
    scores: dict[str, float]
    error: str | None


Judge = Callable[[list[Any], list[Completion], Columns], list[Judged]]
FEW = 3  # if a new function hangs on this many completions, the run fails
IN_RANK = "Use: method.reward_confined=false, to run it in the rank, where a hang stops the run."
# Exceptions that do not suggest confinement as their cause, unless they contain a text of CONFINED.
OWN_FAULTS = (
    *("TypeError", "KeyError", "ValueError", "AttributeError", "NameError", "UnboundLocalError"),
    *("IndexError", "AssertionError", "ZeroDivisionError", "OverflowError"),
    *("NotImplementedError", "JSONDecodeError", "PatternError", "StopIteration"),
)
CONFINED = (" of os.environ", "a scorer may not: ")


class Verifier:
    """Judge completions. `errors` counts those on which a reward crashed, hung or met a limit."""

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
        functions: list[Reward] = [_Function(self, name) for name in self.judges]
        return functions, [self.weights[name] for name in self.judges]

    def of_batch(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[dict[str, Judged]]:
        """Return the results of all rewards, computed once although TRL calls them one by one."""
        if self._last is None or self._last[0] is not completions:
            self._last = (completions, self._judge(prompts, completions, columns))
        return self._last[1]

    def _judge(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[dict[str, Judged]]:
        judged: list[dict[str, Judged]] = [{} for _ in completions]

        def ask(name: str, indices: list[int]) -> None:
            if not indices:
                return
            # Values that are not columns come from TRL: its state and its logging functions.
            rows = {
                k: [v[i] for i in indices] if _is_column(v, len(completions)) else v
                for k, v in columns.items()
            }
            chosen = [prompts[i] for i in indices], [completions[i] for i in indices]
            for i, result in zip(indices, self.judges[name](*chosen, rows), strict=True):
                judged[i][name] = result

        everyone = passing = list(range(len(completions)))
        for name in self.chain:
            ask(name, passing)
            for results in judged:
                results.setdefault(name, Judged(0.0))
            passing = [i for i in passing if judged[i][name].score == 1.0]
        for name in self.judges:
            if name not in self.chain:
                ask(name, everyone)
        self.errors += sum(any(j.error for j in results.values()) for results in judged)
        return judged


class _Function:
    """Wrap one reward of a verifier as the function that TRL calls."""

    def __init__(self, verifier: Verifier, name: str) -> None:
        self.verifier, self.name = verifier, name
        self.__name__ = name.rpartition(".")[2]  # for TRL's log

    def __call__(
        self, prompts: list[Any], completions: list[Completion], **columns: Any
    ) -> list[float | None]:
        judged = self.verifier.of_batch(prompts, completions, columns)
        if self.name == next(iter(self.verifier.judges)) and "log_metric" in columns:
            # TRL averages over ranks and batches, so log a share, not a count.
            errors = sum(any(j.error for j in results.values()) for results in judged)
            columns["log_metric"]("verifier_error_share", errors / len(judged))
        return [results[self.name].score for results in judged]


def build_verifier(config: DictConfig, columns: list[str]) -> Verifier:
    """Return the verifier of `method.rewards`, `reward_chain` and `reward_pattern`.

    `columns` are those of the rows. launch/rules/rewards.py has checked the names. Raises UserError
    for a function that cannot be imported, and for a reward whose column is missing.
    """
    method = config.method
    check_columns(config, columns)
    confined = [name for name in method.rewards if "." in name and method.reward_confined]
    isolated = Isolated(
        [*(name for name in method.rewards if name in functions.REWARDS), *confined]
    )
    judges: dict[str, Judge] = {}
    for name in method.rewards:
        if "." in name:
            judges[name] = _Own(name, isolated if name in confined else None)
        elif name == functions.CODE_TESTS:
            judges[name] = CodeTests(Path(config.run_dir))
        else:
            judges[name] = _named(name, isolated, method.reward_pattern)
    if confined:
        isolated.start()  # fail before completions are generated
    elif isolated.names:
        isolated.begin()  # import while the model loads
    weights = {name: float(weight) for name, weight in method.rewards.items()}
    return Verifier(judges, weights, list(method.reward_chain))


def check_columns(config: DictConfig, columns: list[str], rows: str = "the rows") -> None:
    """Raise UserError if a column that a reward reads is missing, or if there are two patterns."""
    pattern = config.method.reward_pattern
    if pattern is not None and "pattern" in columns:
        raise UserError(
            f"method.reward_pattern is set, but {rows} also have a column 'pattern'. "
            "Use: method.reward_pattern=null, or data without that column."
        )
    for name in config.method.rewards:
        column = functions.NEEDED_COLUMN.get(name)
        if column and column not in columns and not (column == "pattern" and pattern is not None):
            raise UserError(
                f"method.rewards.{name} reads column {column!r}, but {rows} have "
                f"{', '.join(columns)}."
            )


def _named(name: str, isolated: Isolated, pattern: str | None) -> Judge:
    """Return a judge in a process that can be killed, since one huge number may take forever."""
    column = functions.NEEDED_COLUMN.get(name)

    def judge(prompts: list[Any], completions: list[Completion], columns: Columns) -> list[Judged]:
        rows: list[Columns] = [{} for _ in completions]
        if column == "pattern" and pattern is not None:
            rows = [{column: pattern} for _ in completions]
        elif column:
            rows = [{column: value} for value in columns.get(column, [])]
        pairs = zip(completions, rows, strict=True)
        return [isolated(name, functions.text(c), row) for c, row in pairs]

    return judge


class _Own:
    """Call a user's function for all completions at once or, if that fails, one by one.

    With `isolated`, it runs in that process, with only columns, no trainer state. Raises UserError
    if it has never worked, or returns a wrong number of scores.
    """

    def __init__(self, path: str, isolated: Isolated | None) -> None:
        self.path, self.isolated, self.works = path, isolated, False
        if isolated is None:
            functions.imported(path)  # fail before completions are generated

    def ask(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> tuple[list[float | None] | None, str | None]:
        """Return (scores, None) or (None, reason)."""
        if self.isolated is None:
            try:
                return functions.judge(self.path, prompts, completions, columns), None
            except UserError:
                raise
            except Exception as error:  # of a user's function, a failure on these completions
                return None, functions.failure(self.path, error)
        rows = {key: value for key, value in columns.items() if _is_column(value, len(completions))}
        try:
            return self.isolated.ask(self.path, prompts, completions, rows)
        except TypeError as error:
            raise UserError(
                f"method.rewards.{self.path}: columns {', '.join(rows)} go to its process as "
                f"JSON, but one cannot ({error}). {IN_RANK}"
            ) from error

    def __call__(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[Judged]:
        scores, error = self.ask(prompts, completions, columns)
        if scores is not None:
            judged = [Judged(score) for score in scores]
        elif len(completions) == 1:
            judged = [Judged(0.0, error)]
        else:
            judged = []
            for i in range(len(completions)):
                row = {
                    k: [v[i]] if _is_column(v, len(completions)) else v for k, v in columns.items()
                }
                alone, error = self.ask([prompts[i]], [completions[i]], row)
                judged.append(Judged(alone[0]) if alone is not None else Judged(0.0, error))
                hangs = all((j.error or "").startswith(HANGS) for j in judged)
                # Waiting for all of them, one by one, would exceed runtime.hang_timeout_s.
                if not self.works and len(judged) == FEW and hangs:
                    break
        if not self.works and all(j.error for j in judged):
            reason = str(judged[0].error)
            kind, confined = reason.partition(":")[0], any(sign in reason for sign in CONFINED)
            remedy = ""
            if kind in ("KeyError", "TypeError") and not confined:
                names = [name for name, values in columns.items() if isinstance(values, list)]
                remedy = f" The columns are {', '.join(names) or '(none)'}."
            elif self.isolated and (confined or kind not in OWN_FAULTS):
                remedy = f" {IN_RANK}"
            raise UserError(
                f"method.rewards.{self.path} fails for every completion: {reason}.{remedy}"
            )
        self.works = True
        return judged


def _is_column(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count
