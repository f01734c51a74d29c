"""Supply the next trial: a grid in order, or a search as Optuna suggests it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launch.schema import Direction, Parameter, Sweep
from launch.study import space as sweep_space
from launch.study.trials import Trial

if TYPE_CHECKING:
    from optuna import Study


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


class Search:
    """A search by Optuna that continues from `rows`, the trials in sweep.json.

    Trials that ran when the sweep died come first. If the rows are of a version that kept no
    parameters, the search begins again; finished runs are found by their values.
    """

    def __init__(self, sweep: Sweep, seed: int, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.sweep, self.seed = sweep, seed
        whole = all(row.get("params") for row in rows)
        self.known = [Trial(**{**row, "ran": False}) for row in rows if whole]
        self.again = [trial for trial in self.known if trial.status not in ("done", "failed")]
        for trial in self.again:
            trial.status = "interrupted"
        points, tried = sweep_space.combinations(sweep), [trial.params for trial in self.known]
        self.points = [point for point in points or [] if point not in tried]
        # This exceeds num_trials if the sampler chose a point twice while num_trials was smaller.
        self.total = sweep.num_trials if points is None else len(tried) + len(self.points)

    def next(self) -> Trial | None:
        if self.again:
            trial = self.again.pop(0)
            trial.status = "waiting"
            return trial
        if len(self.known) >= self.total:
            return None
        if self.points:
            params: dict[str, Any] = dict(self.points.pop(0))
        else:
            study = study_of(self.sweep, self.known, self.seed + len(self.known))
            params = study.ask(_distributions(self.sweep)).params
        varied = sweep_space.point(self.sweep, params)
        self.known.append(Trial(len(self.known), varied, params=params))
        return self.known[-1]


Source = Grid | Search


def study_of(sweep: Sweep, trials: list[Trial], seed: int = 0) -> Study:
    """Return a study of these trials, in memory.

    Each suggestion has a sampler with its own seed, because a resumed sampler would repeat its
    first points. constant_liar counts running trials as bad, so that the next ones search
    elsewhere.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # we print a line per trial ourselves
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction=sweep.direction.value)
    states = {"done": TrialState.COMPLETE, "failed": TrialState.FAIL}
    distributions = _distributions(sweep)
    for trial in trials:
        state = states.get(trial.status, TrialState.RUNNING)
        value = trial.value if trial.status == "done" else None
        study.add_trial(
            create_trial(state=state, value=value, params=trial.params, distributions=distributions)
        )
    return study


def _distributions(sweep: Sweep) -> dict[str, Any]:
    return {name: sweep_space.distribution(p) for name, p in sweep.space.items()}


def importances(content: Mapping[str, Any]) -> dict[str, float]:
    """Return each parameter's share by Optuna's PED-ANOVA of a sweep.json, largest first."""
    import optuna

    space = {name: Parameter(**fields) for name, fields in content["space"].items()}
    sweep = Sweep(direction=Direction(content["direction"]), space=space)
    trials = [Trial(**row) for row in content["trials"]]
    return dict(optuna.importance.get_param_importances(study_of(sweep, trials)))
