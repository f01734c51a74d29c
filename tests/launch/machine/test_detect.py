"""Test the detection of GPUs and their hardware group on trees like /sys and /proc."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from launch.config import auto
from launch.core.errors import HostError, UserError
from launch.machine import detect, kfd, masks, nvidia
from launch.machine.gpu import GIB, Link
from launch.machine.products import OTHERS, Product, products
from launch.schema.enums import Vendor
from launch.schema.host import Detect
from tests.conftest import composed
from tests.helpers import sysroots


def kfd_node(root: Path, number: int, memory_gb: float = 0.0, **properties: int) -> None:
    """Write a node of the kernel's topology: a GPU, or a CPU if gfx_target_version is 0."""
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    (folder / "mem_banks/0").mkdir(parents=True)
    values = {"gfx_target_version": 0, "simd_count": 0, "simd_per_cu": 4, **properties}
    (folder / "properties").write_text("".join(f"{k} {v}\n" for k, v in values.items()))
    (folder / "mem_banks/0/properties").write_text(f"size_in_bytes {int(memory_gb * 1e9)}\n")


def group_of(root: Path) -> str:
    return detect.group_of(detect.gpus(str(root)))


def gpu(version: int, units: int, **more: int) -> dict[str, int]:
    return {"gfx_target_version": version, "simd_count": 4 * units, **more}


@pytest.mark.parametrize(("version", "units", "memory_gb", "more", "group"), [
    (90006, 60, 34.3, {}, "mi50"),
    (90006, 60, 17.1, {}, "mi50_16gb"),
    (90006, 64, 34.3, {}, "mi60"),
    (90008, 120, 34.3, {}, "mi100"),
    (90010, 104, 68.7, {}, "mi210"),
    (90010, 110, 68.7, {}, "mi250x"),
    (90402, 228, 137.4, {}, "mi300a"),
    (90402, 304, 206.1, {}, "mi300x"),
    (90402, 80, 206.1, {}, "mi308x"),
    (90402, 304, 274.9, {}, "mi325x"),
    (90500, 256, 309.2, {"device_id": 0x75A0}, "mi350x"),
    (90500, 256, 309.2, {"device_id": 0x75A3}, "mi355x"),
    (110000, 96, 25.8, {"simd_per_cu": 2, "simd_count": 192}, "rx7900xtx"),
    (110000, 96, 51.5, {"simd_per_cu": 2, "simd_count": 192}, "w7900"),
    (110000, 96, 0, {"simd_per_cu": 2, "simd_count": 192, "device_id": 0x744A}, "w7900"),
    (110000, 84, 21.5, {"simd_per_cu": 2, "simd_count": 168}, "rx7900xt"),
    (110001, 60, 17.1, {"simd_per_cu": 2, "simd_count": 120}, "rx7800xt"),
    (100300, 72, 17.1, {"simd_per_cu": 2, "simd_count": 144}, "rx6800xt"),
    (100300, 80, 17.1, {"simd_per_cu": 2, "simd_count": 160}, "rx6900xt"),
    (120000, 32, 17.1, {"simd_per_cu": 2, "simd_count": 64}, "rx9060xt"),
    (120001, 64, 17.1, {"simd_per_cu": 2, "simd_count": 128}, "rx9070xt"),
    (120001, 64, 34.2, {"simd_per_cu": 2, "simd_count": 128}, "r9700"),
    (110501, 40, 2.1, {"simd_per_cu": 2, "simd_count": 80}, "strix_halo"),
    (110500, 16, 0.5, {"simd_per_cu": 2, "simd_count": 32}, "radeon_890m"),
])  # fmt: skip
def test_amd(tmp_path, version, units, memory_gb, more, group):
    assert group_of(tmp_path) == "cpu"
    kfd_node(tmp_path, 0)
    assert group_of(tmp_path) == "cpu"
    for number in (1, 2, 10):
        kfd_node(tmp_path, number, memory_gb, **{**gpu(version, units), **more})
    assert group_of(tmp_path) == group
    assert len(detect.gpus(str(tmp_path))) == 3


def unknown_kinds(root):
    kfd_node(root, 1, 0.5, **gpu(100306, 2))
    kfd_node(root, 2, 16.0, **gpu(100302, 40))


def card_and_nvidia(root):
    sysroots.h200(root)
    kfd_node(root, 1, 0.5, **gpu(100306, 2))


@pytest.mark.parametrize(("build", "message"), [
    (sysroots.rx7900xtx, r"1 x rx7900xtx, 1 x unknown GPU \(gfx1036, .*"
     r"hardware=rx7900xtx with HIP_VISIBLE_DEVICES=0\."),
    (unknown_kinds, "None of them has a group"),
    (card_and_nvidia, r"1 x unknown GPU \(gfx1036, 2 CUs, 0 GB\), 2 x h200. .*"
     r": hardware=h200 with CUDA_VISIBLE_DEVICES=0,1"),
])  # fmt: skip
def test_auto_does_not_guess(tmp_path, build, message):
    build(tmp_path)
    with pytest.raises(HostError, match=message):
        group_of(tmp_path)


def test_suggested_indices_are_those_of_hip(tmp_path):
    """A mask or a container may already hide some GPUs."""
    machine = sysroots.mi300x(tmp_path, num_gpus=4)
    sysroots.gpu_node(machine, 20, 0xF3, 32 << 30, gfx_target_version=90006, simd_count=240)
    machine.remove("dev/dri/renderD128")
    host = detect.host("python", str(tmp_path))
    visible = masks.visible(host.gpus, {"HIP_VISIBLE_DEVICES": "1,2,3"})
    with pytest.raises(
        HostError, match="mi300x with HIP_VISIBLE_DEVICES=1,2, or .*mi50 with HIP_VISIBLE_DEVICES=3"
    ):
        detect.group_of(visible, host.gpus)
    machine.remove("dev/dri/renderD146")
    assert group_of(tmp_path) == "mi300x"  # the MI50 may not be used


def test_malformed_files_are_ignored(tmp_path):
    kfd_node(tmp_path, 0, 206.0, **gpu(90402, 304))
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/0/mem_banks/0/properties").write_text(
        "size_in_bytes many\nodd\n"
    )
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/1").mkdir()
    (tmp_path / "proc/net").mkdir(parents=True)
    rows = [
        "  sl  local_address rem_address   st",
        "   0: 0100007F:1F90 00000000:0000 0A",
        "   1: 0100007F:odd! 00000000:0000 0A",
        "   2: 0100",
    ]
    (tmp_path / "proc/net/tcp").write_text("\n".join(rows))
    assert detect.host("python", str(tmp_path)).listening == {8080}
    assert detect.gpus(str(tmp_path))[0].memory_gb is None


def test_products_equal_the_files_as_hydra_composes_them():
    for product in products():
        # Three files with different bases, because Hydra is slow.
        if product not in OTHERS and product.group in ("mi210", "mi325x", "h100"):
            h = composed(f"hardware={product.group}").hardware
            assert product == Product(h.product, h.gfx, h.compute_units, h.name, h.detect)


def test_a_new_gpu_is_a_new_file(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/cdna9.yaml").write_text("vendor: amd\ngfx: gfx990\ndetect: {dies: 2}\n")
    file = tmp_path / "mi999.yaml"
    text = "defaults: [base/cdna9@_here_, _self_]\nname: mi999\nproduct: AMD MI999\n"
    file.write_text(text + "compute_units: 512\n")
    (tmp_path / "laptop.yaml").write_text("name: laptop\nvendor: none\n")
    mi999 = Product("AMD MI999", "gfx990", 512, "mi999", Detect(dies=2))
    assert products(tmp_path) == (mi999, *OTHERS)
    for problem, message in (
        ("", "compute_units"),
        ("compute_units: 1\ndetect: {die: 2}\n", "device_ids, dies"),
    ):
        products.cache_clear()
        file.write_text(text + problem)
        with pytest.raises(UserError, match=f"mi999.yaml: .*{message}"):
            products(tmp_path)


@pytest.mark.parametrize(("device_id", "units", "product", "partition"), [
    (0x74A1, 304, "AMD Instinct MI300X", "SPX"),
    (0x74A2, 80, "AMD Instinct MI308X", "SPX"),
    (0x74A1, 38, "AMD Instinct MI300X, CPX partition (1 of 8)", "CPX"),
    (0x74A0, 76, "AMD Instinct MI300A, TPX partition (1 of 3)", "TPX"),
    (0x74A2, 20, "AMD Instinct MI308X, CPX partition (1 of 4)", "CPX"),
    (0x74A1, 300, "unknown", None),
    (0x740C, 104, "AMD Instinct MI250 (one of its two dies)", None),
])  # fmt: skip
def test_product_by_device_id(tmp_path, device_id, units, product, partition):
    version = 90010 if device_id == 0x740C else 90402
    kfd_node(tmp_path, 0, 0.0, **gpu(version, units, device_id=device_id, unique_id=7))
    (device,) = detect.gpus(str(tmp_path))
    assert (device.product, device.compute_partition) == (product, partition)
    assert device.group == (
        None if "partition" in product or product == "unknown" else device.group
    )


SPX = "--compute-partition SPX.*memory_gb=36 .*gpus_per_node={}"


@pytest.mark.parametrize(("version", "count", "units", "ids", "product", "remedy"), [
    (90402, 4, 76, {"unique_id": 7}, "MI300X, QPX partition (1 of 4)", SPX),
    (90402, 8, 38, {"device_id": 0x74A1}, "MI300X, CPX partition (1 of 8)", SPX),
    (90500, 8, 32, {"device_id": 0x75FF, "unique_id": 7},
     "MI350X or AMD Instinct MI355X, CPX partition (1 of 8)", ""),
], ids=["by their number", "serials of their own", "of either product"])  # fmt: skip
def test_partitions(tmp_path, version, count, units, ids, product, remedy):
    for number in range(count):
        identity = {"unique_id": 70 + number, **ids, "location_id": 0x0500 + number}
        kfd_node(tmp_path, number, 36 * GIB, **gpu(version, units, **identity))
    gpus = detect.gpus(str(tmp_path))
    assert {g.product for g in gpus} == {f"AMD Instinct {product}"}
    assert {(g.group, g.may_be, g.pci_address) for g in gpus} == {(None, (), "0000:05:00.0")}
    message = rf"{count} x AMD Instinct .*{remedy.format(count)}"
    with pytest.raises(HostError, match=message):
        group_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "group"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", None)],
)
def test_nvidia_products(tmp_path, name, group):
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:19:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 17\n")
    (device,) = detect.gpus(str(tmp_path))
    assert (device.product, device.group, device.pci_address) == (name, group, "0000:19:00.0")


def test_real_mi210_server(tmp_path):
    devices = detect.gpus(str(sysroots.real(tmp_path, "mi210_xgmi_pcie")))
    assert [g.render_minor for g in devices] == list(range(128, 136))
    assert {g.product for g in devices} == {"AMD Instinct MI210"}
    assert [g.numa_node for g in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (devices[0].pci_address, devices[0].uuid) == ("0000:63:00.0", "GPU-1901ead3a2ecd4a6")
    assert len({g.hive for g in devices}) == 2
    xgmi = [(link.node, link.gb_s) for link in devices[0].links if link.kind == "xgmi"]
    assert xgmi == [(3, 50.0), (4, 50.0), (5, 50.0)]
    assert devices[0].links[0] == Link(0, "pcie", 32.0)
    assert devices[0].memory_gb is None  # the copy holds no mem_banks
    assert group_of(tmp_path) == "mi210"


def test_an_old_kernel_reports_no_compiler_target(tmp_path):
    nodes = sysroots.real(tmp_path, "mi210_xgmi_pcie") / sysroots.KFD / "nodes"
    for file in nodes.glob("*/properties"):
        lines = [line for line in file.read_text().splitlines(True) if "gfx_target" not in line]
        file.write_text("".join(lines))
    host = detect.host("python", str(tmp_path))
    assert len(host.gpus_of(Vendor.amd)) == len(host.gpus) == 8
    facts = {(g.gfx, g.group, g.device_id, g.compute_units) for g in host.gpus}
    assert facts == {("unknown", None, "0x740f", 104)}
    assert kfd.unidentified_nodes(tmp_path) == []
    with pytest.raises(HostError, match="8 x unknown GPU .*0x740f, 104 CUs.*hardware=<a similar"):
        group_of(tmp_path)


def test_memory_of_an_integrated_gpu_is_its_gtt(tmp_path):
    machine = sysroots.strix_halo(tmp_path)
    assert detect.gpus(str(tmp_path))[0].memory_gb == pytest.approx(133.1, abs=0.1)
    machine.remove(f"{machine.device(0xC6)}/mem_info_gtt_total")
    assert detect.gpus(str(tmp_path))[0].memory_gb is None  # not the half GiB of mem_banks


def test_a_container_only_counts_its_own_gpus(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    for minor in (128, 130):
        machine.remove(f"dev/dri/renderD{minor}")
    host = detect.host("python", str(tmp_path))
    assert [g.render_minor for g in host.gpus] == [129, 131, 132, 133, 134, 135]
    assert [g.render_minor for g in host.withheld] == [128, 130]
    assert (host.gpus[0].node, host.gpus[0].uuid) == (3, "GPU-000000000000abc3")
    assert (host.gpus[0].compute_partition, host.gpus[0].memory_partition) == ("SPX", "NPS1")
    line = detect.detection_line((*host.gpus, *host.withheld), "mi300x")
    assert "6 x AMD Instinct MI300X (gfx942, 304 CUs, 206 GB), and 2 " in line
    properties = f"{sysroots.KFD}/nodes/2/properties"
    machine.remove(properties)
    (tmp_path / properties).mkdir()  # the kernel hides it: unreadable, also for root
    host = detect.host("python", str(tmp_path))
    assert (len(host.gpus), len(host.withheld)) == (6, 2)
    assert group_of(tmp_path) == "mi300x"


class NotSupported(Exception):
    """Stand in for NVML's error class."""


def nvml_of_two_h200(**more):
    """Replace the module pynvml by one that reports two GPUs."""
    memory = types.SimpleNamespace(used=1 << 30, total=150_754_820_096)
    answers = {
        "NVMLError": NotSupported,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByPciBusId": lambda address: address,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(
            busId=f"00000000:{0x19 + handle:02X}:00.0"
        ),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    }
    return types.SimpleNamespace(**answers | more)


def test_facts_that_nvml_does_not_report_are_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of_two_h200())
    with nvidia.nvml() as library:
        gpu = nvidia.gpu_from_nvml(library, 1)
    assert (gpu.product, gpu.gfx, gpu.group, gpu.uuid) == ("NVIDIA H200", "sm_90", "h200", "GPU-1")
    assert (gpu.memory_gb, gpu.pci_address) == (150.754820096, "0000:1a:00.0")
    assert nvidia.memory(["0000:1a:00.0"]) == {"0000:1a:00.0": (1 << 30, 150_754_820_096)}

    def refuse(*_):
        raise NotSupported

    silent = {"nvmlDeviceGetMemoryInfo": refuse, "nvmlDeviceGetPciInfo": refuse}
    gpu = nvidia.gpu_from_nvml(nvml_of_two_h200(**silent), 0)
    assert (gpu.memory_gb, gpu.pci_address) == (None, None)
    for module in (nvml_of_two_h200(**silent), nvml_of_two_h200(nvmlInit=refuse), None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert nvidia.memory(["0000:1a:00.0"]) == {}


def test_auto_says_what_it_found(launch):
    auto._print_once.cache_clear()
    done = launch("mode=plan", "format=json")
    assert done.err.startswith("hardware=auto: ")
    assert "hardware=auto" not in done.out
    assert launch("mode=plan", "hardware=cpu").err == ""
