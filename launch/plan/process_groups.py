"""Compute the process groups that a run starts, with their commands and environments."""

import json
from pathlib import Path

from launch.core.vllm_flags import flags
from launch.inputs import paths
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.placement import creates_model, is_tokens_only
from launch.plan import inherited, process_env
from launch.schema import Config
from launch.schema.enums import Profile, Rocprof, Vendor
from launch.schema.plan import Process

# address:port of a server on a node of its own. launch/execution/slurm_job.py sets it.
SERVER = "ROCM_RECIPES_SERVER"
DTYPES = {"fp32": "float32", "fp16": "float16"}  # vLLM's names; otherwise bfloat16


def process(config: Config, host: Host, run_dir: Path, group: placement.ProcessGroup) -> Process:
    """Return the command, variables and GPUs of a process group."""
    port, address = None, server_address(config, host)
    if group.kind == "server":
        port = ports(host, run_dir)[0]
        argv = server_argv(config, host, port, run_dir)
    else:
        argv = ranks_argv(config, host, run_dir, group)
    # The server is one process that starts its ranks itself.
    ranks = 1 if group.kind == "server" else group.num_ranks
    settings = process_env.settings(config, host, group.kind, group.gpus, run_dir, ranks)
    name, kind, gpus, num_ranks = group.name, group.kind, group.gpus, group.num_ranks
    passed = inherited.names(config, host.environ, {s.name: s for s in settings})
    return Process(name, kind, argv, settings, gpus, num_ranks, port, group.node, passed, address)


def server_address(config: Config, host: Host) -> str:
    """Return the address of the server: the loopback, or that of its own node."""
    if not placement.serves_apart(config):
        return "127.0.0.1"
    return host.environ.get(SERVER, f"${SERVER}").partition(":")[0]


def ports(host: Host, run_dir: Path) -> tuple[int, int]:
    """Return free ports for the server, unless its node has chosen one, and its weight transfer.

    The run's hash chooses the first port to try, from 20000 to 30000. Linux assigns ephemeral ports
    from 32768.
    """
    chosen = host.environ.get(SERVER, "").partition(":")[2]
    server = int(chosen or host.free_port(20000 + int(paths.run_hash(run_dir), 16) % 5000 * 2))
    return server, host.free_port(server + 1)


def ranks_argv(
    config: Config, host: Host, run_dir: Path, group: placement.ProcessGroup
) -> list[str]:
    """Return the command that starts a node's ranks, with torchrun if they need it."""
    interpreter = python(config, host)
    program = "recipes.prepare" if group.kind == "prepare" else config.method.program
    ranks = ["-m", program, "--config", str(run_dir / "config.yaml")]
    if program == config.method.program and config.profile == Profile.rocprof:
        profiler = rocprof(config, interpreter, run_dir / "profile")
        ranks = ["--no-python", *profiler, "--", interpreter, *ranks]
    if placement.starts_directly(config, group.kind):
        return [interpreter, *ranks]
    return [
        *[interpreter, "-m", "torch.distributed.run", *rendezvous(config, host, group.node)],
        *["--nproc-per-node", str(group.num_ranks), *ranks],
    ]


def rocprof(config: Config, interpreter: str, folder: Path) -> list[str]:
    """Return the command of a ROCm profiler that writes to `folder`.

    torchrun starts the profiler for each rank, as AMD advises for launchers (rocprofiler-sdk,
    "Using rocprofv3 with MPI"). A profiler around torchrun would also profile torchrun, and the
    names of output files would have no ranks.

    Sources of the options, all on rocm.docs.amd.com: rocprofiler-sdk, "rocprofv3 command-line
    options" and "I/O control options"; rocprofiler-systems, "Sampling the call stack". Those of
    rocprof-compute are in recipes/measure/compute_profile.py, which also runs its analysis.
    """
    rank = "rank%env{RANK}%"  # torchrun sets RANK; %rank% would be the rank of Slurm or MPI
    if config.rocprof == Rocprof.compute:
        return [interpreter, "-m", "recipes.measure.compute_profile", str(folder)]
    if config.rocprof == Rocprof.sys:
        return [config.rocprof.value, "--trace", "--output", str(folder), rank]
    output = ["--output-directory", str(folder), "--output-file", rank, "--output-format"]
    # Counters in one pass, so that the run need not be repeated. The table has a row per kernel.
    if config.rocprof_counters:
        return [config.rocprof.value, "--pmc", *config.rocprof_counters, *output, "csv"]
    # Trace HIP, RCCL, kernels and copies. ui.perfetto.dev opens pftrace files; --stats adds a CSV
    # table of kernels.
    return [config.rocprof.value, "--runtime-trace", "--stats", *output, "pftrace", "csv"]


def rendezvous(config: Config, host: Host, node: int) -> list[str]:
    """Return torchrun's rendezvous options: loopback on one node, otherwise the first node."""
    slurm, num_nodes = config.runtime.slurm, placement.trainer_nodes(config)
    if num_nodes == 1:
        # An address, because containers without a network and many hosts cannot resolve their name.
        return ["--standalone", "--local-addr", "127.0.0.1"]
    address, port = (host.environ.get(name, f"${name}") for name in ("MASTER_ADDR", "MASTER_PORT"))
    # The static backend keeps the order of nodes, whereas c10d sorts by address. Thus rank 0 runs
    # on the launcher's node, and sums are always computed in the same order.
    nodes = ["--nnodes", str(num_nodes), "--node-rank", str(node), "--rdzv-backend", "static"]
    master = ["--master-addr", address, "--master-port", port]
    return [*nodes, *master, "--rdzv-conf", f"timeout={slurm.rendezvous_timeout_s}"]


def python(config: Config, host: Host) -> str:
    """Return the Python that runs the ranks: the host's or the image's."""
    return host.python if config.runtime.on_node == "local" else "python3"


def server_argv(config: Config, host: Host, port: int, run_dir: Path) -> list[str]:
    """Return the command of vLLM's server, with the weight transfer and logprobs TRL 1.16 needs."""
    topology, source = config.topology, config.model.path or str(config.model.hub_id)
    if creates_model(config):
        source = str(run_dir / "model_init")
    on_cpu = config.hardware.vendor == Vendor.none
    if config.runtime.in_container:
        argv = ["vllm", "serve", source]
    else:
        # A `vllm` on the host's PATH may belong to another environment.
        argv = [python(config, host), "-m", "vllm.entrypoints.cli.main", "serve", source]
    if source == config.model.hub_id and config.model.revision:
        argv += ["--revision", config.model.revision]
    # Listen on one address only, because the weight-update endpoints have no authentication.
    argv += ["--host", server_address(config, host), "--port", str(port)]
    argv += ["--dtype", DTYPES.get(config.precision.compute, "bfloat16")]
    argv += ["--tensor-parallel-size", str(topology.server_tensor_parallel)]
    if topology.servers > 1:
        argv += ["--data-parallel-size", str(topology.servers)]
    if not on_cpu:
        argv += ["--gpu-memory-utilization", f"{topology.server_memory_share:g}"]
        # The host limits small models. It gains from a process each for scheduling and the model,
        # and two for requests and answers (docs/results/h200.md). On a CPU, vLLM itself chooses mp.
        argv += ["--distributed-executor-backend", "mp"]
        argv += ["--api-server-count", str(2 * topology.servers)]
    if topology.server_cache_gb:
        argv += ["--kv-cache-memory-bytes", str(int(topology.server_cache_gb * 1e9))]
    if topology.server_max_length:
        argv += ["--max-model-len", str(topology.server_max_length)]
    argv += ["--seed", str(config.seed)]
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    # Without a vision tower, whose processor would need the tokenizer. Other models ignore it.
    argv.append("--language-model-only")
    argv += ["--weight-transfer-config", json.dumps({"backend": placement.backend(config)})]
    argv += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])]
    if is_tokens_only(config):
        argv.append("--skip-tokenizer-init")
    return [*argv, *flags(config.topology.server_args)]
