"""The network of a node: the address of an interface, and whether the RDMA adapter that was asked for is there."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from pathlib import Path

from launch.errors import HostError, near
from launch.machine.sysfs import text
from launch.schema import Slurm

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def address(interface: str | None) -> str:
    """IPv4 address of the interface, or the name of this machine where none was asked for. Raises HostError."""
    if interface is None:
        return socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = [name for _, name in socket.if_nameindex()]
            what = "has no IPv4 address." if interface in names else f"is not there.{near(interface, names)}"
            raise HostError(
                f"runtime.slurm.interface={interface}: on {socket.gethostname()} it {what} There are {', '.join(names)} (`ip -br address`)."
            ) from error
    return socket.inet_ntoa(answer[20:24])


def free_port(host: str) -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def check_adapters(slurm: Slurm, sysroot: str = "/") -> None:
    """Whether NCCL_IB_HCA's adapters exist, and the GID is one of RoCE v2. Raises HostError, naming what there is."""
    folder = Path(sysroot) / "sys/class/infiniband"
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name, port in _asked(slurm.hca):
        exact = str(slurm.hca).startswith("=")
        fitting = [adapter for adapter in there if adapter == name or (not exact and adapter.startswith(name))]
        if not fitting:
            raise HostError(
                f"runtime.slurm.hca={slurm.hca}: no adapter {name} on {socket.gethostname()}; there are {', '.join(there) or 'none'} "
                "(`ls /sys/class/infiniband`)."
            )
        for adapter in fitting if slurm.gid_index is not None else []:
            _check_gid(folder / adapter / "ports" / port, slurm)


def _asked(hca: str | None) -> list[tuple[str, str]]:
    """(adapter, port) of `=mlx5_0:1,mlx5_1`; none for a list of what to leave out (`^`)."""
    if not hca or hca.startswith("^"):
        return []
    pairs = (entry.partition(":") for entry in hca.removeprefix("=").split(","))
    return [(name, port or "1") for name, _, port in pairs]


def _check_gid(port: Path, slurm: Slurm) -> None:
    index = slurm.gid_index
    gid, kind = text(port / f"gids/{index}"), text(port / f"gid_attrs/types/{index}")
    if kind != "RoCE v2" or gid in (None, NO_GID):
        numbers = sorted((int(f.name) for f in port.glob("gid_attrs/types/*") if re.fullmatch(r"\d+", f.name)), key=int)
        good = [n for n in numbers if text(port / f"gid_attrs/types/{n}") == "RoCE v2" and text(port / f"gids/{n}") not in (None, NO_GID)]
        listed = ", ".join(f"{n} ({text(port / f'gids/{n}')})" for n in good) or "none: an InfiniBand port needs no gid_index"
        raise HostError(
            f"runtime.slurm.gid_index={index}: row {index} of {port.parents[1].name} on {socket.gethostname()} is "
            f"{kind + ' without an address' if kind == 'RoCE v2' else kind or 'empty'}. Rows of RoCE v2: {listed}."
        )
