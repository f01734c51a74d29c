"""Read a node's network: an interface's address, and whether an RDMA adapter exists."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from launch.core.errors import HostError, near
from launch.machine.sysfs import text
from launch.schema import Slurm

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def address(interface: str | None) -> str:
    """Return the IPv4 address of the interface, or this machine's name if it is None.

    Raises HostError.
    """
    if interface is None:
        return socket.gethostname()
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            names = [name for _, name in socket.if_nameindex()]
            fault = "no IPv4 address" if interface in names else "no such interface"
            raise HostError(
                f"runtime.slurm.interface={interface}: {fault} on {socket.gethostname()}. "
                f"There are {', '.join(names)} (`ip -br address`).{near(interface, names)}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


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
    for entry in slurm.hca.removeprefix("=").split(","):
        name, _, port = entry.partition(":")
        exact = slurm.hca.startswith("=")
        adapters = [a for a in there if a == name or (not exact and a.startswith(name))]
        fault = None
        if not adapters:
            fault = (
                f"runtime.slurm.hca={slurm.hca}: no adapter {name} on {socket.gethostname()}. "
                f"There are {', '.join(there) or 'none'} (`ls /sys/class/infiniband`)."
            )
        for adapter in adapters:
            fault = fault or gid_fault(folder / adapter / "ports" / (port or "1"), slurm.gid_index)
        if fault:
            raise HostError(fault)


def gid_fault(port: Path, index: int | None) -> str | None:
    """Return why this row of a port's table does not serve RoCE v2, and the rows that do."""
    rows = sorted(int(f.name) for f in port.glob("gid_attrs/types/*") if f.name.isdecimal())
    kinds = {row: text(port / f"gid_attrs/types/{row}") for row in rows}
    gids = {row: text(port / f"gids/{row}") for row in rows}
    good = [row for row in rows if kinds[row] == "RoCE v2" and gids[row] not in (None, NO_GID)]
    if index is None or index in good:
        return None
    kind = kinds.get(index)
    content = "RoCE v2 without an address" if kind == "RoCE v2" else kind or "empty"
    good_rows = ", ".join(f"{row} ({gids[row]})" for row in good)
    return (
        f"runtime.slurm.gid_index={index}: row {index} of {port.parents[1].name} on "
        f"{socket.gethostname()} is {content}. "
        f"Rows of RoCE v2: {good_rows or 'none: an InfiniBand port needs no gid_index'}."
    )
