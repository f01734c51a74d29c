"""Supply the trials of a sweep: a grid in order, or the suggestions of Optuna."""

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
    """All combinations in order. Finished runs are found on disk, so a grid keeps no state.

    As in Search, `trials` lists the started trials, and `total` counts all of them.
    """

    def __init__(self, combinations: list[list[str]]) -> None:
        self.trials: list[Trial] = []
        self.waiting = [Trial(number, varied) for number, varied in enumerate(combinations)]
        self.total = len(combinations)

    def next(self) -> Trial | None:
        if not self.waiting:
            return None
        self.trials.append(self.waiting.pop(0))
        return self.trials[-1]


class Search:
    """A search by Optuna that continues from `rows`, the trials in sweep.json.

    Unfinished trials come first. If the rows have no parameters, an old version wrote them, and the
    search starts again. Finished runs are still found on disk.
    """

    def __init__(self, sweep: Sweep, seed: int, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.sweep, self.seed = sweep, seed
        has_params = all(row.get("params") for row in rows)
        self.trials = [Trial(**{**row, "ran": False}) for row in rows if has_params]
        self.unfinished = [trial for trial in self.trials if trial.status not in ("done", "failed")]
        for trial in self.unfinished:
            trial.status = "interrupted"
        points, used = sweep_space.combinations(sweep), [trial.params for trial in self.trials]
        self.points = [point for point in points or [] if point not in used]
        # More than num_trials if the sampler repeated a point before num_trials was raised.
        self.total = sweep.num_trials if points is None else len(used) + len(self.points)

    def next(self) -> Trial | None:
        if self.unfinished:
            trial = self.unfinished.pop(0)
            trial.status = "waiting"
            return trial
        if len(self.trials) >= self.total:
            return None
        if self.points:
            params: dict[str, Any] = dict(self.points.pop(0))
        else:
            study = study_of(self.sweep, self.trials, self.seed + len(self.trials))
            params = study.ask(_distributions(self.sweep)).params
        varied = sweep_space.overrides_of(self.sweep, params)
        self.trials.append(Trial(len(self.trials), varied, params=params))
        return self.trials[-1]


Source = Grid | Search


def study_of(sweep: Sweep, trials: list[Trial], seed: int = 0) -> Study:
    """Return an in-memory study that contains these trials.

    Use another seed for each suggestion, because a new sampler would repeat its first points.
    constant_liar treats running trials as bad, so that the next one differs from them.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep prints one line per trial
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
    """Return the importance of each parameter in a sweep.json by PED-ANOVA, largest first."""
    import optuna

    space = {name: Parameter(**fields) for name, fields in content["space"].items()}
    sweep = Sweep(direction=Direction(content["direction"]), space=space)
    trials = [Trial(**row) for row in content["trials"]]
    return dict(optuna.importance.get_param_importances(study_of(sweep, trials)))
