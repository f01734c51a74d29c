"""How processes sit on GPUs: pure functions from a composition to the list of process groups that a run starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch import engine_args, environment
from launch.environment import Setting
from launch.files import paths
from launch.machine.detect import Host
from launch.runtimes import rocprof
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.supervision import serving


@dataclass(frozen=True)
class Process:
    """One process group: a generation server, torchrun with a rank for each of its GPUs, what prepares for these, or the sandbox."""

    name: str
    kind: str  # trainer, evaluator, exporter, bench, tune, server, prepare or verifier
    argv: list[str]
    settings: list[Setting]
    gpus: list[int]
    num_ranks: int = 1
    port: int | None = None  # where a server answers, on its loopback
    serves: str | None = None  # the model that it must name
    node: int = 0  # which one of a Slurm job it is on

    @property
    def env(self) -> dict[str, str]:
        return {s.name: s.value for s in self.settings}


def num_gpus(config: Config) -> int:
    """GPUs of a node (processes, where there are none): asked for, or all that it has (one for `single` and `colocate`)."""
    if config.topology.num_gpus is not None:
        return config.topology.num_gpus
    return 1 if config.topology.name in ("single", "colocate") else config.hardware.gpus_per_node


def num_server_gpus(config: Config) -> int:
    return config.topology.servers * config.topology.server_tensor_parallel


def num_trainers(config: Config) -> int:
    """Ranks that train, on all nodes."""
    return trainers_of_a_node(config) * config.runtime.slurm.nodes


def trainers_of_a_node(config: Config) -> int:
    return max(1, num_gpus(config) - num_server_gpus(config))


def made_here(config: Config) -> bool:
    """Whether vLLM must read a model that exists nowhere yet: random weights."""
    generates = config.topology.servers > 0 or config.topology.name == "colocate"
    return generates and config.model.path is None and config.model.init.name == "random"


def model_source(config: Config, run_dir: Path) -> str:
    """The directory or the name in the hub that every process loads the model from."""
    if made_here(config):
        return str(run_dir / "model_init")
    return config.model.path or str(config.model.hub_id)


def processes(config: Config, host: Host, run_dir: Path) -> list[Process]:
    """The process groups in the order they start, each when the one before is ready: what prepares, the server, the ranks."""
    gpus = environment.visible_gpus(config, host, num_gpus(config)) if config.method.kind != "exporter" else []
    generating = gpus[: num_server_gpus(config)]
    training = gpus if serving.shares_gpu(config) else gpus[num_server_gpus(config) :]
    found = []
    if made_here(config):
        argv = ranks_argv(config, host, 1, run_dir, "recipes.prepare")
        found.append(
            Process("prepare", "prepare", argv, environment.settings(config, host, "prepare", training[:1], run_dir), training[:1])
        )
    if config.topology.servers:
        port = ports(host, run_dir)[0]
        argv = server_argv(config, host, port, run_dir)
        settings = environment.settings(config, host, "server", generating, run_dir)
        found.append(Process("server", "server", argv, settings, generating, num_server_gpus(config), port, model_source(config, run_dir)))
    kind, ranks = config.method.kind, trainers_of_a_node(config)
    name = {"trainer": "trainers", "evaluator": "evaluator"}.get(kind, kind)
    settings = environment.settings(config, host, kind, training, run_dir, ranks)
    # The first node's ranks stand last: the launcher, which is there, stops them first, and a signal to one of them stops all ranks.
    for node in [*range(1, config.runtime.slurm.nodes), 0]:
        argv = ranks_argv(config, host, ranks, run_dir, config.method.program, node)
        found.append(Process(f"{name}-{node}" if node else name, kind, argv, settings, training, ranks, node=node))
    return found


def ports(host: Host, run_dir: Path) -> tuple[int, int]:
    """Of the server and of its weight transfer: free ones, and another run's are others, whenever both begin to listen.

    Between 20000 and 30000: Linux gives away those from 32768 on.
    """
    server = host.free_port(20000 + int(paths.run_hash(run_dir), 16) % 5000 * 2)
    return server, host.free_port(server + 1)


def ranks_argv(config: Config, host: Host, num_ranks: int, run_dir: Path, program: str, node: int = 0) -> list[str]:
    """torchrun on a node."""
    torchrun = [python(config, host), "-m", "torch.distributed.run", *rendezvous(config, host, node)]
    ranks = ["-m", program, "--config", str(run_dir / "config.yaml")]
    if program == config.method.program:
        ranks = rocprof.wrapped(config, run_dir, python(config, host), ranks)
    return [*torchrun, "--nproc-per-node", str(num_ranks), *ranks]


def rendezvous(config: Config, host: Host, node: int) -> list[str]:
    """One node: `--standalone` takes a free port, on the loopback by its number, since a container without a network cannot resolve
    its own name, and many a host cannot either. Several: at the first one, whose address is known once Slurm has chosen it.
    """
    slurm = config.runtime.slurm
    if slurm.nodes == 1:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    address, port = (host.environ.get(name, f"${name}") for name in ("MASTER_ADDR", "MASTER_PORT"))
    # Static: it keeps the nodes' order (c10d sorts them by address), so rank 0 is beside the launcher and sums add up in one order.
    return [
        *["--nnodes", str(slurm.nodes), "--node-rank", str(node), "--rdzv-backend", "static"],
        *["--master-addr", address, "--master-port", port, "--rdzv-conf", f"timeout={slurm.rendezvous_timeout_s}"],
    ]


def python(config: Config, host: Host) -> str:
    return host.python if config.runtime.on_node == "local" else "python3"  # the image's own


def server_argv(config: Config, host: Host, port: int, run_dir: Path) -> list[str]:
    """vLLM's server as TRL 1.16 wants it: weight transfer on, log-probabilities of the sampled distribution."""
    model, source = config.model, model_source(config, run_dir)
    revision = ["--revision", model.revision] if source == model.hub_id and model.revision else []
    on_cpu = config.hardware.vendor == Vendor.none
    replicas = ["--data-parallel-size", str(config.topology.servers)] if config.topology.servers > 1 else []
    memory = [] if on_cpu else ["--gpu-memory-utilization", f"{config.topology.server_memory_share:g}"]
    if config.topology.server_cache_gb:
        memory += ["--kv-cache-memory-bytes", str(int(config.topology.server_cache_gb * 1e9))]
    length = ["--max-model-len", str(config.topology.server_max_length)] if config.topology.server_max_length else []
    # An image's own program keeps to the base's packages; here by module: a `vllm` on the PATH may be another environment's.
    program = ["vllm"] if config.runtime.on_node == "docker" else [python(config, host), "-m", "vllm.entrypoints.cli.main"]
    return [
        *[*program, "serve", source, *revision],
        *["--host", "127.0.0.1", "--port", str(port)],  # the weight-update endpoints accept anyone who reaches them
        *["--dtype", serving.dtype(config), "--tensor-parallel-size", str(config.topology.server_tensor_parallel), *replicas, *memory],
        *[*length, "--seed", str(config.seed)],
        *["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"],
        *["--weight-transfer-config", json.dumps({"backend": serving.backend(config)})],
        *["--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])],
        *engine_args.argv(config),
    ]
