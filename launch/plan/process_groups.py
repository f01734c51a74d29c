"""Compute from a composition the process groups that a run starts, and their commands."""

from __future__ import annotations

import json
from pathlib import Path

from launch.core.options import options
from launch.inputs import paths
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.placement import is_tokens_only, made_here
from launch.plan import process_env
from launch.schema import Config
from launch.schema.enums import Profile, Rocprof, Vendor
from launch.schema.plan import Process


def model_source(config: Config, run_dir: Path) -> str:
    """Return the directory or hub id that every process loads the model from."""
    if made_here(config):
        return str(run_dir / "model_init")
    return config.model.path or str(config.model.hub_id)


def process(config: Config, host: Host, run_dir: Path, group: placement.ProcessGroup) -> Process:
    """Return a process group as it runs: its command, variables and GPUs."""
    port = None
    if group.kind == "server":
        port = ports(host, run_dir)[0]
        argv = server_argv(config, host, port, run_dir)
    else:
        argv = ranks_argv(config, host, run_dir, group)
    # vLLM sets the variables of its own ranks.
    ranks = 1 if group.kind == "server" else group.num_ranks
    settings = process_env.settings(config, host, group.kind, group.gpus, run_dir, ranks)
    name, kind, gpus, num_ranks = group.name, group.kind, group.gpus, group.num_ranks
    return Process(name, kind, argv, settings, gpus, num_ranks, port, group.node)


def ports(host: Host, run_dir: Path) -> tuple[int, int]:
    """Return free ports for the server and its weight transfer, chosen by the run's hash.

    They lie between 20000 and 30000, since Linux assigns ephemeral ports from 32768 on.
    """
    server = host.free_port(20000 + int(paths.run_hash(run_dir), 16) % 5000 * 2)
    return server, host.free_port(server + 1)


def ranks_argv(
    config: Config, host: Host, run_dir: Path, group: placement.ProcessGroup
) -> list[str]:
    """Return the command that starts a node's ranks: the program itself, or torchrun."""
    interpreter = python(config, host)
    program = "recipes.prepare" if group.kind == "prepare" else config.method.program
    ranks = ["-m", program, "--config", str(run_dir / "config.yaml")]
    if program == config.method.program and config.profile == Profile.rocprof:
        profiler = [config.rocprof.value, *rocprof_options(config.rocprof, run_dir / "profile")]
        ranks = ["--no-python", *profiler, "--", interpreter, *ranks]
    if placement.starts_directly(config, group.kind):
        return [interpreter, *ranks]
    return [
        *[interpreter, "-m", "torch.distributed.run", *rendezvous(config, host, group.node)],
        *["--nproc-per-node", str(group.num_ranks), *ranks],
    ]


def rocprof_options(program: Rocprof, folder: Path) -> list[str]:
    """Return the options of a profiler of ROCm that writes into the run's profile/.

    It goes inside torchrun, as AMD advises for launchers of ranks (rocprofiler-sdk, "Using
    rocprofv3 with MPI"). Around it, it would watch torchrun itself and name each rank's output by
    process id only. Options, all from rocm.docs.amd.com: rocprofiler-sdk, "rocprofv3 command-line
    options" and "I/O control options"; rocprofiler-compute, "Profile mode" (ROCm 7.13 still takes
    --path and prefers --output-directory); rocprofiler-systems, "Sampling the call stack".
    """
    rank = "rank%env{RANK}%"  # torchrun sets RANK; %rank% would be the rank of Slurm or MPI
    if program == Rocprof.compute:
        return ["profile", "--name", "run", "--path", str(folder / "rocprof-compute")]
    if program == Rocprof.sys:
        return ["--trace", "--output", str(folder), rank]
    # Trace HIP, RCCL, kernels and copies; pftrace opens at ui.perfetto.dev, and --stats adds a
    # table of kernels as CSV.
    names = ["--output-directory", str(folder), "--output-file", rank]
    return ["--runtime-trace", "--stats", *names, "--output-format", "pftrace", "csv"]


def rendezvous(config: Config, host: Host, node: int) -> list[str]:
    """Return torchrun's rendezvous options: a loopback port, or the first of several nodes.

    The loopback is given by address, because containers without a network, and many hosts, cannot
    resolve their own name.
    """
    slurm = config.runtime.slurm
    if slurm.nodes == 1:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    address, port = (host.environ.get(name, f"${name}") for name in ("MASTER_ADDR", "MASTER_PORT"))
    # Static keeps the order of nodes, where c10d would sort them by address. So rank 0 is next to
    # the launcher, and sums add up in one order.
    nodes = ["--nnodes", str(slurm.nodes), "--node-rank", str(node), "--rdzv-backend", "static"]
    master = ["--master-addr", address, "--master-port", port]
    return [*nodes, *master, "--rdzv-conf", f"timeout={slurm.rendezvous_timeout_s}"]


def python(config: Config, host: Host) -> str:
    return host.python if config.runtime.on_node == "local" else "python3"  # the image's own


def server_argv(config: Config, host: Host, port: int, run_dir: Path) -> list[str]:
    """Return the command of vLLM's server, with the weight transfer and logprobs TRL 1.16 needs."""
    topology, source = config.topology, model_source(config, run_dir)
    on_cpu = config.hardware.vendor == Vendor.none
    # In an image, `vllm` uses the base's packages. On a host, a `vllm` on the PATH may belong to
    # another environment.
    if config.runtime.on_node == "docker":
        argv = ["vllm", "serve", source]
    else:
        argv = [python(config, host), "-m", "vllm.entrypoints.cli.main", "serve", source]
    if source == config.model.hub_id and config.model.revision:
        argv += ["--revision", config.model.revision]
    # Listen on the loopback only, since the weight-update endpoints have no authentication.
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", placement.dtype(config)]
    argv += ["--tensor-parallel-size", str(topology.server_tensor_parallel)]
    if topology.servers > 1:
        argv += ["--data-parallel-size", str(topology.servers)]
    if not on_cpu:
        argv += ["--gpu-memory-utilization", f"{topology.server_memory_share:g}"]
    if topology.server_cache_gb:
        argv += ["--kv-cache-memory-bytes", str(int(topology.server_cache_gb * 1e9))]
    if topology.server_max_length:
        argv += ["--max-model-len", str(topology.server_max_length)]
    argv += ["--seed", str(config.seed)]
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    argv += ["--weight-transfer-config", json.dumps({"backend": placement.backend(config)})]
    argv += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])]
    if is_tokens_only(config):
        argv.append("--skip-tokenizer-init")
    return [*argv, *options(config.topology.server_args)]
