"""Tune the matrix products of a recipe outside of it, and measure the gain of the tuned file.

A tuning collects the products of one step, times kernels for each, and writes a file that later
runs read. tunableop.py and hipblaslt.py differ in how they do so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.bench.benchmark import Row, Table, show
from recipes.rank.program import Failed
from recipes.tune import trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, measure_trials, training

WITHOUT, COLLECT, WITH = "without", "collect", "with"


def tune(
    config: DictConfig,
    args: TrainingTuneConfig,
    name: str,
    collect: Callable[[Path], Row],
    setting_with: Callable[[str], Setting],
    nothing: str,
) -> dict[str, Any]:
    """Measure a recipe without and with tuned products; return the content of result.json.

    `collect` returns a row with `products` and `tuning_s`, and writes the path of the tuned file to
    the file that it takes. If it writes none, `nothing` is the reason.
    """
    table = Table(name, f"run {TRAINING} products tuning_s", figure="tokens_per_second")
    result = trial.trial_folder(config, COLLECT) / "tuned_file"

    def work(case: Row) -> Row:
        if case["run"] == COLLECT:
            return collect(result)
        setting = setting_with(result.read_text()) if case["run"] == WITH else Setting()
        return training(config, args, case["run"], setting)

    rows = measure_trials(config, args, table, [{"run": WITHOUT}, {"run": COLLECT}], work)
    if error := rows[0]["error"] or rows[1]["error"]:
        show(table, rows, config.hardware.name, [])
        raise Failed(f"nothing was tuned: {error}", tuning=table.benchmark, rows=rows)
    if not result.exists():
        return finish(config, table, rows[:1], rows[0], [Setting()], [nothing])
    runs = [{"run": run} for run in (WITHOUT, COLLECT, WITH)]
    rows = measure_trials(config, args, table, runs, work)
    file = result.read_text()
    after = {**rows[2], "products": rows[1]["products"], "tuning_s": rows[1]["tuning_s"]}
    settings = [Setting(), setting_with(file)]
    note = f"Tuned products are in {file}."
    return finish(config, table, [rows[0], after], rows[0], settings, [note])
