"""Write directory trees that replace `/`: those of healthy machines, and two real topologies.

The formats are those of real files. A test changes one file to break a machine.

    python -m tests.helpers.sysroots mi210_xgmi_pcie <folder>
                            writes one of the two real topologies of tests/data/kfd
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.checks.facts import COPIED, Facts, Space, gather, host_of
from launch.machine.container_engine import Engine
from launch.machine.this_python import Packages
from tests.conftest import composed

DATA = Path(__file__).parents[1] / "data/kfd"
KERN_LOG = "var/log/kern.log"
KFD = "sys/class/kfd/kfd/topology"
GIB = 1 << 30
UID = 4242  # owns no file here


class Machine:
    """A directory tree, and the answers of the machine's kernel."""

    def __init__(self, root: Path, hardware: str | None) -> None:
        self.root, self.hardware = root, hardware
        self.space: Space | None = Space(500.0, 1000.0)
        self.clock_synchronized: bool | None = True
        self.engine = Engine("podman", "5.1.0", rootless=True)
        self.only: frozenset[int] | None = None
        self.packages = Packages("rocm", "2.13.0+rocm7.2", "0.31.0+rocm723")

    def write(self, path: str, content: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content) if isinstance(content, bytes) else file.write_text(f"{content}\n")

    def write_properties(self, path: str, values: Mapping[str, int]) -> None:
        self.write(path, "\n".join(f"{name} {value}" for name, value in values.items()))

    def remove(self, path: str) -> None:
        target = self.root / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text, (path, old)
        self.write(path, text.replace(old, new).rstrip("\n"))

    def set_environ(self, **values: str) -> None:
        self.write(
            "proc/self/environ", "\0".join(f"{name}={value}" for name, value in values.items())
        )

    def device(self, bus: int) -> str:
        return f"sys/bus/pci/devices/0000:{bus:02x}:00.0"

    def facts(self) -> Facts:
        hardware = composed(f"hardware={self.hardware}").hardware if self.hardware else None
        probe = dataclasses.replace(
            COPIED,
            space=lambda path: self.space,
            clock_synchronized=lambda: self.clock_synchronized,
            engine=lambda environ: self.engine,
            packages=lambda: self.packages,
        )
        return dataclasses.replace(
            gather(host_of(str(self.root)), hardware, only=self.only), probe=probe
        )


def host_files(
    machine: Machine, kernel: str, cmdline: str, driver: str | None, rocm: str | None
) -> None:
    """Write the files of every healthy machine. The group of the test owns the device nodes."""
    root = machine.root
    machine.write("proc/sys/kernel/osrelease", kernel)
    machine.write("proc/sys/kernel/numa_balancing", 0)
    machine.write("proc/cmdline", f"BOOT_IMAGE=/vmlinuz root=/dev/sda1 {cmdline}")
    machine.write("proc/meminfo", "MemTotal:       131072000 kB\nMemFree:        100000000 kB")
    machine.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max open files            1024                 1048576              files\n"
        "Max locked memory         unlimited            unlimited            bytes",
    )
    machine.set_environ(PATH="/usr/bin")
    machine.write(
        KERN_LOG,
        "2026-11-21T12:00:00.5+00:00 host kernel: amdgpu 0000:05:00.0: GPU reset begin!\n"
        "2026-11-21T17:30:00.5+00:00 host kernel: eth0: link is up",
    )
    machine.write("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never")
    (root / "sys/module/amdgpu").mkdir(parents=True, exist_ok=True)
    if driver:
        machine.write("sys/module/amdgpu/version", driver)
    if rocm:
        machine.write("opt/rocm/.info/version", rocm)
    machine.write("dev/kfd", "")
    (root / "dev/kfd").chmod(0o660)
    group = (root / "dev/kfd").stat().st_gid
    machine.write("etc/group", f"root:x:0:\nvideo:x:44:\nrender:x:{group}:me")
    machine.write(
        "proc/self/status",
        f"Name:\tpython\nUid:\t{UID}\t{UID}\t{UID}\t{UID}\nGid:\t{UID}\t{UID}\n"
        f"Groups:\t{group} {UID}",
    )
    (root / "sys/class/kfd/kfd/proc").mkdir(parents=True, exist_ok=True)
    (root / "var/lib/docker").mkdir(parents=True, exist_ok=True)
    machine.write("usr/libexec/podman/catatonit", "")


def cpu_node(machine: Machine, node: int) -> None:
    machine.write_properties(
        f"{KFD}/nodes/{node}/properties",
        {"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0},
    )


def gpu_node(
    machine: Machine,
    node: int,
    bus: int,
    memory: int,
    links: Mapping[int, int] = {},
    **properties: int,
) -> None:
    """Add a GPU to the topology and dev/. `links` maps other nodes to 2 (PCIe) or 11 (xGMI)."""
    minor = 126 + node
    values = {
        "cpu_cores_count": 0,
        "simd_per_cu": 4,
        "location_id": bus << 8,
        "domain": 0,
        "vendor_id": 4098,
        "drm_render_minor": minor,
    }
    values |= {"unique_id": 0xABC0 + node, "fw_version": 177, **properties}
    machine.write_properties(f"{KFD}/nodes/{node}/properties", values)
    machine.write(f"{KFD}/nodes/{node}/gpu_id", 50000 + node)
    machine.write_properties(
        f"{KFD}/nodes/{node}/mem_banks/0/properties", {"heap_type": 1, "size_in_bytes": memory}
    )
    for number, (other, kind) in enumerate(links.items()):
        link = {
            "type": kind,
            "node_from": node,
            "node_to": other,
            "max_bandwidth": 64000 if kind == 11 else 32000,
        }
        machine.write_properties(f"{KFD}/nodes/{node}/io_links/{number}/properties", link)
    machine.write(f"dev/dri/renderD{minor}", "")
    (machine.root / f"dev/dri/renderD{minor}").chmod(0o660)


def pci_device(
    machine: Machine, bus: int, memory: int, power_w: int, pci_class: str = "0x120000"
) -> None:
    files = {
        "vendor": "0x1002",
        "class": pci_class,
        "numa_node": 0,
        "current_link_width": 16,
        "max_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "mem_info_vram_total": memory,
        "mem_info_vram_used": 300_000_000 if memory > 10 * GIB else 10_000_000,
        "ras/umc_err_count": "ue: 0\nce: 0",
        "ras/gfx_err_count": "ue: 0\nce: 0",
        "hwmon/hwmon3/temp2_input": 45000,
        "hwmon/hwmon3/temp2_crit": 100000,
        "hwmon/hwmon3/temp2_label": "junction",
        "hwmon/hwmon3/power1_cap": power_w * 1_000_000,
        "hwmon/hwmon3/power1_cap_default": power_w * 1_000_000,
    }
    for name, content in files.items():
        machine.write(f"{machine.device(bus)}/{name}", content)


def bridge(machine: Machine, address: str, acs_control: int) -> None:
    """Add a PCIe bridge whose configuration space has AER at 0x100 and ACS at 0x148."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 0x1 << 16 | 0x0001).to_bytes(4, "little")
    config[0x148:0x14C] = (0x1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x14E:0x150] = acs_control.to_bytes(2, "little")
    machine.write(f"sys/bus/pci/devices/{address}/class", "0x060400")
    machine.write(f"sys/bus/pci/devices/{address}/config", bytes(config))


def mi300x(root: Path, num_gpus: int = 8) -> Machine:
    """Write eight MI300X on a board, all linked, with AMD's driver 30.30 and ROCm 7.2."""
    machine = Machine(root, "mi300x")
    host_files(machine, "6.8.0-79-generic", "iommu=pt pci=realloc=off", "6.16.13", "7.2.3-81")
    cpu_node(machine, 0)
    cpu_node(machine, 1)
    for gpu in range(num_gpus):
        node, bus, peers = (
            2 + gpu,
            0x05 + 0x10 * gpu,
            [2 + other for other in range(num_gpus) if other != gpu],
        )
        links = {gpu // 4: 2, **dict.fromkeys(peers, 11)}
        target = {
            "gfx_target_version": 90402,
            "simd_count": 1216,
            "device_id": 0x74A1,
            "num_xcc": 8,
            "hive_id": 77,
        }
        gpu_node(machine, node, bus, 192 * GIB, links, **target)
        pci_device(machine, bus, 192 * GIB, 750)
        machine.write(f"{machine.device(bus)}/current_compute_partition", "SPX")
        machine.write(f"{machine.device(bus)}/current_memory_partition", "NPS1")
    bridge(machine, "0000:00:01.1", 0)
    return machine


def rented(root: Path) -> Machine:
    """Write a container with two MI300X that somebody else started, without docker."""
    machine = mi300x(root, num_gpus=2)
    machine.write(".dockerenv", "")
    machine.remove("var/lib/docker")
    return machine


def mi50(root: Path) -> Machine:
    """Write one MI50 with 32 GB and ROCm 6.3."""
    machine = Machine(root, "mi50")
    host_files(machine, "6.8.0-79-generic", "quiet", "6.16.13", "6.3.4-76")
    cpu_node(machine, 0)
    gpu_node(
        machine,
        1,
        0x43,
        32 * GIB,
        {0: 2},
        gfx_target_version=90006,
        simd_count=240,
        device_id=0x66A1,
    )
    pci_device(machine, 0x43, 32 * GIB, 300)
    return machine


def strix_halo(root: Path) -> Machine:
    """Write a Ryzen AI Max+ 395 with 124 GiB for its GPU and the driver of the kernel."""
    machine = Machine(root, "strix_halo")
    host_files(machine, "6.18.5-arch1-1", "ttm.pages_limit=32505856", None, None)
    machine.write(
        "var/lib/dpkg/status",
        "Package: linux-firmware\nStatus: install ok installed\nVersion: 20260115-1",
    )
    cpu_node(machine, 0)
    integrated = {
        "gfx_target_version": 110501,
        "simd_count": 80,
        "simd_per_cu": 2,
        "device_id": 0x1586,
        "fw_version": 32,
    }
    gpu_node(machine, 1, 0xC6, GIB // 2, {0: 2}, **integrated)
    pci_device(machine, 0xC6, GIB // 2, 120, "0x038000")
    machine.write(f"{machine.device(0xC6)}/mem_info_gtt_total", 124 * GIB)
    machine.write(f"{machine.device(0xC6)}/mem_info_gtt_used", 50_000_000)
    return machine


def rx7900xtx(root: Path) -> Machine:
    """Write a desktop with a card, where a mask hides the GPU of the processor."""
    machine = Machine(root, "rx7900xtx")  # the power cap is 327 W; the data sheet has 355
    host_files(machine, "6.14.0-27-generic", "quiet", "6.16.13", "7.2.3-81")
    cpu_node(machine, 0)
    card = {"gfx_target_version": 110000, "simd_count": 192, "simd_per_cu": 2, "device_id": 0x744C}
    gpu_node(machine, 1, 0x03, 24 * GIB, {0: 2}, **card)
    pci_device(machine, 0x03, 24 * GIB, 327, "0x030000")
    gpu_node(
        machine,
        2,
        0x0E,
        GIB // 2,
        {0: 2},
        gfx_target_version=100306,
        simd_count=4,
        simd_per_cu=2,
        device_id=0x164E,
    )
    pci_device(machine, 0x0E, GIB // 2, 355, "0x030000")
    bridge(machine, "0000:00:01.1", 0)
    machine.set_environ(HIP_VISIBLE_DEVICES="0")
    return machine


def h200(root: Path) -> Machine:
    """Write two H200 as NVIDIA's driver shows them without NVML."""
    machine = Machine(root, "h200")
    machine.packages = Packages("cuda", "2.13.0", "0.31.0")
    host_files(machine, "6.8.0-79-generic", "quiet", None, None)
    for path in ("sys/module/amdgpu", "dev/kfd", "sys/class/kfd"):
        machine.remove(path)
    for bus in (0x19, 0x3B):
        machine.write(
            f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0/information",
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 17\nGPU UUID: \t GPU-0000-{bus}\n"
            f"Bus Location: \t 0000:{bus:02x}:00.0",
        )
        pci_device(machine, bus, 0, 700, "0x030200")
        machine.write(f"{machine.device(bus)}/vendor", "0x10de")
    bridge(machine, "0000:00:01.1", 0)
    return machine


def laptop(root: Path) -> Machine:
    """Write a machine without a usable GPU."""
    machine = Machine(root, "cpu")
    host_files(machine, "6.8.0-79-generic", "quiet", None, None)
    for path in ("sys/module/amdgpu", "dev/kfd", "sys/class/kfd"):
        machine.remove(path)
    return machine


def real(root: Path, name: str) -> Path:
    """Write a topology copied from a real machine: mi210_xgmi_pcie or mi300x_cpx."""
    for part in (DATA / f"{name}.txt").read_text().split("== ")[1:]:
        path, _, content = part.partition("\n")
        file = root / KFD / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


if __name__ == "__main__":
    real(Path(sys.argv[2]), sys.argv[1])
