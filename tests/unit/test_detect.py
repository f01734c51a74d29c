"""Which hardware group a machine is, from trees of /sys and /proc built here in the shape of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import detect
from launch.errors import HostError


def kfd_node(root: Path, number: int, memory_gb: float = 0.0, **properties: int) -> None:
    """One node of the kernel's topology; a CPU is one whose gfx_target_version is 0."""
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    (folder / "mem_banks/0").mkdir(parents=True)
    values = {"gfx_target_version": 0, "simd_count": 0, "simd_per_cu": 4, **properties}
    (folder / "properties").write_text("".join(f"{k} {v}\n" for k, v in values.items()))
    (folder / "mem_banks/0/properties").write_text(f"size_in_bytes {int(memory_gb * 1e9)}\n")


def gpu(version: int, units: int, **more: int) -> dict[str, int]:
    return {"gfx_target_version": version, "simd_count": 4 * units, **more}


@pytest.mark.parametrize(
    ("version", "units", "memory_gb", "more", "group"),
    [
        (90006, 60, 34.3, {}, "mi50"),
        (90006, 64, 34.3, {}, "mi60"),
        (90008, 120, 34.3, {}, "mi100"),
        (90010, 104, 68.7, {}, "mi210"),
        (90010, 110, 68.7, {}, "mi250x"),
        (90402, 228, 137.4, {}, "mi300a"),
        (90402, 304, 206.1, {}, "mi300x"),
        (90402, 304, 274.9, {}, "mi325x"),
        (90500, 256, 309.2, {"device_id": 0x75A0}, "mi350x"),
        (90500, 256, 309.2, {"device_id": 0x75A3}, "mi355x"),
        (110000, 96, 25.8, {"simd_per_cu": 2, "simd_count": 192}, "rx7900xtx"),
        (120001, 64, 17.1, {"simd_per_cu": 2, "simd_count": 128}, "rx9070xt"),
        (120001, 64, 34.2, {"simd_per_cu": 2, "simd_count": 128}, "r9700"),
        (110501, 40, 2.1, {"simd_per_cu": 2, "simd_count": 80}, "strix_halo"),
    ],
)
def test_amd(tmp_path, version, units, memory_gb, more, group):
    kfd_node(tmp_path, 0)
    for number in (1, 2, 10):
        kfd_node(tmp_path, number, memory_gb, **{**gpu(version, units), **more})
    assert detect.hardware_group(str(tmp_path)) == group
    assert len(detect.gpus(str(tmp_path))) == 3


@pytest.mark.parametrize(
    ("version", "gfx"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110501, "gfx1151"), (120001, "gfx1201")]
)
def test_gfx_target(tmp_path, version, gfx):
    kfd_node(tmp_path, 0, **gpu(version, 1))
    assert detect.gpus(str(tmp_path))[0].gfx == gfx


def test_nvidia(tmp_path):
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:19:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 17\n")
    assert detect.hardware_group(str(tmp_path)) == "h200"


def test_no_gpu_is_cpu(tmp_path):
    kfd_node(tmp_path, 0)
    assert detect.hardware_group(str(tmp_path)) == "cpu"
    assert detect.hardware_group(str(tmp_path / "empty")) == "cpu"


def test_two_kinds_are_not_guessed_between(tmp_path):
    kfd_node(tmp_path, 0, 206.0, **gpu(90402, 304))
    kfd_node(tmp_path, 1, 34.0, **gpu(90006, 60))
    with pytest.raises(HostError, match=r"1 x mi300x, 1 x mi50; name the group"):
        detect.hardware_group(str(tmp_path))


def test_an_unknown_gpu_is_named_not_guessed(tmp_path):
    kfd_node(tmp_path, 0, 24.0, **gpu(90402, 38))  # a CPX partition of an MI300X
    with pytest.raises(HostError, match=r"unknown GPU \(gfx942, 38 CUs, 24 GB\)"):
        detect.hardware_group(str(tmp_path))


def test_odd_files_do_not_crash_it(tmp_path):
    kfd_node(tmp_path, 0, 206.0, **gpu(90402, 304))
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/0/mem_banks/0/properties").write_text("size_in_bytes many\nodd\n")
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/1").mkdir()
    assert detect.gpus(str(tmp_path))[0].memory_gb is None
