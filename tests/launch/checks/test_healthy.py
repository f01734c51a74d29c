"""Test machines that look faulty and are not: desktops, containers, slots, other devices."""

from __future__ import annotations

import pytest

from launch.checks.facts import Space
from launch.checks.finding import Status
from tests.helpers import sysroots
from tests.helpers.sysroots import KFD, Machine
from tests.launch.checks.test_checks import BRIDGE, findings

OTHERS = (
    "iwlwifi 0000:02:00.0: ring 3 timeout",
    "nvme nvme0: I/O 5 QID 1 timeout, reset controller",
    "panfrost ff9a0000.gpu: Fatal error during GPU init",
    "i915 0000:00:02.0: [drm] GPU HANG: ecode 9:1:85dffffb",
    "amdgpu 0000:43:00.0: amdgpu: GPU reset method: mode1",
    "amdgpu 0000:43:00.0: amdgpu: XGMI: Add node 0, hive 0x1, total nodes: 8",
    "amdgpu 0000:43:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc",
)


def test_lines_that_only_look_like_faults(tmp_path):
    machine = sysroots.mi50(tmp_path)
    lines = (f"2026-11-21T18:00:00+00:00 host kernel: {line}" for line in OTHERS)
    machine.write(sysroots.KERN_LOG, "\n".join(lines))
    assert findings(machine)["kernel_log"].status == Status.passed


@pytest.mark.parametrize("case", ["4 GPUs", "8 GPUs", "not given", "hidden", "not used"])
def test_a_part_of_a_hive_is_complete(tmp_path, case):
    """Let a board, a virtual machine, a container or a run have a part of a hive."""
    machine = sysroots.mi300x(tmp_path, 4 if case == "4 GPUs" else 8)
    if case in ("not given", "hidden"):
        machine.remove("dev/dri/renderD135")
    if case == "hidden":  # hidden by the kernel: unreadable even for root
        machine.remove(f"{KFD}/nodes/9/properties")
        (tmp_path / f"{KFD}/nodes/9/properties").mkdir()
    if case == "not used":
        machine.only = frozenset(range(7))
    count = int(case[0]) if case.endswith("GPUs") else 7
    assert findings(machine)["xgmi"].read == f"1 hive(s) of {count} GPUs, complete"


def card_in_a_slot(machine: Machine, width: int, speed: int, busy: int) -> None:
    """Nest a card's switch as the kernel does: root port, two ends, the GPU's own fast link."""
    machine.remove(machine.device(0x03))
    link = {
        "max_link_width": 16,
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
    }
    slot = {**link, "current_link_width": width, "current_link_speed": f"{speed}.0 GT/s PCIe"}
    port, upper, lower, gpu = "0000:00:01.1", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
    at = "sys/devices/pci0000:00"
    for name, files in (
        (port, {**slot, "max_link_speed": "16.0 GT/s PCIe"}),
        (upper, slot),
        (lower, link),
        (gpu, link),
    ):
        at = f"{at}/{name}"
        for file, content in files.items():
            machine.write(f"{at}/{file}", content)
    machine.write(f"{at}/gpu_busy_percent", busy)
    machine.write(f"{at}/class", "0x030000")
    (machine.root / machine.device(0x03)).symlink_to(machine.root / at)


@pytest.mark.parametrize(("width", "speed", "busy", "status"), [
    (16, 16, 0, Status.passed),  # a card of PCIe 5 in a slot of PCIe 4
    (16, 2, 0, Status.unknown),  # idle
    (16, 2, 90, Status.warn),
    (8, 16, 0, Status.fail),
])  # fmt: skip
def test_the_link_of_the_slot(tmp_path, width, speed, busy, status):
    machine = sysroots.rx7900xtx(tmp_path)
    card_in_a_slot(machine, width, speed, busy)
    finding = findings(machine)["pcie"]
    assert finding.status == status, finding


def test_a_container_with_two_of_eight_gpus_passes(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    machine.write(".dockerenv", "")
    for minor in range(128, 134):
        machine.remove(f"dev/dri/renderD{minor}")
    found = findings(machine)
    assert {finding.status for finding in found.values()} == {Status.passed}
    assert found["render_nodes"].read == "uid 4242 may open 2; 6 are not in this container"


def test_peer_copies_over_xgmi_meet_no_bridge(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    sysroots.bridge(machine, BRIDGE, 0x1D)
    assert "acs" not in findings(machine)
    machine.write("sys/class/infiniband/mlx5_0/fw_ver", "1")  # copies to other nodes pass bridges
    assert findings(machine)["acs"].status == Status.warn


@pytest.mark.parametrize(
    ("num_gpus", "free_gb", "status"),
    [(1, 0.06, Status.warn), (2, 0.06, Status.fail), (2, 0.9, Status.warn)],
)
def test_little_shared_memory_fails_on_several_gpus_only(tmp_path, num_gpus, free_gb, status):
    machine = sysroots.mi300x(tmp_path, num_gpus)
    machine.space = Space(free_gb, free_gb)
    assert findings(machine)["shm"].status == status
