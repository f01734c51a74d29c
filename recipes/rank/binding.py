"""Bind ranks to the cores next to their GPUs (topology.numa_binding), as /sys lists them.

torchrun's --numa-binding needs the program numactl, which images and small machines do not have.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from launch.core.errors import UserError
from recipes.rank.device import pci_address

Cores = frozenset[int]


def gpus() -> list[str]:
    """Return the PCI addresses of this node's GPUs, in the order of local ranks."""
    return [str(pci_address(rank)) for rank in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]


def bind(binding: str, gpus: list[str], local_rank: int, root: Path = Path("/")) -> str:
    """Bind all threads of this process and its future children; return a line with the cores.

    Raises UserError as `cores` does.
    """
    chosen = cores(binding, gpus, local_rank, Cores(os.sched_getaffinity(0)), root)
    # Libraries have already started threads during import.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread), chosen)
    return (
        f"topology.numa_binding={binding}: {len(chosen)} core(s) from {min(chosen)} to "
        f"{max(chosen)}, next to GPU {gpus[local_rank]}"
    )


def cores(
    binding: str, gpus: list[str], local_rank: int, allowed: Cores, root: Path = Path("/")
) -> Cores:
    """Return the cores of one rank.

    `gpus` are the PCI addresses by local rank; `allowed` are the cores that the process may run on.

    node: all cores next to its GPU. socket: all cores of the GPU's processor packages. exclusive:
    an even share of the physical cores if GPUs share them. core_complex: the cores of one L3 cache,
    assigned to ranks in turn.

    Raises UserError if /sys does not list the cores, or if none is left for this rank.
    """
    cpus = root / "sys/devices/system/cpu"
    near = [_listed(root / f"sys/bus/pci/devices/{gpu}/local_cpulist") & allowed for gpu in gpus]
    own = near[local_rank]
    if not own:
        raise UserError(
            f"topology.numa_binding={binding}: this process may not run on any core next to GPU "
            f"{gpus[local_rank]}. {_NONE}"
        )
    if binding == "node":
        return own
    if binding == "socket":
        socket = {core: _read(cpus / f"cpu{core}/topology/physical_package_id") for core in allowed}
        own_sockets = {socket[core] for core in own}
        return Cores(core for core in allowed if socket[core] in own_sockets)
    shared = (
        "cache/index3/shared_cpu_list"
        if binding == "core_complex"
        else "topology/thread_siblings_list"
    )
    groups = sorted({_listed(cpus / f"cpu{core}/{shared}") & own for core in own}, key=min)
    neighbours = [rank for rank, others in enumerate(near) if others == own]
    position = neighbours.index(local_rank)
    if binding == "core_complex":
        return groups[position % len(groups)]
    if len(groups) < len(neighbours):
        raise UserError(
            f"topology.numa_binding={binding}: {len(groups)} physical core(s) for "
            f"{len(neighbours)} ranks next to them. {_NONE}"
        )
    first, end = (len(groups) * place // len(neighbours) for place in (position, position + 1))
    return Cores().union(*groups[first:end])


_NONE = "Use: topology.numa_binding=null."


def _listed(file: Path) -> Cores:
    """Return a file's list of cores as a set: 0-3,8 is {0, 1, 2, 3, 8}."""
    ranges = (part.partition("-") for part in _read(file).split(",") if part)
    return Cores(
        core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
    )


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise UserError(
            f"topology.numa_binding: the cores next to a GPU are unknown here ({error}). {_NONE}"
        ) from error
