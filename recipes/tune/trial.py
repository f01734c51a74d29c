"""One trial of a tuning: a short run of the recipe itself, in processes of its own, with some arguments and variables changed.

What is measured is what a user's run does: the same program, the same arguments, the same strategy over the same ranks. Fresh processes,
because compilers, libraries and memory allocators keep for the life of a process what an earlier setting left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench.series import OUT_OF_MEMORY, Row
from recipes.common.checkpoint import HEARTBEAT
from recipes.common.errors import UserError
from recipes.common.program import Interrupted, stop_asked

POLL_S = 0.1
STOP_TIMEOUT_S = 60.0  # from SIGTERM to SIGKILL: nothing of a trial needs saving, but engines of vLLM have processes to end
DIES_WITHIN_S = 30.0  # of SIGKILL; one that waits inside the kernel, for a GPU that hangs, does not
HUNG_SHARE = 0.8  # of runtime.hang_timeout_s: a trial that hangs is a row, before the launcher's watchdog ends the whole tuning
# Its processes inherit it. torchrun and vLLM give theirs sessions of their own, so no signal to a group reaches all of them.
MARK = "RECIPES_TRIAL"
PLAIN = re.compile(r"[\w./:+@%-]+")  # what Hydra's grammar takes without quotes
# What torchrun tells its ranks: a trial's have a torchrun of their own, or are told anew.
OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE", "TORCH_NCCL_ASYNC")


@dataclass(frozen=True)
class Setting:
    """What a trial changes: arguments of the recipe's configuration class, and environment variables."""

    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """The same for the command line of launch/run.py."""
        given = [f"method.args.{name}={word(value)}" for name, value in _flat(self.args)]
        return given + [f"user_env.{name}={word(value)}" for name, value in self.env.items()]


@dataclass(frozen=True)
class Outcome:
    """`rows`: the lines of the trial's metrics.jsonl. `error`: why it failed. `stopped`: it was, by `on_rows`."""

    rows: list[Row]
    error: str | None
    stopped: bool
    folder: Path


def run(
    config: DictConfig,
    name: str,
    setting: Setting,
    unrecorded: Mapping[str, Any] = {},
    data: Mapping[str, Any] = {},
    env: Mapping[str, str] = {},
    on_rows: Callable[[list[Row]], bool] = lambda rows: False,
) -> Outcome:
    """Run the recipe in `<run>/trials/<name>`, which holds its config.yaml, log and metrics afterwards.

    `unrecorded` and `env` are arguments and variables that the trial needs and the setting does not have; `data` replaces keys of
    config.data. `on_rows` is called whenever a line was added, and returns true to stop. Raises Interrupted when a signal asked to.
    """
    folder = folder_of(config, name)
    shutil.rmtree(folder, ignore_errors=True)  # of a trial that was interrupted
    folder.mkdir(parents=True)
    _write_config(config, folder, {**setting.args, **unrecorded}, data)
    return follow(config, _argv(config, folder), _environment({**env, **setting.env}), folder, "log", on_rows)


def follow(
    config: DictConfig,
    argv: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    log_name: str,
    on_rows: Callable[[list[Row]], bool] = lambda rows: False,
) -> Outcome:
    """Run a program whose log is `folder`/`log_name` to its end, and leave none of its processes. Raises as `run` does."""
    with (folder / log_name).open("wb") as log:
        process = subprocess.Popen(
            argv,
            env={**env, MARK: str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that all of its processes can be stopped
        )
    patience_s = HUNG_SHARE * config.runtime.hang_timeout_s
    try:
        stopped = _follow(process, folder / log_name, Path(config.run_dir) / HEARTBEAT, on_rows, patience_s)
        hung = stopped is None
    finally:
        _end(process, folder)
    if hung:
        return Outcome(_rows(folder), f"hung: nothing got on for {patience_s:.0f} s", False, folder)
    error = None if stopped or process.returncode == 0 else _why(folder / log_name, process.returncode)
    return Outcome(_rows(folder), error, bool(stopped), folder)


def folder_of(config: DictConfig, name: str) -> Path:
    return Path(config.run_dir) / "trials" / name


def training(
    config: DictConfig, name: str, setting: Setting, steps: int, warmup: int, data: Mapping[str, Any], env: Mapping[str, str] = {}
) -> Row:
    """Speed of so many training steps after `warmup` ones: tokens/s of all ranks, the median step, how far steps lie apart, the first
    step with all that it compiles, and memory. Raises UserError with the reason of a trial that failed.
    """
    bounds = {"max_steps": warmup + steps, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
    outcome = run(config, name, setting, bounds, data, env)
    if outcome.error:
        raise UserError(outcome.error)
    return speed(outcome.rows, warmup)


def speed(rows: list[Row], warmup: int) -> Row:
    """Of the lines that a trainer logged, one a step. Raises UserError where none is after the warm-up, or no token was counted."""
    measured = list(zip(rows[warmup - 1 :], rows[warmup:], strict=False)) if warmup else []
    if not measured:
        raise UserError(f"{len(rows)} steps were taken, and {warmup} are warm-up: nothing was measured.")
    times = [after["time_s"] - before["time_s"] for before, after in measured]
    step_s = statistics.median(times)
    tokens = (rows[-1]["num_tokens"] - rows[warmup - 1]["num_tokens"]) / len(measured)
    if not tokens:
        raise UserError("the trainer counted no tokens")
    return {
        "tokens_per_second": tokens / step_s,
        "step_s": step_s,
        "first_step_s": rows[0]["time_s"],
        "spread": (max(times) - min(times)) / step_s,
        "memory_gb": max(row["memory_peak_gb"] for row in rows),
    }


def num_ranks() -> int:
    """Of a trial: as many as this program was started with."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _write_config(config: DictConfig, folder: Path, args: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    content: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    tuned = content.pop("tuned")
    known = tuned["trainer_args"]
    given = {**known, **args, "output_dir": str(folder / "checkpoints")}
    given |= {"run_name": folder.name} if "run_name" in known else {}
    content |= {"method": tuned["method"], "trainer_args": given, "run_dir": str(folder), "trial": True}
    content["data"] |= data
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content)))


def _argv(config: DictConfig, folder: Path) -> list[str]:
    program = ["-m", config.tuned.method.program, "--config", str(folder / "config.yaml")]
    if num_ranks() == 1:
        return [sys.executable, *program]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks())]
    return [sys.executable, *torchrun, *program]


def _environment(changed: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)}
    if num_ranks() == 1:  # as torchrun tells a single rank, without the seconds that it takes
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        kept |= {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return {**kept, "PYTHONUNBUFFERED": "1", **changed}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _follow(
    process: subprocess.Popen[bytes], log: Path, heartbeat: Path, on_rows: Callable[[list[Row]], bool], patience_s: float
) -> bool | None:
    """Until it ends, or `on_rows` says so, which is returned; None: nothing got on for `patience_s`. What the trial does counts for the
    launcher's watchdog."""
    seen, counted, changed = (0.0,), 0, time.monotonic()
    files = [log, *(log.with_name(name) for name in ("metrics.jsonl", HEARTBEAT))]
    while True:
        ended = process.poll() is not None
        if stop_asked():
            raise Interrupted()
        now = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in files)
        if now != seen:
            seen, changed = now, time.monotonic()
            heartbeat.touch()
            rows = _rows(log.parent)
            if len(rows) > counted:
                counted = len(rows)
                if on_rows(rows) and not ended:
                    return True
        if ended:
            return False
        if time.monotonic() - changed > patience_s:
            return None
        time.sleep(POLL_S)


def _rows(folder: Path) -> list[Row]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be in the middle of being written


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """All of its processes, also where the first one has ended: what is left holds the GPU's memory against the next trial."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    deadline = time.monotonic() + DIES_WITHIN_S
    while (left := _marked(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    if left:
        raise RuntimeError(f"processes {left} of {folder} do not end, and hold what the next trial needs")
    process.wait()


def _marked(folder: Path) -> list[int]:
    """Living processes of the trial. One that has ended has no environment any more."""
    mark, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or just gone
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _why(log: Path, code: int) -> str:
    """Why a trial failed, in one line: what a rank said, or the end of its log."""
    folder = log.parent
    # The first to fail says why; the others, that it is gone.
    failures = sorted((json.loads(path.read_text()) for path in (folder / "failures").glob("rank*.json")), key=lambda one: one["time"])
    result = folder / "result.json"
    files = [*failures, *([json.loads(result.read_text())] if result.exists() else [])]
    said = [str(one["error"]) for one in files if one.get("error")]
    if any("OutOfMemoryError" in one for one in said):
        return OUT_OF_MEMORY
    if said:
        return said[0].splitlines()[0][:300]
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {lines[-1][:200]}" if lines else how


def _flat(args: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values."""
    for name, value in args.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def word(value: Any) -> str:
    """As Hydra's command line takes it: a comma outside of quotes would be a sweep."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(word(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word(one)}" for key, one in value.items()) + "}"
    text = str(value)
    return text if PLAIN.fullmatch(text) else "'" + text.replace("'", "\\'") + "'"
