"""Check a generation server from outside: whether it is up, and whether it is the planned one."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Callable
from typing import Any

from launch.core.errors import HostError
from launch.machine.placement import backend, dtype
from launch.schema import Config

INFO = "/server_info?config_format=json"
Ask = Callable[[str], str]  # path of the server -> its answer; raises OSError without an answer
REFUSED = re.compile(r"HTTP Error \d+[^\n]*")  # urllib's text, here or in a container
# A proxy of the user's shell cannot reach this machine's loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
OTHER = (
    "Another server listens on this port (`ss -ltnp` names it), or vLLM changed its settings: "
    "see logs/server.log."
)


def get(port: int, path: str) -> str:
    """Return the answer of a server on this machine. Raises OSError."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=answer_within_s(path)) as answer:
            return str(answer.read().decode(errors="replace"))
    except http.client.HTTPException as error:  # it ended in mid-answer, or does not speak HTTP
        raise OSError(f"no answer in HTTP: {error!r}") from error


def answer_within_s(path: str) -> float:
    """Return how many seconds an answer may take.

    For its settings vLLM first asks pip, compilers and drivers for their versions.
    """
    return 60.0 if path == INFO else 5.0


def is_up(ask: Ask) -> bool:
    try:
        ask("/health")
    except OSError:
        return False
    return True


def check(ask: Ask, config: Config, model: str) -> None:
    """Raise HostError if the server is not the planned one, OSError if it stops answering."""
    planned = {
        "model": model,
        "dtype": dtype(config),
        "tensor-parallel GPUs": config.topology.server_tensor_parallel,
        "replicas": config.topology.servers,
        "weight transfer": backend(config),
    }
    try:
        served, info = json.loads(ask("/v1/models")), json.loads(ask(INFO))
        vllm: dict[str, Any] = info["vllm_config"]
        actual = {
            "model": [entry["id"] for entry in served["data"]][0],
            "dtype": str(vllm["model_config"]["dtype"]).removeprefix("torch."),
            "tensor-parallel GPUs": vllm["parallel_config"]["tensor_parallel_size"],
            "replicas": vllm["parallel_config"]["data_parallel_size"],
            "weight transfer": (vllm["weight_transfer_config"] or {}).get("backend"),
        }
        differing = [
            f"{name} {value}, and the plan says {planned[name]}"
            for name, value in actual.items()
            if value != planned[name]
        ]
        fault = f"has {differing[0]}" if differing else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        refusal = REFUSED.search(str(error))
        if isinstance(error, OSError) and refusal is None:
            raise
        fault = f"is not a vLLM of this version: {refusal[0] if refusal else repr(error)}"
    if fault:
        raise HostError(f"the server that answers {fault}. {OTHER}")
