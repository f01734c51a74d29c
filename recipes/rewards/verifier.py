"""Combine the configured rewards by weights and chains.

If a reward crashes or hangs on a completion, its score is 0, and the reason is recorded. Other
completions are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from recipes.rewards import reward_functions as functions
from recipes.rewards.reward_functions import Completion, Judgment, Reward
from recipes.rewards.verify_code import CodeTests, check_tests
from recipes.rewards.verify_isolated import HANGS, IN_RANK, Pool, num_workers

Columns = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Hold a completion's scores by reward, their weighted mean `score`, and the first error."""

    score: float
    scores: dict[str, float]
    error: str | None


Judge = Callable[[list[Any], list[Completion], Columns], list[Judgment]]
LEFT_CHAIN = Judgment(0.0)  # an earlier reward of the chain gave less than 1
MAX_HANGS = 3  # if an untried function hangs on this many completions, the run fails


class Verifier:
    """Judge completions. `errors` counts completions whose reward crashed, hung or hit a limit."""

    def __init__(
        self, judges: dict[str, Judge], weights: dict[str, float], chain: list[str]
    ) -> None:
        self.judges, self.weights, self.chain = judges, weights, chain
        self.errors = 0
        self._reported: set[str] = set()  # rewards whose first error was printed
        self._last: tuple[Any, list[dict[str, Judgment]]] | None = None

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
        names = list(self.judges)
        return [self._function(name) for name in names], [self.weights[name] for name in names]

    def _function(self, name: str) -> Reward:
        def reward(
            prompts: list[Any], completions: list[Completion], **columns: Any
        ) -> list[float | None]:
            # TRL calls the rewards one after another, so judge the batch at the first call.
            if self._last is None or self._last[0] is not completions:
                self._last = (completions, self._judge(prompts, completions, columns))
                if "log_metric" in columns:
                    # TRL averages over ranks and batches, so log a share, not a count.
                    errors = sum(any(j.error for j in row.values()) for row in self._last[1])
                    columns["log_metric"]("verifier_error_share", errors / len(completions))
            return [judged[name].score for judged in self._last[1]]

        reward.__name__ = name.rpartition(".")[2]  # for TRL's log
        return reward

    def _judge(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[dict[str, Judgment]]:
        judged = self.judge(prompts, completions, columns)
        self._report_first_errors(judged)
        self.errors += sum(any(j.error for j in results.values()) for results in judged)
        return judged

    def judge(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[dict[str, Judgment]]:
        """Return each completion's judgments by reward; LEFT_CHAIN where it has left the chain."""
        judged: list[dict[str, Judgment]] = [{} for _ in completions]
        all_rows = passing = list(range(len(completions)))
        for name in (*self.chain, *(name for name in self.judges if name not in self.chain)):
            chained = name in self.chain
            rows = passing if chained else all_rows
            if rows:
                batch = _select(rows, prompts, completions, columns)
                for n, result in zip(rows, self.judges[name](*batch), strict=True):
                    judged[n][name] = result
            if chained:
                for results in judged:
                    results.setdefault(name, LEFT_CHAIN)
                passing = [n for n in passing if judged[n][name].score == 1.0]
        return judged

    def _report_first_errors(self, judged: list[dict[str, Judgment]]) -> None:
        """Print the first error of each user's function; further ones only count."""
        for name in filter(is_users, self.judges.keys() - self._reported):
            errors = (j.error for results in judged if (j := results.get(name)) and j.error)
            if error := next(errors, None):
                self._reported.add(name)
                print(
                    f"! method.rewards.{name}: {error}. Such a completion gets 0 and counts as a "
                    "verifier error",
                    flush=True,
                )


def _select(
    rows: Sequence[int], prompts: list[Any], completions: list[Completion], columns: Columns
) -> tuple[list[Any], list[Completion], Columns]:
    """Return the judge's arguments for some rows of a batch.

    TRL also passes values that are not columns, such as its state. These are returned unchanged.
    """
    arguments = {
        name: [values[n] for n in rows] if _is_column(values, completions) else values
        for name, values in columns.items()
    }
    return [prompts[n] for n in rows], [completions[n] for n in rows], arguments


def is_users(name: str) -> bool:
    """Return whether a reward is a user's function."""
    return "." in name


def _is_column(values: Any, completions: list[Completion]) -> bool:
    return isinstance(values, list) and len(values) == len(completions)


def build_verifier(
    config: DictConfig, columns: list[str], rows: Iterable[Columns] = ()
) -> Verifier:
    """Return the verifier of `method.rewards`, `reward_chain` and `reward_pattern`.

    launch/rules/rewards.py has checked the names. Raises UserError for a function that cannot be
    imported, and as check_rows does.
    """
    method = config.method
    check_rows(config, columns, rows)
    confined = [name for name in method.rewards if is_users(name) and method.reward_confined]
    isolated = [*(set(method.rewards) & functions.REWARDS.keys()), *confined]
    pool = Pool(isolated, num_workers())
    judges: dict[str, Judge] = {}
    for name in method.rewards:
        if name == functions.CODE_TESTS:
            judges[name] = CodeTests(Path(config.run_dir))
        else:
            in_rank = is_users(name) and not method.reward_confined
            judges[name] = FunctionJudge(name, None if in_rank else pool, method.reward_pattern)
    if confined:
        pool.workers[0].wait_until_ready()  # fail before completions are generated
    elif isolated:
        pool.workers[0].start()  # import while the model loads
    weights = {name: float(weight) for name, weight in method.rewards.items()}
    return Verifier(judges, weights, list(method.reward_chain))


def check_rows(
    config: DictConfig, columns: list[str], rows: Iterable[Columns], title: str = "the rows"
) -> None:
    """Raise UserError if a column is missing, tests are malformed, or there are two patterns."""
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
                f"method.rewards.{name} reads column {column!r}, but {title} have only "
                f"{', '.join(columns)}. Add the column, or remove the reward."
            )
    if functions.CODE_TESTS in config.method.rewards:
        check_tests(rows)


@dataclass
class FunctionJudge:
    """Judge completions with a named reward, or with a user's function.

    Named rewards get one completion at a time, in all processes of `pool`. A user's function gets
    all completions, unless that fails. In a process of `pool`, which can be killed, functions get
    only columns, not the trainer's state. Raises UserError if a user's function fails for its
    entire first batch.
    """

    name: str
    pool: Pool | None
    pattern: str | None

    def __post_init__(self) -> None:
        self.is_users = is_users(self.name)
        self.has_worked = not self.is_users
        self.attempt = self.pool.workers[0].attempt if self.pool else functions.attempt
        if self.pool is None:
            functions.import_reward(self.name)  # fail before completions are generated

    def __call__(
        self, prompts: list[Any], completions: list[Completion], columns: Columns
    ) -> list[Judgment]:
        columns = self._function_columns(columns, completions)
        judged: list[Judgment] = []
        if self.is_users:
            scores, error = self.attempt(self.name, prompts, completions, columns)
            if scores is not None:
                self.has_worked = True
                return [Judgment(score) for score in scores]
            judged = [Judgment(0.0, error)] if len(completions) == 1 else []
        rows = [_select([n], prompts, completions, columns) for n in range(len(completions))]
        if self.pool and not self.is_users:
            return [_judgment(*attempt) for attempt in self.pool.attempts(self.name, rows)]
        while len(judged) < len(completions):
            judged.append(_judgment(*self.attempt(self.name, *rows[len(judged)])))
            hangs = all((j.error or "").startswith(HANGS) for j in judged)
            # Waiting for every completion would exceed runtime.hang_timeout_s.
            if not self.has_worked and len(judged) == MAX_HANGS and hangs:
                break
        if not self.has_worked and all(j.error for j in judged):
            names = [name for name, values in columns.items() if isinstance(values, list)]
            raise UserError(
                f"method.rewards.{self.name} fails for every completion: {judged[0].error}. The "
                f"columns are {', '.join(names) or '(none)'}. {IN_RANK if self.pool else ''}"
            )
        self.has_worked = True
        return judged

    def _function_columns(self, columns: Columns, completions: list[Completion]) -> Columns:
        if self.pool is None:
            return columns
        column = functions.NEEDED_COLUMN.get(self.name)
        if column == "pattern" and self.pattern is not None:
            return {column: [self.pattern] * len(completions)}
        names = columns if self.is_users else filter(None, [column])
        return {name: columns[name] for name in names if _is_column(columns[name], completions)}


def _judgment(scores: list[float | None] | None, error: str | None) -> Judgment:
    return Judgment(0.0, error) if scores is None else Judgment(scores[0])
