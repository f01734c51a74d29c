"""Read a node's network: an interface's address, and whether an RDMA adapter exists."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from launch.core.errors import HostError, near
from launch.machine.sysfs import text
from launch.schema import Slurm

NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def address(interface: str | None) -> str:
    """Return the IPv4 address of the interface, or this machine's name if it is None.

    Raises HostError.
    """
    if interface is None:
        return socket.gethostname()
    addresses = psutil.net_if_addrs()
    own = [a.address for a in addresses.get(interface, ()) if a.family == socket.AF_INET]
    if not own:
        fault = "no IPv4 address" if interface in addresses else "no such interface"
        raise HostError(
            f"runtime.slurm.interface={interface}: {fault} on {socket.gethostname()}. "
            f"There are {', '.join(addresses)} (`ip -br address`).{near(interface, addresses)}"
        )
    return own[0]


def free_port(host: str) -> int:
    """Return a free TCP port."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def check_adapters(slurm: Slurm, sysroot: str = "/") -> None:
    """Check that NCCL_IB_HCA's adapters exist and that the GID is for RoCE v2.

    Raises HostError.
    """
    # `=mlx5_0:1,mlx5_1` names adapters and ports; without `=` these are prefixes. `^` lists what to
    # exclude.
    if not slurm.hca or slurm.hca.startswith("^"):
        return
    folder = Path(sysroot) / "sys/class/infiniband"
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    exact = slurm.hca.startswith("=")
    for entry in slurm.hca.removeprefix("=").split(","):
        name, _, port = entry.partition(":")
        adapters = [a for a in there if a == name or (not exact and a.startswith(name))]
        if not adapters:
            raise HostError(
                f"runtime.slurm.hca={slurm.hca}: no adapter {name} on {socket.gethostname()}. "
                f"There are {', '.join(there) or 'none'} (`ls /sys/class/infiniband`)."
            )
        for adapter in adapters if slurm.gid_index is not None else ():
            check_gid(folder / adapter / "ports" / (port or "1"), slurm.gid_index or 0)


def check_gid(port: Path, index: int) -> None:
    """Raise HostError if this row of a port's table does not serve RoCE v2."""
    rows = sorted(int(f.name) for f in port.glob("gid_attrs/types/*") if f.name.isdecimal())
    kinds = {row: text(port / f"gid_attrs/types/{row}") for row in rows}
    gids = {row: text(port / f"gids/{row}") for row in rows}
    good = [row for row in rows if kinds[row] == "RoCE v2" and gids[row] not in (None, NO_GID)]
    if index not in good:
        good_rows = ", ".join(f"{row} ({gids[row]})" for row in good)
        raise HostError(
            f"runtime.slurm.gid_index={index}: row {index} of {port.parents[1].name} on "
            f"{socket.gethostname()} is {kinds.get(index) or 'empty'}, {gids.get(index)}. "
            f"Rows of RoCE v2: {good_rows or 'none: an InfiniBand port needs no gid_index'}."
        )
