"""Ranks on the cores next to their GPUs (topology.numa_binding), by what Linux says in /sys: no program and no library is needed for it.

torchrun's own --numa-binding does the same through the program numactl, which images and small machines lack.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from recipes.common.errors import UserError

Cores = frozenset[int]


def gpus() -> list[str]:
    """PCI addresses of the GPUs of this node's ranks, in their order."""
    found = (torch.cuda.get_device_properties(rank) for rank in range(int(os.environ["LOCAL_WORLD_SIZE"])))
    return [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in found]


def bind(how: str, gpus: list[str], local_rank: int, root: Path = Path("/")) -> str:
    """Bind every thread of this process, and what it will start; says to which cores. Raises UserError as `cores` does."""
    chosen = cores(how, gpus, local_rank, Cores(os.sched_getaffinity(0)), root)
    for thread in os.listdir("/proc/self/task"):  # libraries have started some as they were imported
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), chosen)
    return f"topology.numa_binding={how}: {len(chosen)} core(s) from {min(chosen)} to {max(chosen)}, next to GPU {gpus[local_rank]}"


def cores(how: str, gpus: list[str], local_rank: int, allowed: Cores, root: Path = Path("/")) -> Cores:
    """Those of one rank. `gpus`: the PCI address of each local rank's. `allowed`: cores that the process may run on.

    node: all next to its GPU. socket: all of the processors that have one of those. exclusive: an even share of the physical ones next to
    its GPU, for ranks whose GPUs are next to the same. core_complex: those of one L3 cache, ranks taking turns.
    Raises UserError where /sys does not say which they are, or there are none for this rank.
    """
    cpus = root / "sys/devices/system/cpu"
    near = [_listed(root / f"sys/bus/pci/devices/{gpu}/local_cpulist") & allowed for gpu in gpus]
    own = near[local_rank]
    if not own:
        raise UserError(f"topology.numa_binding={how}: this process may run on none of the cores next to GPU {gpus[local_rank]}. {_NONE}")
    if how == "node":
        return own
    if how == "socket":
        socket = {core: _read(cpus / f"cpu{core}/topology/physical_package_id") for core in allowed}
        own_sockets = {socket[core] for core in own}
        return Cores(core for core in allowed if socket[core] in own_sockets)
    shared = "cache/index3/shared_cpu_list" if how == "core_complex" else "topology/thread_siblings_list"
    groups = sorted({_listed(cpus / f"cpu{core}/{shared}") & own for core in own}, key=min)
    beside = [rank for rank, others in enumerate(near) if others == own]
    turn = beside.index(local_rank)
    if how == "core_complex":
        return groups[turn % len(groups)]
    if len(groups) < len(beside):
        raise UserError(f"topology.numa_binding={how}: {len(groups)} physical core(s) for {len(beside)} ranks next to them. {_NONE}")
    first, end = (len(groups) * place // len(beside) for place in (turn, turn + 1))
    return Cores().union(*groups[first:end])


_NONE = "Use: topology.numa_binding=null."


def _listed(file: Path) -> Cores:
    """0-3,8 is {0, 1, 2, 3, 8}."""
    ranges = (part.partition("-") for part in _read(file).split(",") if part)
    return Cores(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise UserError(f"topology.numa_binding: which cores are next to a GPU is not known here ({error}). {_NONE}") from error
