"""MIOpen's search for a recipe: which of its operations a recipe calls, and, where it calls any, a step before and after the search.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=tune/miopen model=qwen3_4b

MIOpen has convolutions, pooling, normalisation of images and recurrent layers. The language models of conf/model have none of these, and
their trials show it: then this says so and there is nothing to tune. A model.path with a vision tower has some; then every kernel is
timed once (MIOPEN_FIND_ENFORCE=SEARCH_DB_UPDATE) into a database of this run's own, which the experiment names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from recipes.bench.series import Column, Row, Table, measure_rows
from recipes.common.names import named
from recipes.common.program import main
from recipes.tune import trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, require_first, trial_data

BEFORE, SEARCH, AFTER = "before", "search", "after"
# MIOPEN_ENABLE_LOGGING_CMD=1 prints each call as the command of MIOpen's own driver that repeats it.
CALL = re.compile(r"MIOpenDriver (\w+ .+?)(?: -V \d)?\s*$", re.MULTILINE)
MODES = {"normal": "1", "fast": "2", "hybrid": "3", "dynamic-hybrid": "5"}  # MIOPEN_FIND_MODE; 5 is MIOpen's default


@dataclass
class MiopenConfig(TrainingTuneConfig):
    """`find_mode`: how later runs look a kernel up: normal, fast, hybrid or dynamic-hybrid. Raises UserError."""

    find_mode: str = named(lambda: MODES, "normal")


def miopen(config: DictConfig) -> dict[str, Any]:
    args = MiopenConfig(**OmegaConf.to_container(config.trainer_args))
    table = Table("miopen", figure="tokens_per_second", columns=[Column("run", "run"), *TRAINING, Column("calls", "MIOpen calls")])
    own = config.tuned.trainer_args
    data = trial_data(config, args, own.per_device_train_batch_size * own.get("gradient_accumulation_steps", 1))
    database = Path(config.tuned.cache) / "miopen" / str(config.hardware.gfx)
    after = Setting(env={"MIOPEN_FIND_MODE": MODES[args.find_mode], "MIOPEN_USER_DB_PATH": str(database)})
    rows: list[Row] = []

    def work(case: Row) -> Row:
        require_first(rows)
        setting, env = (Setting() if case["run"] == BEFORE else after), {"MIOPEN_ENABLE_LOGGING_CMD": "1"}
        if case["run"] == SEARCH:
            database.mkdir(parents=True, exist_ok=True)
            env["MIOPEN_FIND_ENFORCE"] = "SEARCH_DB_UPDATE"
        row = trial.training(config, case["run"], setting, args.steps, args.warmup, data, env)
        return {**row, "calls": len(calls(trial.folder_of(config, case["run"]) / "log"))}

    measure_rows(config, args, table, [{"run": BEFORE}], work, rows)
    if not rows[0]["error"] and not rows[0]["calls"]:
        said = f"{args.recipe} of {config.model.name} calls nothing of MIOpen: it has no convolutions. There is nothing to tune."
        if torch.version.hip is None:
            said = "This torch has no MIOpen, so its log names no calls; on ROCm the same run says which there are."
        return finish(config, table, rows, rows[0], [Setting()], [said])
    rows = []
    measure_rows(config, args, table, [{"run": run} for run in (BEFORE, SEARCH, AFTER)], work, rows)
    return finish(config, table, [rows[0], rows[2]], rows[0], [Setting(), after])


def calls(log: Path) -> list[str]:
    """The different calls that a log shows."""
    return sorted(set(CALL.findall(log.read_text(errors="replace"))))


if __name__ == "__main__":
    main(miopen)
