"""vLLM's own benchmark programs as processes: started on the GPUs they are given, watched, ended, and what they leave read."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.common.errors import UserError
from recipes.common.program import TORCHRUN, stop_asked

POLL_S = 0.2
ENDS_WITHIN_S = 30  # after SIGTERM
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
LENGTHS_DIFFER = 0.05
SAYS_WHY = re.compile(r"(?:\b\w*(?:Error|Exception)|\berror): .*")
SAYS_NOTHING = ("Engine core initialization failed", "See root cause above", "Failed core proc")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the user's does not know this loopback


class Stopped(Exception):
    """A signal asked to stop while engines ran; they are gone."""


def program(config: DictConfig) -> list[str]:
    """How vLLM is started where the ranks run: an image's own program keeps to the base's packages. Raises UserError."""
    if "docker" in (config.runtime.name, config.runtime.slurm.inner if config.runtime.name == "slurm" else None):
        if shutil.which("vllm"):
            return ["vllm"]
    elif importlib.util.find_spec("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    raise UserError(
        "vLLM is not installed where the ranks run. Use an image that holds it (containers/build.py lists them), or an environment with "
        "vLLM; for smoke=true on a CPU: make vllm."
    )


def environment(setting_env: Mapping[str, str], first: int, count: int) -> dict[str, str]:
    """This process's, without torchrun's, on `count` of its GPUs from the `first`; the setting's own variables win."""
    env = {name: value for name, value in os.environ.items() if not TORCHRUN.match(name)}
    mask = next((name for name in MASKS if name in env), None)
    if mask is not None:
        env[mask] = ",".join(env[mask].split(",")[first : first + count])
    local = ",".join(filter(None, [env.get("NO_PROXY"), "127.0.0.1"]))
    return {**env, "NO_PROXY": local, "no_proxy": local, **setting_env}


class Process:
    """One program of vLLM's with its log; its own session, so that everything it starts ends with it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log, self.gone = log, False
        with log.open("w") as file:
            file.write(" ".join(argv) + "\n")
            file.flush()
            self.popen = subprocess.Popen(list(argv), env=dict(env), stdout=file, stderr=file, start_new_session=True)

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def check(self) -> None:
        """Raises UserError where it has ended with an error."""
        if self.popen.poll():
            raise UserError(f"{why(self.log.read_text(errors='replace'))} (exit code {self.popen.returncode}; logs/{self.log.name})")

    def end(self) -> None:
        """It and everything it started. A second call does nothing: its number may be another's by then."""
        if self.gone:
            return
        self.gone = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, number)
            except ProcessLookupError:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(ENDS_WITHIN_S)


def wait(processes: Sequence[Process], done: Callable[[], bool], timeout_s: float, heartbeat: Path) -> None:
    """Until `done`. `heartbeat` is touched as logs grow: the launcher's watchdog sees nothing else move.

    Raises UserError where one ends with an error or the time is over, Stopped when a signal asks for it; all have ended then.
    """
    deadline, size = time.monotonic() + timeout_s, -1
    heartbeat.touch()
    try:
        while not done():
            for process in processes:
                process.check()
            if stop_asked():
                raise Stopped
            if time.monotonic() > deadline:
                raise UserError(f"no end after {timeout_s:g} s (method.args.timeout_s); logs/{processes[0].log.name}")
            grown = sum(process.log.stat().st_size for process in processes)
            if grown != size:
                size = grown
                heartbeat.touch()
            time.sleep(POLL_S)
        for process in processes:
            process.check()
    except BaseException:
        for process in processes:
            process.end()
        raise


def answers(port: int) -> bool:
    """Whether a server is up and well."""
    try:
        DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def why(log: str) -> str:
    """The line of an engine's log that says why it ended: the last error that is more than "see above", else the last line."""
    named = [found.group(0) for line in log.splitlines() if (found := SAYS_WHY.search(line))]
    telling = [line for line in named if not any(phrase in line for phrase in SAYS_NOTHING)]
    last = [line.strip() for line in log.splitlines() if line.strip()][-1:]
    return ((telling or named or last or ["it said nothing"])[-1])[:300]


# ---- What they leave


def offline_figures(content: Mapping[str, Any], lengths: tuple[int, int]) -> dict[str, float]:
    """Of `vllm bench throughput`. Raises UserError where its requests had other lengths."""
    check_lengths(content["total_num_tokens"] / content["num_requests"], lengths)
    return {
        "output_tokens_per_second": content["requests_per_second"] * lengths[1],
        "total_tokens_per_second": content["tokens_per_second"],
    }


def served_figures(content: Mapping[str, Any], lengths: tuple[int, int]) -> dict[str, float]:
    """Of `vllm bench serve`. Raises UserError where requests failed, or had other lengths."""
    if content["failed"] or not content["completed"]:
        raise UserError(f"{content['failed']} requests failed and {content['completed']} were answered")
    check_lengths((content["total_input_tokens"] + content["total_output_tokens"]) / content["completed"], lengths)
    return {
        "output_tokens_per_second": content["output_throughput"],
        "total_tokens_per_second": content["total_token_throughput"],
        "ttft_ms": content["median_ttft_ms"],
        "ttft_p99_ms": content["p99_ttft_ms"],
        "itl_ms": content["median_itl_ms"],
        "itl_p99_ms": content["p99_itl_ms"],
    }


def check_lengths(tokens: float, lengths: tuple[int, int]) -> None:
    """A tokenizer may spell a random prompt a little longer or shorter. Raises UserError for more than that."""
    if abs(tokens / sum(lengths) - 1) > LENGTHS_DIFFER:
        raise UserError(f"vLLM measured requests of {tokens:g} tokens in and out, and {sum(lengths)} were asked for")


def latency_figures(content: Mapping[str, Any], batch: int, lengths: tuple[int, int]) -> dict[str, float]:
    """Of `vllm bench latency`: seconds of one batch from its prompts to its last tokens."""
    seconds = content["avg_latency"]
    return {
        "output_tokens_per_second": batch * lengths[1] / seconds,
        "total_tokens_per_second": batch * sum(lengths) / seconds,
        "latency_s": seconds,
    }


def read(path: Path) -> dict[str, Any]:
    """Raises UserError where the program ended without leaving it."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"vLLM left no figures in {path.name}: {error}") from error
    return found
