"""Read the address of a node's network interface, and check its RDMA adapters.

python launch/execution/slurm_network.py [INTERFACE]    prints address:port of a free port
"""

import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

import psutil

from launch.core.errors import HostError, near
from launch.machine.sysfs import text
from launch.schema import Slurm

NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def address(interface: str | None) -> str:
    """Return the interface's IPv4 address; without an interface, this machine's name.

    Raises HostError if the interface does not exist or has no IPv4 address.
    """
    if interface is None:
        return socket.gethostname()
    addresses = psutil.net_if_addrs()
    ipv4 = [a.address for a in addresses.get(interface, ()) if a.family == socket.AF_INET]
    if not ipv4:
        problem = "no IPv4 address" if interface in addresses else "no such interface"
        raise HostError(
            f"runtime.slurm.interface={interface}: {problem} on {socket.gethostname()}. "
            f"It has {', '.join(addresses)} (`ip -br address`).{near(interface, addresses)}"
        )
    return ipv4[0]


def free_port(host: str) -> int:
    """Return a TCP port that is free on this address."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def check_adapters(slurm: Slurm, sysroot: str = "/") -> None:
    """Raise HostError if an adapter of runtime.slurm.hca is missing or its GID is not RoCE v2.

    The syntax follows NCCL_IB_HCA: `=mlx5_0:1,mlx5_1` lists exact names with optional ports,
    `mlx5` a prefix, and `^mlx5_0` excluded adapters.
    """
    if not slurm.hca or slurm.hca.startswith("^"):
        return
    folder = Path(sysroot) / "sys/class/infiniband"
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    exact = slurm.hca.startswith("=")
    for entry in slurm.hca.removeprefix("=").split(","):
        name, _, port = entry.partition(":")
        adapters = [a for a in present if a == name or (not exact and a.startswith(name))]
        if not adapters:
            raise HostError(
                f"runtime.slurm.hca={slurm.hca}: no adapter {name} on {socket.gethostname()}. "
                f"It has {', '.join(present) or 'none'} (`ls /sys/class/infiniband`)."
            )
        for adapter in adapters if slurm.gid_index is not None else ():
            check_gid(folder / adapter / "ports" / (port or "1"), slurm.gid_index or 0)


def check_gid(port: Path, index: int) -> None:
    """Raise HostError if entry `index` of the port's GID table is not a RoCE v2 address."""
    rows = sorted(int(f.name) for f in port.glob("gid_attrs/types/*") if f.name.isdecimal())
    kinds = {row: text(port / f"gid_attrs/types/{row}") for row in rows}
    gids = {row: text(port / f"gids/{row}") for row in rows}
    good = [row for row in rows if kinds[row] == "RoCE v2" and gids[row] not in (None, NO_GID)]
    if index not in good:
        usable = ", ".join(f"{row} ({gids[row]})" for row in good)
        remedy = (
            f"Use one of these: {usable}." if good else "InfiniBand ports need none: remove it."
        )
        raise HostError(
            f"runtime.slurm.gid_index={index}: RoCE v2 cannot use GID {index} of "
            f"{port.parents[1].name} on {socket.gethostname()}: {kinds.get(index) or 'empty'}, "
            f"{gids.get(index)}. {remedy}"
        )


if __name__ == "__main__":
    try:
        here = address(sys.argv[1] if sys.argv[1:] else None)
    except HostError as error:
        sys.exit(str(error))
    print(f"{here}:{free_port(here)}")
