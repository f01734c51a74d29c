"""Run vLLM's benchmark programs as processes on chosen GPUs, and read their results."""

from __future__ import annotations

import contextlib
import importlib.util
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
from launch.core.json_files import read_json
from recipes.rank.program import TORCHRUN, Interrupted, stop_asked

POLL_S = 0.2
ENDS_WITHIN_S = 30  # after SIGTERM
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
LENGTHS_DIFFER = 0.05
SERVED = {  # our figures -> those of `vllm bench serve`
    "output_tokens_per_second": "output_throughput",
    "total_tokens_per_second": "total_token_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
SAYS_WHY = re.compile(r"(?:\b\w*(?:Error|Exception)|\berror): .*")
SAYS_NOTHING = ("Engine core initialization failed", "See root cause above", "Failed core proc")
# Bypass a proxy, which cannot reach this machine's loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(config: DictConfig) -> list[str]:
    """Return the command that starts vLLM. Raise UserError if it is not installed.

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

    def failure(self) -> str | None:
        """Return the reason in the log if the program has failed, else None."""
        if not self.popen.poll():
            return None
        reason = why(self.log.read_text(errors="replace"))
        return f"{reason} (exit code {self.popen.returncode}; logs/{self.log.name})"

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

    Raise UserError if a process fails or takes too long, and Interrupted after a signal, once all
    processes have ended.
    """
    deadline, size = time.monotonic() + timeout_s, -1
    try:
        while True:
            finished, late = done(), time.monotonic() > deadline
            failures = [failure for process in processes if (failure := process.failure())]
            if late and not finished:
                log = processes[0].log.name
                failures.append(f"no end after {timeout_s:g} s (method.args.timeout_s); logs/{log}")
            if failures:
                raise UserError(failures[0])
            if finished:
                return
            if stop_asked():
                raise Interrupted
            new_size = sum(process.log.stat().st_size for process in processes)
            if new_size != size:
                size = new_size
                heartbeat.touch()
            time.sleep(POLL_S)
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


def figures(case: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Return the figures of a case from the file that `vllm bench` wrote.

    Raise UserError if there is none, if requests failed, or if their lengths differ from the case's
    by more than re-tokenizing the prompts explains.
    """
    content = read_json(path)
    if content is None:
        raise UserError(f"vLLM left no figures in {path.name}")
    expected = case["input"] + case["output"]
    if case["kind"] == "latency":  # seconds from a batch's prompts to its last tokens
        seconds = content["avg_latency"]
        return {
            "output_tokens_per_second": case["concurrency"] * case["output"] / seconds,
            "total_tokens_per_second": case["concurrency"] * expected / seconds,
            "latency_s": seconds,
        }
    if case["kind"] == "offline":
        answered, failed, tokens = content["num_requests"], 0, content["total_num_tokens"]
        figures = {
            "output_tokens_per_second": content["requests_per_second"] * case["output"],
            "total_tokens_per_second": content["tokens_per_second"],
        }
    else:
        answered, failed = content["completed"], content["failed"]
        tokens = content["total_input_tokens"] + content["total_output_tokens"]
        figures = {name: content[theirs] for name, theirs in SERVED.items()}
    if failed or not answered or abs(tokens / answered / expected - 1) > LENGTHS_DIFFER:
        raise UserError(
            f"vLLM failed {failed} requests, and answered {answered} with {tokens} tokens in and "
            f"out, {expected} of each request"
        )
    return figures
