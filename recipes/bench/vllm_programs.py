"""Build the command lines and environments of vLLM's programs, and read their results.

vllm_arguments.yaml lists the arguments that are rejected, and their replacements.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from launch.core.errors import UserError
from launch.core.json_files import read_json
from launch.core.vllm_flags import flags
from recipes.rank.program import TORCHRUN

_TABLE = yaml.safe_load(Path(__file__).with_name("vllm_arguments.yaml").read_text())
REMOVED: dict[str, str] = _TABLE["removed"]
REFUSED = {name: f"was removed from vLLM. {remedy}." for name, remedy in REMOVED.items()}
REFUSED |= {name: f"is set elsewhere. {remedy}." for name, remedy in _TABLE["owned"].items()}
OURS = ["label", "instances"]  # keys of a setting that are not passed to vLLM
KEY_RULES = {"refused": REFUSED, "engine_keys": OURS}  # of arguments with settings, for the lock
WIDTHS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
SHAREGPT = "sharegpt"  # in place of a length: the requests of method.args.dataset
OUTPUT_TOKENS = re.compile(r"Total num output tokens:\s+(\d+)")  # is not in the JSON file
# Steps of an engine that profile=torch skips and records. Traces of all steps take gigabytes.
PROFILED_STEPS = {"delay_iterations": 20, "max_iterations": 20}
MAX_LENGTH_ERROR = 0.05  # maximum relative change of the number of tokens after re-tokenization
SERVED = {  # our metrics -> metrics of `vllm bench serve`
    "output_tokens_per_second": "output_throughput",
    "total_tokens_per_second": "total_token_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
# Bypass proxies, which cannot reach the loopback address of this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def name_of(setting: Mapping[str, Any]) -> str:
    if "label" in setting:
        return str(setting["label"])
    words = [
        f"{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in setting.items()
    ]
    return " ".join(words) or "vLLM's own"


def argv_of(setting: Mapping[str, Any]) -> list[str]:
    """Return a setting's command-line options, without our own keys and environment variables."""
    return flags({k: v for k, v in setting.items() if k not in OURS and not k.isupper()})


def env_of(setting: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value) for name, value in setting.items() if name.isupper() and value is not None
    }


def gpus_of(setting: Mapping[str, Any]) -> int:
    """Return the number of GPUs that one engine uses."""
    return math.prod(int(setting.get(name) or 1) for name in WIDTHS)


def runtime_on_node(config: DictConfig) -> str:
    runtime = config.runtime
    return str(runtime.slurm.container if runtime.name == "slurm" else runtime.name)


def program(config: DictConfig) -> list[str]:
    """Return the command that starts vLLM. Raise UserError if vLLM is not installed.

    In a container, this is the image's `vllm`, which uses the packages of the base image.
    """
    if runtime_on_node(config) in ("docker", "apptainer", "pyxis"):
        if shutil.which("vllm"):
            return ["vllm"]
    elif importlib.util.find_spec("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    raise UserError(
        "vLLM is not installed where the ranks run. Use an image with vLLM "
        "(containers/build.py lists the images) or install vLLM. For smoke=true on a CPU, run: "
        "make vllm"
    )


def environment(setting_env: Mapping[str, str], first: int, count: int) -> dict[str, str]:
    """Return the environment of a process that uses `count` of our GPUs, starting at `first`.

    Variables of torchrun are removed. `setting_env` overrides all other variables.
    """
    env = {name: value for name, value in os.environ.items() if not TORCHRUN.match(name)}
    mask = next((name for name in MASKS if name in env), None)
    if mask is not None:
        env[mask] = ",".join(env[mask].split(",")[first : first + count])
    local = ",".join(filter(None, [env.get("NO_PROXY"), "127.0.0.1"]))
    return {**env, "NO_PROXY": local, "no_proxy": local, **setting_env}


def profiler(run_dir: str) -> dict[str, Any]:
    """Return vLLM's profiler_config for profile=torch, which vLLM 0.13 introduced."""
    return {"profiler": "torch", "torch_profiler_dir": f"{run_dir}/profile", **PROFILED_STEPS}


def is_healthy(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether the server at an address reports that it is healthy."""
    try:
        DIRECT.open(f"http://{host}:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def figures(case: Mapping[str, Any], path: Path, log: Path) -> dict[str, float]:
    """Return a case's figures from the file that `vllm bench` wrote, and from its log.

    Raise UserError if there is no file, if requests failed, or if the number of tokens differs from
    the case's lengths by more than MAX_LENGTH_ERROR.
    """
    content = read_json(path)
    if content is None:
        raise UserError(f"vLLM wrote no results to {path.name}")
    has_lengths = case["input"] != SHAREGPT
    expected = case["input"] + case["output"] if has_lengths else 0
    if case["kind"] == "latency":  # seconds from sending a batch to its last tokens
        seconds = content["avg_latency"]
        return {
            "output_tokens_per_second": case["concurrency"] * case["output"] / seconds,
            "total_tokens_per_second": case["concurrency"] * expected / seconds,
            "latency_s": seconds,
        }
    if case["kind"] == "offline":
        answered, failed, tokens = content["num_requests"], 0, content["total_num_tokens"]
        output = answered * case["output"] if has_lengths else _output_tokens(log)
        figures = {
            "output_tokens_per_second": output / content["elapsed_time"],
            "total_tokens_per_second": content["tokens_per_second"],
        }
    else:
        answered, failed = content["completed"], content["failed"]
        tokens = content["total_input_tokens"] + content["total_output_tokens"]
        figures = {name: content[vllm_name] for name, vllm_name in SERVED.items()}
    differs = expected and abs(tokens / max(1, answered) / expected - 1) > MAX_LENGTH_ERROR
    if failed or not answered or differs:
        wanted = f"; {answered * expected} were expected" if expected else ""
        raise UserError(
            f"vLLM failed {failed} of {failed + answered} requests. The others had "
            f"{tokens} tokens of input and output{wanted}."
        )
    return figures


def _output_tokens(log: Path) -> int:
    """Return the number of generated tokens in the log of `vllm bench throughput`."""
    counts = OUTPUT_TOKENS.findall(log.read_text(errors="replace"))
    if not counts:
        raise UserError(f"vLLM did not report its output tokens in logs/{log.name}")
    return int(counts[-1])
