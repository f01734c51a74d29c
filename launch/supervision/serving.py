"""A generation server seen from outside: is it up, does it serve what was asked for, what has it done."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Callable
from typing import Any

from launch.errors import HostError
from launch.schema import Config

INFO = "/server_info?config_format=json"
Ask = Callable[[str], str]  # path of the server -> its answer; raises OSError where there is none
DTYPES = {"fp32": "float32", "fp16": "float16"}
REFUSED = re.compile(r"HTTP Error \d+[^\n]*")  # as urllib says it, here or in a container
# A proxy of the user's shell does not know this machine's loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(port: int, path: str) -> str:
    """What a server of this machine answers. Raises OSError."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=answer_within_s(path)) as answer:
            return str(answer.read().decode(errors="replace"))
    except http.client.HTTPException as error:  # it ended in the middle of an answer, or speaks something else
        raise OSError(f"no answer in HTTP: {error!r}") from error


def answer_within_s(path: str) -> float:
    """Seconds. For its settings vLLM asks pip, compilers and drivers for their versions first."""
    return 60.0 if path == INFO else 5.0


def is_up(ask: Ask) -> bool:
    try:
        ask("/health")
    except OSError:
        return False
    return True


def check(ask: Ask, config: Config, model: str) -> None:
    """Raises HostError where the server that answers is not the one that was planned; OSError where it has stopped answering."""
    served = _answer(ask, "/v1/models")
    found = _answer(ask, INFO)
    try:
        vllm: dict[str, Any] = found["vllm_config"]
        got = (
            [entry["id"] for entry in served["data"]][0],
            str(vllm["model_config"]["dtype"]).removeprefix("torch."),
            vllm["parallel_config"]["tensor_parallel_size"],
            vllm["parallel_config"]["data_parallel_size"],
            (vllm["weight_transfer_config"] or {}).get("backend"),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise HostError(f"the server that answers is no vLLM, or one of another version: its answers lack {error}. {_OTHER}") from error
    wanted = (model, dtype(config), config.topology.server_tensor_parallel, config.topology.servers, backend(config))
    for what, asked, is_so in zip(("model", "dtype", "tensor-parallel GPUs", "replicas", "weight transfer"), wanted, got, strict=True):
        if asked != is_so:
            raise HostError(f"the server that answers has {what} {is_so}, and {asked} was asked for. {_OTHER}")


_OTHER = "Another server listens on this port (`ss -ltnp` names it), or vLLM changed what it was told: logs/server.log."


def _answer(ask: Ask, path: str) -> Any:
    try:
        answer = ask(path)
    except OSError as error:
        refused = REFUSED.search(str(error))
        if refused is None:
            raise
        raise HostError(f"the server that answers refuses {path}: {refused[0]}. {_OTHER}") from error
    try:
        return json.loads(answer)
    except ValueError as error:
        raise HostError(f"the server that answers says no JSON at {path}, but {answer[:80]!r}. {_OTHER}") from error


def dtype(config: Config) -> str:
    """As vLLM names it."""
    return DTYPES.get(config.precision.compute, "bfloat16")


def shares_gpu(config: Config) -> bool:
    """Whether the server and its one trainer are on the same GPU: a split of one."""
    given = config.topology
    return given.servers > 0 and (given.num_gpus or config.hardware.gpus_per_node) == 1 and config.hardware.vendor.name != "none"


def backend(config: Config) -> str:
    """Of the weight transfer. NCCL's name stands for RCCL. Two ranks of one GPU, which it refuses, and CPUs have gloo (recipes/smoke)."""
    return "gloo" if config.hardware.vendor.name == "none" or shares_gpu(config) else "nccl"
