"""Check that the Python of runtime=local has the torch and vLLM that a run needs."""

import sys
from collections.abc import Iterator

from launch.estimate.rank_state import generates_with_vllm
from launch.machine import this_python
from launch.machine.detect import Host
from launch.plan.process_env import starts_vllm
from launch.schema import Config


def problems(config: Config, host: Host) -> Iterator[str]:
    """Yield a message for each package that ranks on GPUs lack in the launcher's Python."""
    build = this_python.GPUS.get(config.hardware.vendor)
    uses_this_python = config.runtime.on_node == "local" and not config.runtime.slurm.python
    if build is None or not uses_this_python or host.python != sys.executable:
        return
    if config.method.exports:  # on the CPU
        return
    found = this_python.packages()
    if found.torch_build != build:
        torch = f"torch {found.torch}, built for {found.torch_build}" if found.torch else "no torch"
        remedy = this_python.TORCH_REMEDY.format(build)
        yield (
            f"runtime=local: {sys.executable} has {torch}, and hardware={config.hardware.name} "
            f"needs one built for {build}. Use: {remedy}."
        )
    if needs_vllm(config) and not found.vllm:
        in_method = starts_vllm(config, config.method.kind)
        key = f"method={config.method.name}" if in_method else f"topology={config.topology.name}"
        other = "another method" if in_method else "topology=single or ddp"
        if config.method.args.get("engine") == "vllm":
            key, other = "method.args.engine=vllm", "method.args.engine=transformers"
        yield (f"{key}: {sys.executable} has no vLLM. Use: {this_python.VLLM_REMEDY}, or {other}.")


def needs_vllm(config: Config) -> bool:
    """Return whether a server or a rank of the run imports vLLM, as trainers under colocate do."""
    return starts_vllm(config, config.method.kind) or generates_with_vllm(config)
