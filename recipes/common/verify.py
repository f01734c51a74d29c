"""The rewards of a composition together: weighted, chained, and safe from what a completion can do to them.

A completion that a reward crashes or hangs on fails there with a score of 0 and the reason; the next ones are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.common import rewards
from recipes.common.errors import UserError
from recipes.common.rewards import Completion, Reward
from recipes.common.verify_code import CodeTests
from recipes.common.verify_isolated import HANGS, Isolated

Columns = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """What one reward says of one completion: a score, None where it does not apply; and why it had to be cut off, if so."""

    score: float | None
    error: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`score` is the weighted mean of `scores` (by reward, those that apply), from 0 to 1; `error` the first crash, hang or limit."""

    score: float
    scores: dict[str, float]
    error: str | None


Judge = Callable[[list[Any], list[Completion], Columns], list[Judged]]
Ask = Callable[[list[Any], list[Completion], Columns], tuple[list[float | None] | None, str | None]]  # (scores, None) or (None, why not)
FEW = 3  # completions that a function hangs on from the first: it hangs on all
IN_RANK = "Use: method.reward_confined=false, which has it in the rank, where a hang of it is the run's."


# Exceptions that say nothing of a process beside the rank, but for those of os.environ or after what it refused.
OWN_FAULTS = ("TypeError", "KeyError", "ValueError", "AttributeError", "NameError", "UnboundLocalError", "IndexError", "AssertionError")
OWN_FAULTS += ("ZeroDivisionError", "OverflowError", "NotImplementedError", "JSONDecodeError", "PatternError", "StopIteration")
CONFINED = (" of os.environ", "a scorer may not: ")


class Verifier:
    """Judges completions. `errors` counts those that crashed a reward, hung in it or met a limit, since it was made."""

    def __init__(self, judges: dict[str, Judge], weights: dict[str, float], chain: list[str]) -> None:
        self.judges, self.weights, self.chain = judges, weights, chain
        self.errors = 0
        self._last: tuple[Any, list[dict[str, Judged]]] | None = None

    def __call__(self, prompts: list[Any], completions: list[Completion], columns: Columns) -> list[Verdict]:
        return [self._verdict(judged) for judged in self._judge(prompts, completions, columns)]

    def rewards(self) -> tuple[list[Reward], list[float]]:
        """The same as TRL takes it: a function for each reward, under its name, and their weights. The errors go to TRL's metrics."""
        return [_Function(self, name) for name in self.judges], [self.weights[name] for name in self.judges]

    def of_batch(self, prompts: list[Any], completions: list[Completion], columns: Columns) -> list[dict[str, Judged]]:
        """What all rewards say: judged once, though TRL asks for one reward after the other."""
        if self._last is None or self._last[0] is not completions:
            self._last = (completions, self._judge(prompts, completions, columns))
        return self._last[1]

    def _judge(self, prompts: list[Any], completions: list[Completion], columns: Columns) -> list[dict[str, Judged]]:
        found: list[dict[str, Judged]] = [{} for _ in completions]
        asked = list(range(len(completions)))
        for name in self.chain:
            self._ask(name, asked, found, prompts, completions, columns)
            for judged in found:
                judged.setdefault(name, Judged(0.0))
            asked = [i for i in asked if found[i][name].score == 1.0]
        for name in self.judges:
            if name not in self.chain:
                self._ask(name, list(range(len(completions))), found, prompts, completions, columns)
        self.errors += sum(any(j.error for j in judged.values()) for judged in found)
        return found

    def _ask(self, name: str, which: list[int], found: list[dict[str, Judged]], prompts: Any, completions: Any, columns: Columns) -> None:
        if not which:
            return
        # What is no list of rows is TRL's own: its state, its functions to log with.
        of_these = {k: [v[i] for i in which] if _is_column(v, len(completions)) else v for k, v in columns.items()}
        judged = self.judges[name]([prompts[i] for i in which], [completions[i] for i in which], of_these)
        for i, each in zip(which, judged, strict=True):
            found[i][name] = each

    def _verdict(self, judged: dict[str, Judged]) -> Verdict:
        scores = {name: j.score for name, j in judged.items() if j.score is not None}
        total = sum(abs(self.weights[name]) for name in scores)
        score = sum(self.weights[name] * value for name, value in scores.items()) / total if total else 0.0
        return Verdict(score, scores, next((f"{name}: {j.error}" for name, j in judged.items() if j.error), None))


class _Function:
    """One reward of a verifier as TRL calls it."""

    def __init__(self, verifier: Verifier, name: str) -> None:
        self.verifier, self.name = verifier, name
        self.__name__ = name.rpartition(".")[2]  # what TRL logs it under

    def __call__(self, prompts: list[Any], completions: list[Completion], **columns: Any) -> list[float | None]:
        judged = self.verifier.of_batch(prompts, completions, columns)
        if self.name == next(iter(self.verifier.judges)) and "log_metric" in columns:
            # TRL takes the mean over ranks and batches: a share has one, a count has not.
            columns["log_metric"]("verifier_error_share", sum(any(j.error for j in each.values()) for each in judged) / len(judged))
        return [each[self.name].score for each in judged]


def build_verifier(config: DictConfig, columns: list[str]) -> Verifier:
    """The verifier of `method.rewards`, `reward_chain` and `reward_pattern`; `columns` are those of the rows.

    Raises UserError for no reward, an unknown name, a path that cannot be imported, a reward whose column the rows lack, and a chain
    that names what is no reward of the composition.
    """
    method = config.method
    if not method.rewards:
        raise UserError(f"method.rewards is empty: it needs at least one of {', '.join(rewards.NAMES)}, or package.module.function.")
    stray = [name for name in method.reward_chain if name not in method.rewards]
    if stray:
        raise UserError(f"method.reward_chain names {stray[0]!r}, which method.rewards does not have.")
    check_columns(config, columns)
    own = [name for name in method.rewards if "." in name]
    confined = own if method.reward_confined else []
    isolated = Isolated([*(name for name in method.rewards if name in rewards.REWARDS), *confined])
    judges: dict[str, Judge] = {}
    for name in method.rewards:
        if name in own:
            judges[name] = _Own(name, _confined(name, isolated), f" {IN_RANK}") if name in confined else _Own(name, _in_rank(name), "")
            continue
        judges[name] = _code_tests(config) if name == rewards.CODE_TESTS else _named(name, isolated, method.reward_pattern)
    if confined:
        isolated.start()  # what cannot be imported shows before there are completions
    elif isolated.names:
        isolated.begin()  # while the model is loaded
    return Verifier(judges, {name: float(weight) for name, weight in method.rewards.items()}, list(method.reward_chain))


def check_columns(config: DictConfig, columns: list[str], rows: str = "the rows") -> None:
    """Raises UserError for an unknown reward, for one whose column `rows`, which have `columns`, lack, and for two patterns."""
    pattern = config.method.reward_pattern
    if pattern is not None and "pattern" in columns:
        raise UserError(f"method.reward_pattern is given, and {rows} have a column 'pattern': one of them would be ignored.")
    for name in config.method.rewards:
        if "." not in name:
            rewards.check_name(name, columns + ["pattern"] * (pattern is not None), rows)


def _code_tests(config: DictConfig) -> Judge:
    run = CodeTests(Path(config.run_dir))

    def judge(prompts: list[Any], completions: list[Completion], columns: Columns) -> list[Judged]:
        texts = [rewards.text(c) for c in completions]
        return [Judged(*pair) for pair in run(texts, columns["tests"], columns.get("language"))]

    return judge


def _named(name: str, isolated: Isolated, pattern: str | None) -> Judge:
    """In a process of its own that can be killed: a completion may be a number that takes a year to write out."""
    needed = rewards.NEEDED_COLUMN.get(name)

    def judge(prompts: list[Any], completions: list[Completion], columns: Columns) -> list[Judged]:
        given = [pattern] * len(completions) if needed == "pattern" and pattern is not None else columns.get(needed or "", [])
        rows = [{needed: value} for value in given] if needed else [{} for _ in completions]
        return [Judged(*isolated(name, rewards.text(c), row)) for c, row in zip(completions, rows, strict=True)]

    return judge


def _confined(name: str, isolated: Isolated) -> Ask:
    """Its process is given columns and nothing else: the trainer's state and its functions to log with are of the rank."""

    def ask(prompts: list[Any], completions: list[Completion], columns: Columns) -> tuple[list[float | None] | None, str | None]:
        given = {key: value for key, value in columns.items() if _is_column(value, len(completions))}
        try:
            return isolated.ask(name, prompts, completions, given)
        except TypeError as error:
            raise UserError(
                f"method.rewards.{name}: columns {', '.join(given)} go to its process as JSON, and one cannot ({error}). {IN_RANK}"
            ) from error

    return ask


def _in_rank(name: str) -> Ask:
    rewards.imported(name)  # what cannot be shows before there are completions

    def ask(prompts: list[Any], completions: list[Completion], columns: Columns) -> tuple[list[float | None] | None, str | None]:
        try:
            return rewards.judge(name, prompts, completions, columns), None
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's function raises is these completions' failure
            return None, rewards.failure(name, error)

    return ask


class _Own:
    """A function of the user's: asked for all completions at once, and where that fails for each alone.

    Raises UserError where it has never worked, or returns another number of scores than there are completions.
    """

    def __init__(self, path: str, ask: Ask, remedy: str) -> None:
        self.path, self.ask, self.remedy, self.works = path, ask, remedy, False

    def __call__(self, prompts: list[Any], completions: list[Completion], columns: Columns) -> list[Judged]:
        scores, error = self.ask(prompts, completions, columns)
        if scores is not None:
            judged = [Judged(score) for score in scores]
        elif len(completions) == 1:
            judged = [Judged(0.0, error)]
        else:
            judged = []
            for i in range(len(completions)):
                judged.append(self._alone(i, prompts, completions, columns))
                # All of them, one by one, would outlast runtime.hang_timeout_s.
                if not self.works and len(judged) == FEW and all(j.error and j.error.startswith(HANGS) for j in judged):
                    break
        if not self.works and all(j.error for j in judged):
            raise UserError(f"method.rewards.{self.path} fails for every completion: {self._why(str(judged[0].error), columns)}")
        self.works = True
        return judged

    def _why(self, error: str, columns: Columns) -> str:
        """The error with what helps: the columns where one is looked for, the rank where its process can be the reason."""
        confined = any(sign in error for sign in CONFINED)
        kind = error.partition(":")[0]
        if kind == "KeyError" and not confined:
            return (
                f"{error}. The columns are {', '.join(name for name, values in columns.items() if isinstance(values, list)) or '(none)'}."
            )
        return f"{error}.{self.remedy if confined or kind not in OWN_FAULTS else ''}"

    def _alone(self, i: int, prompts: list[Any], completions: list[Completion], columns: Columns) -> Judged:
        row = {k: [v[i]] if _is_column(v, len(completions)) else v for k, v in columns.items()}
        scores, error = self.ask([prompts[i]], [completions[i]], row)
        return Judged(scores[0]) if scores is not None else Judged(0.0, error)


def _is_column(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count
