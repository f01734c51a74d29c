"""Run one trial of a tuning run: a short run of the recipe with changed settings.

A trial uses the same program, arguments, strategy and number of ranks as a user's run. It runs in
new processes, because compilers, libraries and allocators keep state of earlier settings.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import read_metrics
from launch.core.key_values import hydra_value
from recipes.bench.benchmark import Row
from recipes.bench.consensus import free_port
from recipes.bench.processes import MarkedProgram, wait
from recipes.rank.program import TORCHRUN
from recipes.rank.ranks import num_ranks
from recipes.training.checkpoint import HEARTBEAT

METRICS = "metrics.jsonl"
# A trial counts as hung after this share of runtime.hang_timeout_s, before the launcher's watchdog
# would end the whole tuning run.
HUNG_SHARE = 0.8


@dataclass(frozen=True)
class Setting:
    """The arguments of the recipe and the environment variables that a trial changes."""

    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """Return the setting as overrides for launch/run.py."""
        args = [f"method.args.{name}={hydra_value(value)}" for name, value in _flat(self.args)]
        # A number in user_env remains a string without quotes, too.
        env = {n: v if str(v).isdecimal() else hydra_value(v) for n, v in self.env.items()}
        return args + [f"user_env.{name}={value}" for name, value in env.items()]


def run(
    config: DictConfig,
    name: str,
    setting: Setting,
    unrecorded: Mapping[str, Any] = {},
    data: Mapping[str, Any] = {},
    env: Mapping[str, str] = {},
    on_rows: Callable[[list[Row]], bool] = lambda rows: False,
) -> list[Row]:
    """Run the recipe in `<run>/trials/<name>`, and return the lines of its metrics.jsonl.

    `unrecorded` and `env` are arguments and variables that are not part of the setting. `data`
    replaces keys of config.data. `on_rows` is called when there are new lines, with all lines, and
    returns true or raises an exception to stop the trial. Raise UserError if the trial fails, and
    Interrupted after a signal.
    """
    folder = trial_folder(config, name)
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted trial
    folder.mkdir(parents=True)
    content: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    tuned = content.pop("tuned")
    args = {**tuned["trainer_args"], **setting.args, **unrecorded}
    args["output_dir"] = str(folder / "checkpoints")
    if "run_name" in tuned["trainer_args"]:
        args["run_name"] = folder.name
    content |= {"method": tuned["method"], "trainer_args": args, "run_dir": str(folder)}
    content |= {"trial": True, "data": {**content["data"], **data}}
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
    program = ["-m", config.tuned.method.program, "--config", str(folder / "config.yaml")]
    if num_ranks() > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        program = [*torchrun, "--nproc-per-node", str(num_ranks()), *program]
    # A trial must not inherit torchrun's variables. For a single rank they are set here, because
    # starting torchrun would take seconds.
    environ = {name: value for name, value in os.environ.items() if not TORCHRUN.match(name)}
    if num_ranks() == 1:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environ |= {"PYTHONUNBUFFERED": "1", **env, **setting.env}
    return follow(config, [sys.executable, *program], environ, folder, "log", on_rows)


def follow(
    config: DictConfig,
    argv: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    log_name: str,
    on_rows: Callable[[list[Row]], bool] = lambda rows: False,
) -> list[Row]:
    """Run a program that logs to `folder`/`log_name`, and return the lines of its metrics.jsonl.

    `on_rows` and exceptions are as in `run`. All processes of the program are stopped.
    """
    metrics, rows = folder / METRICS, list[Row]()
    process = MarkedProgram(argv, env, folder / log_name)

    def done() -> bool:
        ended, known = process.ended(), len(rows)
        rows[:] = read_metrics(metrics)
        return (len(rows) > known and on_rows(rows)) or ended

    patience_s = HUNG_SHARE * config.runtime.hang_timeout_s
    heartbeat, files = Path(config.run_dir) / HEARTBEAT, [metrics, folder / HEARTBEAT]
    wait([process], done, heartbeat, patience_s=patience_s, files=files)
    process.end()
    error = next((row["error"] for row in rows if row.get("error")), None)
    if error:
        raise UserError(error)
    return rows


def trial_folder(config: DictConfig, name: str) -> Path:
    return Path(config.run_dir) / "trials" / name


def speed(rows: list[Row], warmup: int) -> Row:
    """Return speed and memory from a trainer's lines, one per step.

    tokens_per_second is the sum of all ranks. step_s is the median, and spread is the range of step
    times divided by step_s. first_step_s includes compilation. Raise UserError if
    no step after the `warmup` steps has tokens.
    """
    measured = list(zip(rows[warmup - 1 :], rows[warmup:], strict=False)) if warmup else []
    tokens = measured and rows[-1]["num_tokens"] - rows[warmup - 1]["num_tokens"]
    if not tokens:
        raise UserError(f"no tokens after {warmup} warm-up steps; the trial had {len(rows)} steps")
    times = [after["time_s"] - before["time_s"] for before, after in measured]
    losses = [after.get("loss") for _, after in measured]
    step_s = statistics.median(times)
    return {
        "tokens_per_second": tokens / len(measured) / step_s,
        "step_s": step_s,
        "first_step_s": rows[0]["time_s"],
        "spread": (max(times) - min(times)) / step_s,
        "memory_gb": max(row["memory_peak_gb"] for row in rows),
        "mean_loss": statistics.mean(losses) if None not in losses else None,
    }


def _flat(args: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of nested arguments."""
    for name, value in args.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value
