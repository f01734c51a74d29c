"""The network of a node: interfaces of this machine, and adapters as sysfs shows them."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

import pytest

from launch.core.errors import HostError
from launch.execution import slurm_network
from launch.schema import Slurm


def test_address_of_an_interface():
    assert slurm_network.address("lo") == "127.0.0.1"
    assert slurm_network.address(None) == socket.gethostname()
    assert slurm_network.free_port("127.0.0.1") > 0
    names = ", ".join(name for _, name in socket.if_nameindex())
    for wrong, near in (("loo", r" Did you mean lo\?"), ("%%%", "")):
        with pytest.raises(HostError) as raised:
            slurm_network.address(wrong)
        said = rf".* There are {names} \(`ip -br address`\)\.{near}"
        assert re.fullmatch(f"runtime.slurm.interface={wrong}: {said}", str(raised.value))


@pytest.fixture
def fabric(tmp_path):
    """Make two adapters with RoCE v1 in row 0, v2 in row 1, and nothing in row 2."""
    rows = {
        0: ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
        1: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    }
    for adapter in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "sys/class/infiniband" / adapter / "ports/1"
        for folder in ("gids", "gid_attrs/types"):
            (port / folder).mkdir(parents=True)
        for row, (gid, kind) in rows.items():
            (port / f"gids/{row}").write_text(gid + "\n")
            (port / f"gid_attrs/types/{row}").write_text(kind + "\n")
        (port / "gids/2").write_text(slurm_network.NO_GID + "\n")
        (port / "gid_attrs/types/2").write_text("RoCE v2\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("hca", "gid_index"),
    [(None, None), ("mlx5", 1), ("=mlx5_0:1,mlx5_1", 1), ("^mlx5_9", None), ("mlx5_1", None)],
)
def test_adapters_that_are_there(fabric, hca, gid_index):
    slurm_network.check_adapters(replace(Slurm(), hca=hca, gid_index=gid_index), fabric)


@pytest.mark.parametrize(
    ("hca", "gid_index", "said"),
    [
        ("=mlx5", None, "no adapter mlx5 on .*; there are mlx5_0, mlx5_1"),
        ("bnxt_re0", None, "no adapter bnxt_re0"),
        ("=mlx5_0:1", 0, r"row 0 of mlx5_0 on .* is IB/RoCE v1. Rows of RoCE v2: 1 \(0000"),
        ("=mlx5_0:1", 2, r"row 2 .* is RoCE v2 without an address. Rows of RoCE v2: 1"),
        ("=mlx5_0:1", 7, "row 7 .* is empty"),
        ("=mlx5_0:2", 1, "none: an InfiniBand port needs no gid_index"),
    ],
)
def test_adapters_that_are_not(fabric, hca, gid_index, said):
    with pytest.raises(HostError, match=said):
        slurm_network.check_adapters(replace(Slurm(), hca=hca, gid_index=gid_index), fabric)


def test_a_machine_without_adapters(tmp_path):
    with pytest.raises(HostError, match="there are none"):
        slurm_network.check_adapters(replace(Slurm(), hca="mlx5_0"), str(tmp_path))
