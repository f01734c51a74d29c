"""Which trial comes next: of a grid in order; of a search, what Optuna suggests from the trials before, kept in its journal."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from launch.errors import UserError
from launch.files import rundir
from launch.schema import Sweep
from launch.sweeps import space as sweep_space
from launch.sweeps.trials import Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

JOURNAL = "journal.log"
AWAY = "Move it away, and the search begins anew; a run that is done is found by its values and not run again."


class Source(Protocol):
    """Grid and Search are such. `total` trials in all; `known` are those that have begun, in this command or before."""

    known: list[Trial]
    total: int

    def next(self) -> Trial | None: ...
    def tell(self, trial: Trial) -> None: ...


class Grid:
    """All combinations. It keeps nothing: a run that is done says so itself, and a trial that failed is tried again."""

    def __init__(self, trials: list[list[str]]) -> None:
        self.known: list[Trial] = []
        self.waiting = [Trial(number, varied) for number, varied in enumerate(trials)]
        self.total = len(trials)

    def next(self) -> Trial | None:
        if not self.waiting:
            return None
        self.known.append(self.waiting.pop(0))
        return self.known[-1]

    def tell(self, trial: Trial) -> None:
        pass


class Search:
    """A study of Optuna's. A trial that ran when the sweep died is still `running` in the journal, and comes first.

    `folder` None: nothing is kept. `before` is what sweep.json says of earlier trials beside the journal: why, run directory.
    """

    def __init__(self, sweep: Sweep, seed: int, folder: Path | None, before: list[dict[str, Any]] | None = None) -> None:
        self.sweep, self.seed = sweep, seed
        self.study = _study(sweep, folder)
        points = sweep_space.combinations(sweep)
        for point in points or []:
            self.study.enqueue_trial(point, skip_if_exists=True)
        # More than the points where the sampler chose one of them twice, as long as num_trials were fewer.
        self.total = len(self.study.trials) if points else sweep.num_trials
        for frozen in self.study.trials:
            _check_space(sweep, frozen, folder)
            if frozen.state.name == "RUNNING":
                self._complete(frozen)
        noted = {row["number"]: row for row in before or []}
        self.known = [_known(sweep, frozen, noted.get(frozen.number, {})) for frozen in self.study.trials if frozen.state.name != "WAITING"]
        self.again = [trial for trial in self.known if trial.status == "interrupted"]

    def _complete(self, frozen: FrozenTrial) -> None:
        """A kill between a trial and its values leaves it without: it gets those that it would have had."""
        from optuna.trial import Trial as Asked

        self.study.sampler = _sampler(self.seed + frozen.number)
        asked = Asked(self.study, frozen._trial_id)
        for name, distribution in sweep_space.distributions(self.sweep).items():
            asked._suggest(name, distribution)  # as Study.ask does: what is written already stays

    def next(self) -> Trial | None:
        if self.again:
            trial = self.again.pop(0)
            trial.status = "waiting"
            return trial
        number = len(self.known)
        if number >= self.total:
            return None
        self.study.sampler = _sampler(self.seed + number)
        asked = self.study.ask(sweep_space.distributions(self.sweep))
        self.known.append(Trial(asked.number, sweep_space.point(self.sweep, asked.params)))
        return self.known[-1]

    def tell(self, trial: Trial) -> None:
        """Into the journal. An interrupted trial is not told: it stays `running` there, and goes on next time."""
        from optuna.trial import TrialState

        if trial.status == "done":
            self.study.tell(trial.number, trial.value)
        elif trial.status == "failed":
            self.study.tell(trial.number, state=TrialState.FAIL)


def preview(sweep: Sweep, seed: int, folder: Path, before: list[dict[str, Any]] | None = None) -> Search:
    """The search as it would go on, in memory: what it asks for is what the real one will, and nothing is written."""
    if not (folder / JOURNAL).is_file():
        return Search(sweep, seed, None)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / JOURNAL, scratch)
        try:
            search = Search(sweep, seed, Path(scratch), before)
        except UserError as error:
            raise UserError(str(error).replace(scratch, str(folder))) from error
        kept = search.study.trials
        search.study = _study(sweep, None)
        search.study.add_trials(kept)
    return search


def _check_space(sweep: Sweep, frozen: FrozenTrial, folder: Path | None) -> None:
    """Raises UserError for a trial of another search, whose journal somebody put here."""
    foreign = sorted(set(frozen.params) - set(sweep.space))
    if foreign:
        has = f"trial {frozen.number} has {', '.join(foreign)}, and this search varies {', '.join(sweep.space)}"
        raise UserError(f"{folder}/{JOURNAL}: {has}. {AWAY}")


def _known(sweep: Sweep, frozen: Any, noted: dict[str, Any]) -> Trial:
    """A trial of the journal, with what sweep.json says of it."""
    status = {"COMPLETE": "done", "FAIL": "failed"}.get(frozen.state.name, "interrupted")
    trial = Trial(frozen.number, sweep_space.point(sweep, frozen.params), status)
    if status == "interrupted":
        return trial
    trial.metric, trial.value = sweep.metric, frozen.value if status == "done" else None
    trial.exit_code, trial.why, trial.run_dir = noted.get("exit_code"), noted.get("why"), noted.get("run_dir")
    return trial


def _study(sweep: Sweep, folder: Path | None) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a line for each trial is ours
    storage = None
    if folder is not None:
        _mend(folder / JOURNAL)
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.create_study(study_name=sweep.name, storage=storage, direction=sweep.direction.value, load_if_exists=True)


def _sampler(seed: int) -> Any:
    """A sampler for one trial. A single one with a seed would suggest its first points again after every resume."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # constant_liar: trials that run count as bad ones, so that those beside them look elsewhere.
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _mend(journal: Path) -> None:
    """What a kill in the middle of a write leaves: a last line cut off, and Optuna's lock, which it would wait 30 s for.

    The caller holds the sweep's own lock, so nobody else writes. Raises UserError for a line that Optuna could not read.
    """
    with contextlib.suppress(FileNotFoundError):
        journal.with_name(f"{journal.name}.lock").unlink()
    if not journal.is_file():
        return
    from optuna.storages.journal._storage import JournalStorageReplayResult

    replay = JournalStorageReplayResult("")  # what Optuna reads them with: an operation that it does not know trips an assertion of its own
    content = journal.read_bytes()
    *lines, cut = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            replay.apply_logs([json.loads(line)])
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(f"{journal}:{number}: no line of Optuna's journal. {AWAY}") from error
    if cut:
        rundir.write_text(journal, content[: -len(cut)].decode())
