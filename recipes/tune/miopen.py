"""Find the calls of MIOpen in a recipe, let MIOpen search for faster kernels, and measure the gain.

MIOpen implements convolutions, pooling, normalization of images and recurrent layers. The language
models of conf/model do not use these, so there is nothing to tune. A model.path with a vision tower
may use them. MIOpen then times all kernels once (MIOPEN_FIND_ENFORCE=SEARCH_DB_UPDATE) and writes
the results to a database. The experiment sets the path of this database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from recipes.bench.benchmark import Row, Table
from recipes.rank.names import name_field
from recipes.rank.program import main
from recipes.tune.trial import Setting, trial_folder
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, measure_trials, training

BEFORE, SEARCH, AFTER = "before", "search", "after"
# With MIOPEN_ENABLE_LOGGING_CMD=1, MIOpen logs each call as a command of MIOpenDriver.
CALL = re.compile(r"MIOpenDriver (\w+ .+?)(?: -V \d)?\s*$", re.MULTILINE)
# Values of MIOPEN_FIND_MODE. MIOpen's default is 5.
MODES = {"normal": "1", "fast": "2", "hybrid": "3", "dynamic-hybrid": "5"}


@dataclass
class MiopenConfig(TrainingTuneConfig):
    """Arguments. `find_mode`: how later runs choose a kernel."""

    find_mode: str = name_field(lambda: MODES, "normal")


def miopen(config: DictConfig) -> dict[str, Any]:
    args = MiopenConfig(**OmegaConf.to_container(config.trainer_args))
    table = Table("miopen", f"run {TRAINING} calls", figure="tokens_per_second")
    database = Path(config.tuned.cache) / "miopen" / str(config.hardware.gfx)
    after = Setting(
        env={"MIOPEN_FIND_MODE": MODES[args.find_mode], "MIOPEN_USER_DB_PATH": str(database)}
    )

    def work(case: Row) -> Row:
        setting = Setting() if case["run"] == BEFORE else after
        env = {"MIOPEN_ENABLE_LOGGING_CMD": "1"}
        if case["run"] == SEARCH:
            database.mkdir(parents=True, exist_ok=True)
            env["MIOPEN_FIND_ENFORCE"] = "SEARCH_DB_UPDATE"
        row = training(config, args, case["run"], setting, env)
        return {**row, "calls": len(calls(trial_folder(config, case["run"]) / "log"))}

    rows = measure_trials(config, args, table, [{"run": BEFORE}], work)
    if not rows[0]["error"] and not rows[0]["calls"]:
        note = (
            f"{args.recipe} of {config.model.name} does not call MIOpen because it has no "
            "convolutions. There is nothing to tune."
        )
        if torch.version.hip is None:
            note = "This torch has no MIOpen. Only a ROCm build can be tuned."
        return finish(config, table, rows, rows[0], [Setting()], [note])
    runs = [{"run": run} for run in (BEFORE, SEARCH, AFTER)]
    rows = measure_trials(config, args, table, runs, work)
    return finish(config, table, [rows[0], rows[2]], rows[0], [Setting(), after])


def calls(log: Path) -> list[str]:
    """Return the distinct MIOpen calls in a log, sorted."""
    return sorted(set(CALL.findall(log.read_text(errors="replace"))))


if __name__ == "__main__":
    main(miopen)
