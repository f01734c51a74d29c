"""Run one trial of a tuning: a short run of the recipe with changed arguments and variables.

A trial uses the same program, arguments, strategy and ranks as a user's run. Its processes are new,
because compilers, libraries and allocators keep state of earlier settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import read_metrics
from recipes.bench.ranks import free_port
from recipes.bench.series import OUT_OF_MEMORY, Row
from recipes.rank.program import TORCHRUN, Failed, Interrupted, stop_asked
from recipes.training.checkpoint import HEARTBEAT

METRICS = "metrics.jsonl"
POLL_S = 0.1
STOP_TIMEOUT_S = 60.0  # from SIGTERM to SIGKILL: vLLM's engines have processes to end
DIES_WITHIN_S = 30.0  # after SIGKILL; a process that waits in the kernel for a hung GPU may not
# Share of runtime.hang_timeout_s after which a hung trial ends, so that the watchdog does not end
# the whole tuning.
HUNG_SHARE = 0.8
# An environment variable that marks a trial's processes. torchrun and vLLM start new sessions, so a
# signal to one process group does not reach all of them.
MARK = "RECIPES_TRIAL"
PLAIN = re.compile(r"[\w./:+@%-]+")  # text that Hydra's grammar accepts without quotes


@dataclass(frozen=True)
class Setting:
    """Hold the recipe's arguments and the environment variables that a trial changes."""

    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """Return the setting as overrides for launch/run.py."""
        args = [f"method.args.{name}={word(value)}" for name, value in _flat(self.args)]
        return args + [f"user_env.{name}={word(value)}" for name, value in self.env.items()]


@dataclass(frozen=True)
class Outcome:
    """Hold a trial's results: the lines of its metrics.jsonl, and its error if it failed."""

    rows: list[Row]
    error: str | None
    stopped: bool  # by `on_rows`

    def checked_rows(self) -> list[Row]:
        """Return the rows. Raise UserError if the trial failed."""
        if self.error:
            raise UserError(self.error)
        return self.rows


def run(
    config: DictConfig,
    name: str,
    setting: Setting,
    unrecorded: Mapping[str, Any] = {},
    data: Mapping[str, Any] = {},
    env: Mapping[str, str] = {},
    on_rows: Callable[[list[Row]], bool] = lambda rows: False,
) -> Outcome:
    """Run the recipe in `<run>/trials/<name>`, which keeps config.yaml, log and metrics.

    `unrecorded` and `env` are arguments and variables besides the setting; `data` replaces keys of
    config.data. `on_rows` is called with new lines and returns true to stop. Raise Interrupted
    after a signal.
    """
    folder = folder_of(config, name)
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
    # A trial must not inherit torchrun's variables. For one rank they are set here, since starting
    # torchrun takes seconds.
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
) -> Outcome:
    """Run a program that logs to `folder`/`log_name`, and end all of its processes afterwards."""
    log = folder / log_name
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env={**env, MARK: str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that all of its processes can be stopped
        )
    patience_s = HUNG_SHARE * config.runtime.hang_timeout_s
    try:
        stopped = _follow(process, log, Path(config.run_dir) / HEARTBEAT, on_rows, patience_s)
    finally:
        _end(process, folder)
    rows = read_metrics(folder / METRICS)
    error = next((row["error"] for row in rows if row.get("error")), None)
    if stopped is None:
        error = f"hung: no progress for {patience_s:.0f} s"
    elif not stopped and process.returncode != 0:
        error = _why(log, process.returncode)
    return Outcome(rows, error, bool(stopped))


def folder_of(config: DictConfig, name: str) -> Path:
    return Path(config.run_dir) / "trials" / name


def training(
    config: DictConfig,
    name: str,
    setting: Setting,
    steps: int,
    warmup: int,
    data: Mapping[str, Any],
    env: Mapping[str, str] = {},
) -> Row:
    """Return the speed of `steps` steps after `warmup`. Raise UserError if the trial failed."""
    bounds = {"max_steps": warmup + steps, "num_train_epochs": 1, "logging_steps": 1}
    bounds |= {"save_strategy": "no", "eval_strategy": "no"}
    return speed(run(config, name, setting, bounds, data, env).checked_rows(), warmup)


def speed(rows: list[Row], warmup: int) -> Row:
    """Return speed and memory from a trainer's lines, one per step.

    tokens_per_second counts all ranks, step_s is the median, spread is the range of step times as a
    share of it, and first_step_s includes compilation.
    """
    measured = list(zip(rows[warmup - 1 :], rows[warmup:], strict=False)) if warmup else []
    tokens = measured and rows[-1]["num_tokens"] - rows[warmup - 1]["num_tokens"]
    if not tokens:
        raise UserError(f"no tokens in {len(rows)} steps, of which {warmup} are warm-up")
    times = [after["time_s"] - before["time_s"] for before, after in measured]
    step_s = statistics.median(times)
    return {
        "tokens_per_second": tokens / len(measured) / step_s,
        "step_s": step_s,
        "first_step_s": rows[0]["time_s"],
        "spread": (max(times) - min(times)) / step_s,
        "memory_gb": max(row["memory_peak_gb"] for row in rows),
    }


def num_ranks() -> int:
    """Return the number of ranks of a trial, which is that of this program."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _follow(
    process: subprocess.Popen[bytes],
    log: Path,
    heartbeat: Path,
    on_rows: Callable[[list[Row]], bool],
    patience_s: float,
) -> bool | None:
    """Wait for the end. Return whether `on_rows` stopped it; None after `patience_s` of silence.

    The trial's progress counts as this run's for the launcher's watchdog.
    """
    seen, num_rows, changed = (0.0,), 0, time.monotonic()
    files = [log, *(log.with_name(name) for name in (METRICS, HEARTBEAT))]
    while True:
        ended = process.poll() is not None
        if stop_asked():
            raise Interrupted()
        now = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in files)
        if now != seen:
            seen, changed = now, time.monotonic()
            heartbeat.touch()
            rows = read_metrics(log.with_name(METRICS))
            if len(rows) > num_rows:
                num_rows = len(rows)
                if on_rows(rows) and not ended:
                    return True
        if ended:
            return False
        if time.monotonic() - changed > patience_s:
            return None
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End all processes of a trial, since they would hold GPU memory that the next one needs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    deadline = time.monotonic() + DIES_WITHIN_S
    while True:
        remaining = []
        for candidate in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or one that just ended
                if candidate.environ().get(MARK) == str(folder):
                    remaining.append(candidate)
                    candidate.kill()
        if not remaining:
            break
        if time.monotonic() > deadline:
            raise Failed(f"{remaining} of {folder} do not end; the next trial needs their memory")
        psutil.wait_procs(remaining, POLL_S)
    process.wait()


def _why(log: Path, code: int) -> str:
    """Return a line with the reason of a failure: a rank's report, or the end of the log."""
    reports = [json.loads(path.read_text()) for path in log.parent.glob("failures/rank*.json")]
    # The first rank to fail has the cause; the others only report the lost connection.
    reports.sort(key=lambda report: report["time"])
    result = log.with_name("result.json")
    if result.exists():
        reports.append(json.loads(result.read_text()))
    errors = [str(report["error"]) for report in reports if report.get("error")]
    if any("OutOfMemoryError" in error for error in errors):
        return OUT_OF_MEMORY
    if errors:
        return errors[0].splitlines()[0][:300]
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {lines[-1][:200]}" if lines else how


def _flat(args: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of nested arguments."""
    for name, value in args.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def word(value: Any) -> str:
    """Return a value as Hydra's command line needs it; a comma outside quotes would be a sweep."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word(item)}" for key, item in value.items()) + "}"
    text = str(value)
    return text if PLAIN.fullmatch(text) else "'" + text.replace("'", "\\'") + "'"
