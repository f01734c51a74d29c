"""Run vLLM's benchmark programs as processes on chosen GPUs, and read their results."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from launch.core.json_files import read_json
from recipes.rank.program import TORCHRUN

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


def answers(port: int) -> bool:
    """Return whether the server at a port reports that it is healthy."""
    try:
        DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


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
