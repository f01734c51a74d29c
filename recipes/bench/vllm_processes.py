"""Run vLLM's benchmark programs as processes on chosen GPUs, and read their results."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from recipes.rank.program import TORCHRUN, Interrupted, stop_asked

POLL_S = 0.2
ENDS_WITHIN_S = 30  # after SIGTERM
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
LENGTHS_DIFFER = 0.05
SAYS_WHY = re.compile(r"(?:\b\w*(?:Error|Exception)|\berror): .*")
SAYS_NOTHING = ("Engine core initialization failed", "See root cause above", "Failed core proc")
# Bypass a proxy, which cannot reach this machine's loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(config: DictConfig) -> list[str]:
    """Return the command that starts vLLM. Raises UserError if it is not installed.

    In a container it is the image's own program, which uses the packages of the base image.
    """
    runtime = config.runtime.name
    if runtime == "docker" or (runtime == "slurm" and config.runtime.slurm.inner == "docker"):
        if shutil.which("vllm"):
            return ["vllm"]
    elif importlib.util.find_spec("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    raise UserError(
        "vLLM is not installed where the ranks run. Use an image that holds it "
        "(containers/build.py lists them), or an environment with vLLM; for smoke=true on a CPU: "
        "make vllm."
    )


def environment(setting_env: Mapping[str, str], first: int, count: int) -> dict[str, str]:
    """Return the environment for a process on `count` of this process's GPUs, from `first` on.

    Variables of torchrun are removed. `setting_env` overrides all others.
    """
    env = {name: value for name, value in os.environ.items() if not TORCHRUN.match(name)}
    mask = next((name for name in MASKS if name in env), None)
    if mask is not None:
        env[mask] = ",".join(env[mask].split(",")[first : first + count])
    local = ",".join(filter(None, [env.get("NO_PROXY"), "127.0.0.1"]))
    return {**env, "NO_PROXY": local, "no_proxy": local, **setting_env}


class Process:
    """Run a program that logs to a file, in its own session so that its children can be ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log, self.ending = log, False
        with log.open("w") as file:
            file.write(" ".join(argv) + "\n")
            file.flush()
            self.popen = subprocess.Popen(
                list(argv), env=dict(env), stdout=file, stderr=file, start_new_session=True
            )

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def check(self) -> None:
        """Raise UserError with the reason in the log if the program has failed."""
        if self.popen.poll():
            reason = why(self.log.read_text(errors="replace"))
            raise UserError(f"{reason} (exit code {self.popen.returncode}; logs/{self.log.name})")

    def end(self) -> None:
        """Stop the program and its children, once, since its pid may be reused afterwards."""
        if self.ending:
            return
        self.ending = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, number)
            except ProcessLookupError:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(ENDS_WITHIN_S)


def wait(
    processes: Sequence[Process], done: Callable[[], bool], timeout_s: float, heartbeat: Path
) -> None:
    """Wait until `done`, and touch `heartbeat` while logs grow, for the launcher's watchdog.

    Raises UserError if a process fails or takes too long, and Interrupted after a signal, once all
    processes have ended.
    """
    deadline, size = time.monotonic() + timeout_s, -1
    heartbeat.touch()
    try:
        while not done():
            for process in processes:
                process.check()
            if stop_asked():
                raise Interrupted
            if time.monotonic() > deadline:
                raise UserError(
                    f"no end after {timeout_s:g} s (method.args.timeout_s); "
                    f"logs/{processes[0].log.name}"
                )
            new_size = sum(process.log.stat().st_size for process in processes)
            if new_size != size:
                size = new_size
                heartbeat.touch()
            time.sleep(POLL_S)
        for process in processes:
            process.check()
    except BaseException:
        for process in processes:
            process.end()
        raise


def answers(port: int) -> bool:
    """Return whether the server at a port reports that it is healthy."""
    try:
        DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def why(log: str) -> str:
    """Return the last informative error in a log, or else the last error or line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [match.group(0) for line in lines if (match := SAYS_WHY.search(line))]
    informative = [line for line in errors if not any(phrase in line for phrase in SAYS_NOTHING)]
    return (informative or errors or lines or ["no output"])[-1][:300]


def figures(case: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a case from the JSON of `vllm bench`.

    Raises UserError if requests failed or their lengths differ from the case's.
    """
    lengths = (case["input"], case["output"])
    if case["kind"] == "offline":
        check_lengths(content["total_num_tokens"] / content["num_requests"], lengths)
        return {
            "output_tokens_per_second": content["requests_per_second"] * case["output"],
            "total_tokens_per_second": content["tokens_per_second"],
        }
    if case["kind"] == "latency":  # seconds from a batch's prompts to its last tokens
        seconds = content["avg_latency"]
        return {
            "output_tokens_per_second": case["concurrency"] * case["output"] / seconds,
            "total_tokens_per_second": case["concurrency"] * sum(lengths) / seconds,
            "latency_s": seconds,
        }
    failed, completed = content["failed"], content["completed"]
    if failed or not completed:
        raise UserError(f"{failed} requests failed and {completed} were answered")
    tokens = content["total_input_tokens"] + content["total_output_tokens"]
    check_lengths(tokens / completed, lengths)
    return {
        "output_tokens_per_second": content["output_throughput"],
        "total_tokens_per_second": content["total_token_throughput"],
        "ttft_ms": content["median_ttft_ms"],
        "ttft_p99_ms": content["p99_ttft_ms"],
        "itl_ms": content["median_itl_ms"],
        "itl_p99_ms": content["p99_itl_ms"],
    }


def check_lengths(tokens: float, lengths: tuple[int, int]) -> None:
    """Raise UserError if the lengths differ by more than re-tokenizing the prompts explains."""
    if abs(tokens / sum(lengths) - 1) > LENGTHS_DIFFER:
        raise UserError(
            f"vLLM measured requests of {tokens:g} tokens in and out instead of {sum(lengths)}"
        )


def read(path: Path) -> dict[str, Any]:
    """Return the JSON that a program wrote. Raises UserError if it is missing or invalid."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"vLLM left no figures in {path.name}: {error}") from error
    return content
