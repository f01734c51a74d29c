"""How processes sit on GPUs: pure functions from a composition to the list of process groups that a run starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch import environment
from launch.detect import Host
from launch.environment import Setting
from launch.schema import Config
from launch.trainer_args import SERVER_PORT


@dataclass(frozen=True)
class Process:
    """One process group: a generation server, or torchrun with a rank for each of its GPUs."""

    name: str
    kind: str  # trainer, evaluator or server
    argv: list[str]
    settings: list[Setting]
    gpus: list[int]

    @property
    def env(self) -> dict[str, str]:
        return {s.name: s.value for s in self.settings}

    @property
    def num_ranks(self) -> int:
        return max(1, len(self.gpus))


def num_gpus(config: Config) -> int:
    """GPUs of the whole run: asked for, or all of the node (one for `single`)."""
    if config.topology.name == "single":
        return 1 if config.topology.num_gpus is None else config.topology.num_gpus
    return config.hardware.gpus_per_node if config.topology.num_gpus is None else config.topology.num_gpus


def num_server_gpus(config: Config) -> int:
    return config.topology.servers * config.topology.server_tensor_parallel


def num_trainers(config: Config) -> int:
    """Ranks that train."""
    return max(1, num_gpus(config) - num_server_gpus(config))


def processes(config: Config, host: Host, run_dir: Path) -> list[Process]:
    """The process groups in the order they start: servers first, then the ranks of the recipe."""
    gpus = environment.visible_gpus(config, host, num_gpus(config))
    wide = config.topology.server_tensor_parallel
    found = []
    for index in range(config.topology.servers):
        name = "server" if config.topology.servers == 1 else f"server{index}"
        mine = gpus[index * wide : (index + 1) * wide]
        argv = server_argv(config, SERVER_PORT + index, run_dir)
        found.append(Process(name, "server", argv, environment.settings(config, host, "server", mine, run_dir), mine))
    mine = gpus[num_server_gpus(config) :]
    kind = config.method.kind
    argv = ranks_argv(config, host, max(1, len(mine)), run_dir)
    name = {"trainer": "trainers", "evaluator": "evaluator"}.get(kind, kind)
    return [*found, Process(name, kind, argv, environment.settings(config, host, kind, mine, run_dir), mine)]


def ranks_argv(config: Config, host: Host, num_ranks: int, run_dir: Path) -> list[str]:
    """torchrun on this node; `--standalone` takes a free port for the rendezvous.

    On the loopback by its number: a container without a network cannot resolve its own name, and many a host cannot either.
    """
    python = host.python if config.runtime.name == "local" else "python3"  # the image's own
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    return [*torchrun, "-m", config.method.program, "--config", str(run_dir / "config.yaml")]


def server_argv(config: Config, port: int, run_dir: Path) -> list[str]:
    """vLLM's server as TRL 1.16 wants it: weight transfer on, log-probabilities of the sampled distribution."""
    model = config.model
    source = model.path or (model.hub_id if model.init.name == "pretrained" else None) or str(run_dir / "model_init")
    revision = ["--revision", model.revision] if source == model.hub_id and model.revision else []
    dtype = {"fp32": "float32", "fp16": "float16"}.get(config.precision.compute, "bfloat16")
    return [
        *["vllm", "serve", source, *revision],
        *["--host", "127.0.0.1", "--port", str(port)],  # the weight-update endpoints accept anyone who reaches them
        *["--dtype", dtype, "--tensor-parallel-size", str(config.topology.server_tensor_parallel)],
        *["--seed", str(config.seed)],
        *["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"],
        *["--weight-transfer-config", json.dumps({"backend": "nccl"})],
    ]
