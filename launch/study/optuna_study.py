"""Supply the next trial: a grid in order, or a search as Optuna suggests it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.core.errors import UserError
from launch.schema import Sweep
from launch.study import space as sweep_space
from launch.study.trials import Trial

if TYPE_CHECKING:
    from optuna import Study

JOURNAL = "journal.log"


class Grid:
    """All combinations. Keeps no state: finished runs are found on disk, failed ones run again.

    As in Search, `total` counts all trials, and `known` are those that have begun.
    """

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
    """An Optuna study in the journal of `folder`; a copy in memory unless `keep`.

    Trials that ran when the sweep died are still `running` in the journal and come first. `before`
    are the trials in sweep.json, which records why a trial failed and where its run is.
    """

    def __init__(
        self,
        sweep: Sweep,
        seed: int,
        folder: Path,
        before: list[dict[str, Any]] | None = None,
        keep: bool = True,
    ) -> None:
        self.sweep, self.seed = sweep, seed
        journal = folder / JOURNAL
        if keep:
            # A kill in the middle of a write leaves a cut last line and Optuna's lock, for which
            # Optuna would wait 30 s. The caller holds the sweep's own lock, so there are no other
            # writers.
            journal.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
            with journal.open("ab+") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            self.study = _load(journal, sweep)
        else:
            self.study = _in_memory(sweep)
            if journal.is_file() and journal.stat().st_size:
                self.study.add_trials(_load(journal).trials)
        rows = {row["number"]: row for row in before or []}
        trials, statuses = self.study.trials, {"COMPLETE": "done", "FAIL": "failed"}
        self.known = []
        for frozen in trials:
            status = statuses.get(frozen.state.name, "interrupted")
            trial = Trial(frozen.number, sweep_space.point(sweep, frozen.params), status)
            if status != "interrupted":
                row = rows.get(frozen.number, {})
                trial.metric, trial.value = sweep.metric, frozen.value
                trial.exit_code, trial.why = row.get("exit_code"), row.get("why")
                trial.run_dir = row.get("run_dir")
            self.known.append(trial)
        self.again = [trial for trial in self.known if trial.status == "interrupted"]
        points, tried = sweep_space.combinations(sweep), [t.params for t in trials]
        self.points = [point for point in points or [] if point not in tried]
        # This exceeds num_trials if the sampler chose a point twice while num_trials was smaller.
        self.total = sweep.num_trials if points is None else len(tried) + len(self.points)

    def next(self) -> Trial | None:
        from optuna.trial import TrialState, create_trial

        if self.again:
            trial = self.again.pop(0)
            trial.status = "waiting"
            return trial
        if len(self.known) >= self.total:
            return None
        distributions = {name: sweep_space.distribution(p) for name, p in self.sweep.space.items()}
        if self.points:
            params: dict[str, Any] = dict(self.points.pop(0))
        else:
            copy = _in_memory(self.sweep, self.seed + len(self.known))
            copy.add_trials(self.study.trials)
            params = copy.ask(distributions).params
        # Use one write: Study.ask writes a trial before its values, and a kill may come in between.
        self.study.add_trial(
            create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
        )
        self.known.append(Trial(len(self.known), sweep_space.point(self.sweep, params)))
        return self.known[-1]

    def tell(self, trial: Trial) -> None:
        """Record how a trial ended. An interrupted one stays `running` and is resumed next time."""
        from optuna.trial import TrialState

        if trial.status == "done":
            self.study.tell(trial.number, trial.value)
        elif trial.status == "failed":
            self.study.tell(trial.number, state=TrialState.FAIL)


Source = Grid | Search


def importances(journal: Path) -> dict[str, float]:
    """Return each parameter's share by Optuna's PED-ANOVA of a journal, largest first."""
    import optuna

    return dict(optuna.importance.get_param_importances(_load(journal)))


def _in_memory(sweep: Sweep, seed: int = 0) -> Study:
    """Return an empty study.

    Each trial has a sampler with its own seed, because a resumed sampler would repeat its first
    points. constant_liar counts running trials as bad ones, so that others look elsewhere.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # we print a line per trial ourselves
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.create_study(sampler=sampler, direction=sweep.direction.value)


def _load(journal: Path, sweep: Sweep | None = None) -> Study:
    """Return the study in a journal; begin that of `sweep` if there is none."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = JournalStorage(JournalFileBackend(str(journal)))
        if sweep is None:
            return optuna.load_study(study_name=None, storage=storage)
        return optuna.create_study(
            study_name=sweep.name,
            storage=storage,
            direction=sweep.direction.value,
            load_if_exists=True,
        )
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(
            f"{journal}: not a journal of Optuna ({error!r}). Move it away to begin the search "
            "again; finished runs are found by their values."
        ) from error
