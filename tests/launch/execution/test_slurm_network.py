"""Test interfaces of this machine, and RDMA adapters in a sysfs tree."""

from __future__ import annotations

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
    with pytest.raises(HostError, match=r"runtime.slurm.interface=loo: .*Did you mean lo\?"):
        slurm_network.address("loo")


@pytest.fixture
def fabric(tmp_path):
    """Create two adapters with RoCE v1 in GID 0, v2 in GID 1, and an empty GID 2."""
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
def test_existing_adapters_pass(fabric, hca, gid_index):
    slurm_network.check_adapters(replace(Slurm(), hca=hca, gid_index=gid_index), fabric)


@pytest.mark.parametrize(("hca", "gid_index", "message"), [
    ("=mlx5", None, "no adapter mlx5 on .* mlx5_0, mlx5_1"),
    ("=mlx5_0:1", 0, r"GID 0 of mlx5_0 on .*: IB/RoCE v1, fe80.* 1 \(0000"),
    ("=mlx5_0:1", 2, r"GID 2 .*: RoCE v2, 0000:.*0000.* 1 \("),
    ("=mlx5_0:2", 1, "remove it"),
])  # fmt: skip
def test_missing_adapters_and_wrong_gids_are_rejected(fabric, hca, gid_index, message):
    with pytest.raises(HostError, match=message):
        slurm_network.check_adapters(replace(Slurm(), hca=hca, gid_index=gid_index), fabric)
