"""A generation server seen from outside: is it up, does it serve what was asked for, what has it done."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from launch.errors import HostError
from launch.schema import Config

ANSWER_WITHIN_S = 5.0
INFO_WITHIN_S = 60.0  # vLLM asks pip, compilers and drivers for their versions first
INFO = "/server_info?config_format=json"
Ask = Callable[[str], str]  # path of the server -> its answer; raises OSError where there is none
DTYPES = {"fp32": "float32", "fp16": "float16"}


def get(port: int, path: str) -> str:
    """What a server of this machine answers. Raises OSError."""
    within_s = INFO_WITHIN_S if path == INFO else ANSWER_WITHIN_S
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=within_s) as answer:
        return str(answer.read().decode())


def is_up(ask: Ask) -> bool:
    try:
        ask("/health")
    except OSError:
        return False
    return True


def check(ask: Ask, config: Config, model: str) -> None:
    """Raises HostError where the server that answers is not the one that was planned."""
    served = [entry["id"] for entry in json.loads(ask("/v1/models"))["data"]]
    found: dict[str, Any] = json.loads(ask(INFO))["vllm_config"]
    wanted = {
        "model": (model, served[0] if served else None),
        "dtype": (dtype(config), str(found["model_config"]["dtype"]).removeprefix("torch.")),
        "tensor-parallel GPUs": (config.topology.server_tensor_parallel, found["parallel_config"]["tensor_parallel_size"]),
        "weight transfer": (backend(config), (found["weight_transfer_config"] or {}).get("backend")),
    }
    for what, (asked, got) in wanted.items():
        if asked != got:
            raise HostError(f"the server that answers has {what} {got}, and {asked} was asked for: another server listens on this port.")


def dtype(config: Config) -> str:
    """As vLLM names it."""
    return DTYPES.get(config.precision.compute, "bfloat16")


def backend(config: Config) -> str:
    """Of the weight transfer: NCCL's name stands for RCCL too; a CPU has gloo (recipes/smoke)."""
    return "gloo" if config.hardware.vendor.name == "none" else "nccl"
