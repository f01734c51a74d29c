"""Test every check on healthy machines and on machines with one fault."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.checks import access, check_table, host_settings, kernel_log
from launch.checks.facts import Space
from launch.checks.finding import Status
from launch.machine.container_engine import Engine
from tests.conftest import composed
from tests.helpers import sysroots
from tests.helpers.sysroots import KFD, Machine

# (machine, check) whose finding is unknown on a healthy machine -> the reason
UNKNOWN_IF_HEALTHY = {
    ("strix_halo", "amdgpu_driver"): "AMD states no range for the kernel's own driver",
    ("h200", "memory_size"): "only NVML knows, and it answers for a running machine",
    ("h200", "memory_occupied"): "the same",
}


@dataclass(frozen=True)
class Broken:
    """A fault: `break_` makes the check return `status`, with `read` and `cure` in its texts."""

    check: str
    machine: Callable[[Path], Machine]
    break_: Callable[[Machine], object]
    status: Status
    read: str
    cure: str


def lacks(m: Machine, **packages: str | None) -> None:
    m.packages = m.packages._replace(**packages)


def on_each(name: str, content: object) -> Callable[[Machine], object]:
    """Write the same content to a file of the first and the third GPU of the MI300X machine."""
    return lambda m: [m.write(f"{m.device(bus)}/{name}", content) for bus in (0x05, 0x25)]


def no_rocm_group(m: Machine) -> None:
    m.replace("proc/self/status", f"Groups:\t{(m.root / 'dev/kfd').stat().st_gid}", "Groups:\t100")


def partition(m: Machine) -> None:
    """Show the first GPU as eight devices of 38 compute units."""
    m.write(f"{m.device(0x05)}/current_compute_partition", "CPX")


def second_kind(m: Machine) -> None:
    sysroots.gpu_node(m, 20, 0xF3, 32 << 30, gfx_target_version=90006, simd_count=240)


def undecided(m: Machine) -> None:
    second_kind(m)
    m.hardware = None


def fits_two_groups(m: Machine) -> None:
    """gfx950 with an id that no file has."""
    for node in range(2, 10):
        for old, new in (
            ("90402", "90500"),
            ("simd_count 1216", "simd_count 1024"),
            (f"device_id {0x74A1}", "device_id 1"),
        ):
            m.replace(f"{KFD}/nodes/{node}/properties", old, new)
    m.hardware = None


def empty_topology(m: Machine) -> None:
    (m.root / KFD).mkdir(parents=True)


def kernel_says(message: str) -> Callable[[Machine], object]:
    return lambda m: m.write(sysroots.KERN_LOG, f"2026-11-21T18:00:00+00:00 host kernel: {message}")


def limits(name: str, value: str) -> Callable[[Machine], object]:
    return lambda m: m.write("proc/self/limits", f"{name:<26}{value:<21}{value:<21}units")


def lost_gpu(m: Machine) -> None:
    """Remove every trace of the last of eight GPUs."""
    for path in (
        f"{KFD}/nodes/9",
        m.device(0x75),
        "dev/dri/renderD135",
        *(f"{KFD}/nodes/{node}/io_links/7" for node in range(2, 9)),
    ):
        m.remove(path)


def no_hive(m: Machine) -> None:
    for node in range(2, 10):
        m.replace(f"{KFD}/nodes/{node}/properties", "hive_id 77", "hive_id 0")


def set_masks(hip: str, cuda: str) -> Callable[[Machine], object]:
    return lambda m: m.set_environ(HIP_VISIBLE_DEVICES=hip, CUDA_VISIBLE_DEVICES=cuda)


def two_names(m: Machine) -> None:
    m.set_environ(PYTORCH_ALLOC_CONF="a:1", PYTORCH_CUDA_ALLOC_CONF="a:2")


def space(free_gb: float) -> Callable[[Machine], object]:
    return lambda m: setattr(m, "space", Space(free_gb, 1000.0))


BUILDERS = (
    *(sysroots.mi300x, sysroots.mi50, sysroots.strix_halo, sysroots.rx7900xtx, sysroots.h200),
    sysroots.rented,
)
MI300X, MI50, STRIX, CARD, H200, RENTED = BUILDERS
HEALTHY = {build.__name__: build for build in BUILDERS}
FAIL, WARN, UNKNOWN = Status.fail, Status.warn, Status.unknown
STRIX_GPU = "sys/bus/pci/devices/0000:c6:00.0"
BRIDGE = "0000:00:01.1"
HUGEPAGES = "sys/kernel/mm/transparent_hugepage/enabled"
FREE = "export HIP_VISIBLE_DEVICES=1,3,4,5,6,7"  # without those that on_each breaks
AMDGPU = "amdgpu 0000:05:00.0: amdgpu:"
UBUNTU = "20240318.git3b128b60-0ubuntu2.20"
EXPANDABLE = "expandable_segments:True"
# fmt: off
BROKEN = [
    Broken("hardware", MI300X, second_kind, WARN,
           "8 x mi300x, 1 x mi50, but hardware=mi300x was requested", "Choose a group"),
    Broken("hardware", MI300X, undecided, FAIL, "8 x mi300x, 1 x mi50", "Choose a group"),
    Broken("hardware", MI300X, lambda m: setattr(m, "hardware", "mi325x"), WARN,
           "hardware=mi325x was requested", "hardware=mi300x"),
    Broken("hardware", MI300X, lambda m: setattr(m, "hardware", "mi350x"), FAIL,
           "mi350x was requested, which has code for gfx950", "auto"),
    Broken("hardware", sysroots.laptop, empty_topology, UNKNOWN,
           "sys/class/kfd/kfd/topology has no nodes", "copy all of it: cp -rL"),
    Broken("gpus_found", MI300X, lambda m: m.remove(f"{KFD}/nodes/9"), WARN,
           "0000:75:00.0 on the bus", "dmesg | grep 0000:75:00.0"),
    Broken("gpus_found", MI50, lambda m: m.remove(f"{KFD}/nodes/1"), FAIL,
           "0000:43:00.0 on the bus", "reboot"),
    Broken("kfd", MI300X, lambda m: m.remove("dev/kfd"), FAIL, "/dev/kfd is missing",
           "--device /dev/kfd"),
    Broken("kfd", MI300X, no_rocm_group, FAIL, "uid 4242 may not open", "sudo usermod -aG"),
    Broken("kfd", MI300X, lambda m: m.remove("dev"), UNKNOWN, "no dev", "copy it as well"),
    Broken("render_nodes", MI300X, lambda m: m.remove("proc/self/status"), UNKNOWN,
           "no proc/self/status", "copy it as well"),
    Broken("render_nodes", MI300X, no_rocm_group, FAIL, "and 5 more", "sudo usermod -aG"),
    Broken("render_nodes", MI300X, lambda m: m.remove("dev/dri/renderD130"), WARN, "1 of 8 GPUs",
           "--device /dev/dri/renderD130"),
    Broken("partition_mode", MI300X, partition, FAIL, "CPX, NPS1; SPX, NPS1",
           "hardware.host.compute_partition=CPX"),
    Broken("partition_mode", MI300X, on_each("current_memory_partition", "NPS4"), FAIL, "SPX, NPS4",
           "--memory-partition NPS1"),
    Broken("partition_mode", MI300X, on_each("current_memory_partition", ""), UNKNOWN,
           "SPX, unknown", "amd-smi partition"),
    Broken(
        "memory_size",
        MI50,
        lambda m: m.write(f"{KFD}/nodes/1/mem_banks/0/properties", f"size_in_bytes {16 << 30}"),
        WARN,
        "16 GiB each",
        "hardware.memory_gb=16",
    ),
    Broken("memory_occupied", MI300X, on_each("mem_info_vram_used", 150 << 30), FAIL,
           "0000:05:00.0 161.1 GB (78%)", FREE),
    Broken("memory_occupied", CARD, lambda m: desktop(m), WARN, "0000:03:00.0 3.2 GB (12%)",
           "amd-smi process"),
    Broken("memory_occupied", CARD, lambda m: [desktop(m), foreign(m, 50001)], FAIL,
           "3.2 GB (12%), by python3 (711), outside", "amd-smi"),
    Broken("memory_occupied", STRIX, lambda m: m.write(f"{STRIX_GPU}/mem_info_gtt_used", 30 << 30),
           WARN, "(24%)", "amd-smi process"),
    Broken("foreign_processes", MI300X, lambda m: foreign(m, 50002), WARN,
           "python3 (711), outside this container (713)", "kill 711"),
    Broken("foreign_processes", MI300X, lambda m: m.remove("sys/class/kfd/kfd/proc"), UNKNOWN,
           "missing", "amd-smi process"),
    Broken("ras", MI300X, on_each("ras/umc_err_count", "ue: 2\nce: 5"), FAIL,
           "uncorrectable: 0000:05:00.0 umc ue 2", FREE),
    Broken("ras", MI300X, on_each("ras/gfx_err_count", "ue: 0\nce: 5"), WARN,
           "corrected: 0000:05:00.0 gfx ce 5", "watch it"),
    Broken("hardware", MI300X, fits_two_groups, FAIL, "8 x AMD Instinct MI350X or AMD",
           "Use: hardware=mi350x or hardware=mi355x"),
    Broken("temperature", MI300X, on_each("hwmon/hwmon3/temp2_input", 101000), FAIL, "101 of 100 C",
           "--power-cap"),
    Broken("power_cap", MI300X, on_each("hwmon/hwmon3/power1_cap", 500_000_000), WARN,
           "500 of 750 W", "--power-cap 750"),
    Broken("gtt_size", STRIX, lambda m: m.write(f"{STRIX_GPU}/mem_info_gtt_total", 62 << 30), WARN,
           "67 GB", "ttm.pages_limit=31719424"),
    Broken("carved_memory", STRIX, lambda m: m.write(f"{STRIX_GPU}/mem_info_vram_total", 64 << 30),
           WARN, "68.7 GB", "512 MB"),
    Broken("amdgpu_driver", MI300X, lambda m: m.write("sys/module/amdgpu/version", "6.7.0"), WARN,
           "21 months", "amdgpu-dkms"),
    Broken("amdgpu_driver", MI300X, lambda m: unloaded(m), FAIL, "not loaded",
           "sudo modprobe amdgpu"),
    Broken("gpu_ipc", MI300X, lambda m: legacy_ipc(m, "1", "sys/module/amdgpu/version"), FAIL,
           "own amdgpu", "unset HSA_ENABLE_IPC_MODE_LEGACY"),
    Broken("gpu_ipc", MI300X, lambda m: legacy_ipc(m, "0"), WARN, "amdgpu-dkms", "set it to 1"),
    Broken("rocm", MI50, lambda m: m.write("opt/rocm/.info/version", "7.2.3-81"), WARN, "7.2.3-81",
           "container=rocm_gfx906"),
    Broken("kernel", STRIX, lambda m: m.write("proc/sys/kernel/osrelease", "6.11.0-29-generic"),
           FAIL, "6.11.0", "install Linux 6.18.4"),
    Broken("linux_firmware", STRIX,
           lambda m: m.replace("var/lib/dpkg/status", "20260115", "20250901"), FAIL, "20250901",
           "linux-firmware"),
    Broken("linux_firmware", STRIX,
           lambda m: m.replace("var/lib/dpkg/status", "20260115-1", UBUNTU), UNKNOWN, UBUNTU,
           "apt-get changelog"),
    Broken("gpu_firmware", MI300X, lambda m: m.replace(f"{KFD}/nodes/2/properties", "177", "150"),
           WARN, "150, 177", "RECLAIM=1"),
    Broken("kernel_log", MI300X,
           kernel_says("amdgpu: [drm] ring comp_1.0.0 timeout, signaled seq=2"), FAIL,
           "ring timeout", "gpureset"),
    Broken("kernel_log", MI300X, kernel_says(f"{AMDGPU} MES failed to respond to msg=REMOVE_QUEUE"),
           FAIL, "queue hang", "reboot"),
    Broken("kernel_log", MI300X, kernel_says(f"{AMDGPU} device lost from bus!"), FAIL, "lost GPU",
           "reboot"),
    Broken("kernel_log", H200, kernel_says("NVRM: Xid (PCI:0000:19:00): 79, GPU has fallen off"),
           FAIL, "Xid", "--gpu-reset"),
    Broken("kernel_log", H200, kernel_says("NVRM: Xid (PCI:0000:19:00): 31, pid=7, MMU Fault"),
           WARN, "a program's Xid", "process"),
    Broken("kernel_log", MI300X,
           kernel_says("amdgpu 0000:05:00.0: [gfxhub] no-retry page fault (src)"), WARN,
           "page fault", "process"),
    Broken("kernel_log", MI300X,
           kernel_says("INFO: task nfsd:9 blocked for more than 120 seconds."), WARN, "stuck task",
           "process"),
    Broken("kernel_log", MI300X, kernel_says("Out of memory: Killed process 42 (python)"), WARN,
           "killed for lack of memory", "fewer"),
    Broken("kernel_log", MI300X, lambda m: m.remove(sysroots.KERN_LOG), UNKNOWN, "not in this tree",
           "sudo dmesg"),
    Broken("pcie", MI300X, on_each("current_link_width", 8), FAIL, "0000:05:00.0 x8 of x16",
           "seat the card"),
    Broken("pcie", MI300X, on_each("current_link_speed", "16.0 GT/s PCIe"), WARN, "16 of 32 GT/s",
           "BIOS"),
    Broken("xgmi", MI300X, lambda m: m.remove(f"{KFD}/nodes/4/io_links/3"), FAIL,
           "nodes 4-5 (1 links missing)", "amd-smi topology"),
    Broken("xgmi", MI300X, lost_gpu, WARN, "a hive of 7 GPUs, but mi300x has 8",
           "power the machine off and on"),
    Broken("xgmi", MI300X, no_hive, WARN, "over PCIe", "bridge"),
    Broken("iommu", MI300X, lambda m: translated(m), FAIL, "translates (mode DMA-FQ)",
           "add iommu=pt"),
    Broken("acs", CARD, lambda m: sysroots.bridge(m, BRIDGE, 0x1D), WARN,
           f"1 of 1 bridges: {BRIDGE}", f"sudo setpci -s {BRIDGE}"),
    Broken("acs", CARD, lambda m: m.write(f"sys/bus/pci/devices/{BRIDGE}/config", bytes(64)),
           UNKNOWN, "only root", "sudo lspci"),
    Broken("torch_build", RENTED, lambda m: lacks(m, torch_build="cpu"), FAIL, "built for cpu",
           "make setup-in-image"),
    Broken("torch_build", RENTED, lambda m: lacks(m, torch=None, torch_build=None), FAIL,
           "no torch", "make setup TORCH=rocm"),
    Broken("vllm", RENTED, lambda m: lacks(m, vllm=None), WARN, "no vLLM", "make setup-in-image"),
    Broken("kfd", RENTED, lambda m: m.remove("dev/kfd"), FAIL, "/dev/kfd is missing",
           "this needs a container that is started with: docker run --device /dev/kfd"),
    Broken("shm", RENTED, space(0.064), FAIL, "0.06 of", "started with: docker run --shm-size"),
    Broken("memlock", RENTED, limits("Max locked memory", "8388608"), WARN, "8 MB",
           "started with: docker run --ulimit memlock=-1"),
    Broken("open_files", RENTED, limits("Max open files", "4096"), WARN, "4096",
           "started with: docker run --ulimit nofile=65535"),
    Broken("numa_balancing", RENTED, lambda m: m.write("proc/sys/kernel/numa_balancing", 1), WARN,
           "1", "on the host: sudo sysctl"),
    Broken("numa_balancing", MI300X, lambda m: m.write("proc/sys/kernel/numa_balancing", 1), WARN,
           "1", "sudo sysctl kernel.numa"),
    Broken("hugepages", STRIX, lambda m: m.write(HUGEPAGES, "always [madvise] never"), WARN,
           "madvise", "echo always"),
    Broken("memlock", MI300X, limits("Max locked memory", "8388608"), WARN, "8 MB", "memlock=-1"),
    Broken("open_files", MI300X, limits("Max open files", "4096"), WARN, "4096", "nofile=65535"),
    Broken("shm", MI300X, space(0.064), FAIL, "0.06 of", "--ipc=host"),
    Broken("run_root_disk", MI50, space(0.06), FAIL, "0.1 GB free", "run_root="),
    Broken("engine", MI300X, lambda m: setattr(m, "engine", Engine("podman", "5.0.3", True)), WARN,
           "podman 5.0.3, rootless", "keep_original_groups"),
    Broken("engine", MI300X, lambda m: m.remove("usr"), WARN, "podman 5.1.0", "package catatonit"),
    Broken("engine", MI300X, lambda m: setattr(m, "engine", Engine("docker", "28.2", True)), WARN,
           "docker 28.2, rootless", "setfacl"),
    Broken("docker_disk", MI50, space(20.0), WARN, "20 GB free for /var/lib/docker",
           "docker system df"),
    Broken("docker_disk", MI50, space(72.0), WARN, "72 GB free for /var/lib/docker",
           "docker system df"),
    Broken("clock", MI50, lambda m: setattr(m, "clock_synchronized", False), WARN,
           "not synchronized", "set-ntp true"),
    Broken("integrated_gpu", CARD, lambda m: m.set_environ(PATH="/bin"), WARN,
           "GPU 1 is integrated (gfx1036, 2 CUs)", "HIP_VISIBLE_DEVICES=0"),
    Broken("integrated_gpu", CARD, lambda m: integrated_first(m), FAIL,
           "GPU 0 is integrated (gfx1036, 2 CUs)", "HIP_VISIBLE_DEVICES=1"),
    Broken("integrated_gpu", CARD, lambda m: integrated_first(m, 110500, 16), FAIL,
           "GPU 0 is integrated (gfx1150, 16 CUs)", "HIP_VISIBLE_DEVICES=1"),
    Broken("gfx_override", STRIX, lambda m: m.set_environ(HSA_OVERRIDE_GFX_VERSION="11.0.0"), FAIL,
           "gfx1151 has native kernels", "unset"),
    Broken("gfx_override", MI50, lambda m: m.set_environ(HSA_OVERRIDE_GFX_VERSION="9.0.6"), WARN,
           "9.0.6", "unset"),
    Broken("visibility_masks", MI300X, lambda m: m.set_environ(ROCR_VISIBLE_DEVICES="2,3"), FAIL,
           "ROCR", "export HIP_VISIBLE_DEVICES=2,3"),
    Broken("visibility_masks", MI300X, set_masks("0", "1"), FAIL, "DEVICES=1", "unset CUDA"),
    Broken("visibility_masks", MI300X, lambda m: m.set_environ(HIP_VISIBLE_DEVICES="7,8"), FAIL,
           "has 8 GPU(s), counted from 0", "export HIP_VIS"),
    Broken("visibility_masks", H200, lambda m: m.set_environ(CUDA_VISIBLE_DEVICES="GPU-1f3c"), FAIL,
           "only indices are allowed", "DEVICES=0"),
    Broken("allocator", MI300X, lambda m: m.set_environ(PYTORCH_HIP_ALLOC_CONF=EXPANDABLE), WARN,
           EXPANDABLE, "unset PYT"),
    Broken("allocator", MI300X, two_names, WARN, "PYTORCH_CUDA_ALLOC_CONF=a:2",
           "unset PYTORCH_CUDA"),
]
# fmt: on


def foreign(m: Machine, gpu_id: int) -> None:
    """Add two processes that compute, one of the caller's, and one that only opened the GPU."""
    for pid, held in ((711, 2 << 30), (713, 1 << 30), (715, 4096)):
        m.write(f"sys/class/kfd/kfd/proc/{pid}/vram_{gpu_id}", held)
    m.write("proc/711/comm", "python3")
    m.write("proc/711/status", f"Name:\tpython3\nUid:\t{sysroots.UID}\t{sysroots.UID}")


def desktop(m: Machine) -> None:
    """Occupy memory like a browser, without a process that computes."""
    m.write(f"{m.device(0x03)}/mem_info_vram_used", 3 << 30)


def integrated_first(m: Machine, version: int = 100306, units: int = 2) -> None:
    """Put the integrated GPU before the card."""
    m.set_environ(PATH="/bin")
    integrated = {"gfx_target_version": version, "simd_count": 2 * units, "device_id": 0x164E}
    card = {"gfx_target_version": 110000, "simd_count": 192, "device_id": 0x744C}
    sysroots.gpu_node(m, 1, 0x0E, 1 << 29, simd_per_cu=2, **integrated)
    sysroots.gpu_node(m, 2, 0x03, 24 << 30, simd_per_cu=2, **card)


def legacy_ipc(m: Machine, value: str, *absent: str) -> None:
    for path in absent:
        m.remove(path)
    m.set_environ(HSA_ENABLE_IPC_MODE_LEGACY=value)


def unloaded(m: Machine) -> None:
    m.remove("sys/module/amdgpu")
    m.remove("sys/class/kfd")


def translated(m: Machine) -> None:
    m.write("proc/cmdline", "quiet amd_iommu=on")
    for bus in range(0x05, 0x85, 0x10):
        m.write(f"{m.device(bus)}/iommu_group/type", "DMA-FQ")


def findings(machine: Machine) -> dict:
    return {check.name: finding for check, finding in check_table.run(machine.facts()).items()}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_passes(tmp_path, name):
    for check, finding in findings(HEALTHY[name](tmp_path)).items():
        other = Status.unknown if (name, check) in UNKNOWN_IF_HEALTHY else Status.passed
        assert finding.status == other, (check, finding)
        assert finding.read, check
        assert finding.threshold, check
        assert finding.source, check


@pytest.mark.parametrize(
    "case", BROKEN, ids=[f"{case.check}-{case.status.value}-{i}" for i, case in enumerate(BROKEN)]
)
def test_a_fault_is_found_with_its_remedy(tmp_path, case):
    machine = case.machine(tmp_path)
    case.break_(machine)
    finding = findings(machine)[case.check]
    assert finding.status == case.status, finding
    assert case.read in finding.read
    assert case.cure in finding.cure


def test_every_check_has_a_passing_and_a_failing_machine(tmp_path):
    every = {check.name for check in check_table.CHECKS}
    assert len(every) == len(check_table.CHECKS)
    assert {case.check for case in BROKEN if case.status in (Status.fail, Status.warn)} == every
    passing = set()
    for name, build in HEALTHY.items():
        passing |= {
            check
            for check, finding in findings(build(tmp_path / name)).items()
            if finding.status == Status.passed
        }
    assert passing == every


def test_a_machine_without_a_gpu_has_checks_of_its_host_only(tmp_path):
    found = findings(sysroots.laptop(tmp_path))
    assert set(found) == {"kernel_log", "open_files", "shm", "run_root_disk", "clock"}
    assert {finding.status for finding in found.values()} == {Status.passed}


@pytest.mark.parametrize(
    ("gid", "cure"),
    [(993, "usermod -aG render $USER"), (5, "--group-add 5"), (0, "sudo chgrp render /dev/kfd")],
)
def test_a_closed_node_names_the_group_to_join(tmp_path, gid, cure):
    facts = sysroots.mi300x(tmp_path).facts()
    host = dataclasses.replace(
        facts.host, device_nodes={"/dev/kfd": gid}, gids={"render": 993}, member_of=(4242,)
    )
    finding = access.kfd_node(dataclasses.replace(facts, host=host))
    assert finding.status == Status.fail
    assert cure in finding.cure


def test_kernel_log_of_the_last_hour(tmp_path, monkeypatch):
    """Read the log of a running machine with the first command that prints one."""
    now = datetime.datetime.now(datetime.UTC)
    lines = [f"{(now - datetime.timedelta(hours=h)).isoformat()} line {h}" for h in (2, 0)]
    commands = (["no-such-program"], ["false"], ["echo", "\n".join([*lines, "odd line"])])
    monkeypatch.setattr(kernel_log, "COMMANDS", commands)
    facts = sysroots.laptop(tmp_path).facts()
    assert kernel_log.last_hour(dataclasses.replace(facts, root=Path("/"))) == ["line 0"]


@pytest.mark.parametrize("content", [None, b"", b"-1\n", b"\xff\x00\xfe", b"a b c\n= :\n"])
def test_odd_or_missing_files_are_unknown(tmp_path, content):
    """Each finding that does not pass still has a remedy."""
    machines = [sysroots.mi300x(tmp_path / "a", num_gpus=2), sysroots.strix_halo(tmp_path / "b")]
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    for name, machine in itertools.product(names, machines):
        files = {p: p.read_bytes() for p in machine.root.rglob(name) if p.is_file()}
        for file in files:
            file.unlink() if content is None else file.write_bytes(content)
        if files:
            results = findings(machine).values()
            assert all(f.cure for f in results if f.status != Status.passed), name
        for file, text in files.items():
            file.write_bytes(text)


@pytest.mark.parametrize(("build", "image_gb", "passes"), [
    (MI50, None, False),  # no engine answers
    (MI50, 0.0, False),
    (MI50, 30.0, True),
    (MI300X, None, True),  # its image's size is published
])  # fmt: skip
def test_an_image_of_unknown_size_needs_more_room(tmp_path, build, image_gb, passes):
    machine = build(tmp_path)
    machine.space = Space(72.0, 1000.0)
    facts = machine.facts()
    probe = dataclasses.replace(facts.probe, image_gb=lambda reference, environ: image_gb)
    finding = host_settings.docker_disk(dataclasses.replace(facts, probe=probe))
    assert (finding.status is Status.passed) == passes


@pytest.mark.parametrize(("overrides", "status"), [
    ("runtime=local method=grpo topology=split", Status.fail),
    ("runtime=local method=grpo topology=colocate", Status.fail),
    ("runtime=local method=grpo topology=ddp", Status.warn),
    ("runtime=docker method=grpo topology=colocate", None),
])  # fmt: skip
def test_a_local_run_that_needs_vllm_fails_without_it(tmp_path, overrides, status):
    machine = MI300X(tmp_path)
    lacks(machine, vllm=None)
    run = composed("hardware=mi300x", "model=qwen3_0_6b", *overrides.split())
    found = check_table.run(dataclasses.replace(machine.facts(), run=run))
    finding = {check.name: finding for check, finding in found.items()}.get("vllm")
    assert (finding and finding.status) == status
