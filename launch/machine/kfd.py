"""Detect AMD GPUs by the kernel's topology (/sys/class/kfd) and amdgpu's files of each PCI device.

Needs no ROCm.

Sources: linux/drivers/gpu/drm/amd/amdkfd/kfd_topology.c (what each property means),
include/uapi/linux/kfd_sysfs.h.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from launch.machine.gpu import Gpu, Link
from launch.machine.products import Product, products
from launch.machine.sysfs import folders, is_folder, number, properties, status_of, text

NODES = "sys/class/kfd/kfd/topology/nodes"
LINKS = {2: "pcie", 11: "xgmi"}  # HSA_IOLINKTYPE_*
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX"}  # by number of partitions; one per die is CPX
# Integrated GPUs use the system's memory; mem_banks counts only the small part that the BIOS sets
# aside.
GTT = ("gfx1150", "gfx1151")


def gpus(root: Path) -> list[Gpu]:
    """Return every GPU that the kernel shows, also those that this container did not get."""
    nodes = {int(folder.name): folder for folder in folders(root / NODES)}
    values = {node: properties(folder / "properties") for node, folder in nodes.items()}
    cards = Counter(_card(own, node) for node, own in values.items())
    gpus = []
    for node, folder in nodes.items():
        if values[node].get("gfx_target_version"):
            gpus.append(gpu_of(root, folder, values[node], cards[_card(values[node], node)]))
        elif _closed(folder / "properties"):  # the kernel hides devices from containers
            gpus.append(Gpu("unknown", "unknown", None, None, None, node=node, usable=False))
    return gpus


def unread(root: Path) -> list[int]:
    """Return the readable nodes that show neither a GPU's target nor a CPU's cores."""
    files = {int(folder.name): folder / "properties" for folder in folders(root / NODES)}
    keys = ("gfx_target_version", "cpu_cores_count")
    return [
        node
        for node, file in files.items()
        if not any(map(properties(file).get, keys)) and not _closed(file)
    ]


def _closed(file: Path) -> bool:
    try:
        file.read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _card(values: dict[str, int], node: int) -> tuple[str, int]:
    """Return a key that all partitions of a GPU share: its PCI slot, else its serial.

    Newer drivers give each partition its own serial.
    """
    serial, location = values.get("unique_id", 0), values.get("location_id", 0)
    if location:
        return "slot", values.get("domain", 0) << 16 | location & 0xFFF8
    return ("serial", serial) if serial else ("node", node)


def gpu_of(root: Path, folder: Path, values: dict[str, int], siblings: int) -> Gpu:
    """Return the facts of a node; `siblings` is the number of partitions of its card."""
    version, minor = values["gfx_target_version"], values.get("drm_render_minor")
    gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    units = values.get("simd_count", 0) // (values.get("simd_per_cu", 0) or 4) or None
    pci = None
    if location := values.get("location_id", 0):  # bus, device and function
        function = location & 7 if siblings == 1 else 0  # the number of a partition
        slot = f"{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{function}"
        pci = f"{values.get('domain', 0):04x}:{slot}"
    device = root / "sys/bus/pci/devices" / (pci or "none")
    if gfx in GTT:
        memory = number(device / "mem_info_gtt_total")
    else:
        banks = folder.glob("mem_banks/*/properties")
        memory = sum(properties(bank).get("size_in_bytes", 0) for bank in banks)
    memory_gb = memory / 1e9 if memory else None
    fitting = matching(gfx, units or 0, memory_gb or 0, values.get("device_id", 0), siblings)
    product = fitting[0] if fitting else None
    group = product.group if product and len(fitting) == 1 else None
    parts = product.compute_units // units if product and units else 1
    compute = _stated(device / "current_compute_partition")
    if not compute and product and product.detect.dies > 1:
        compute = "CPX" if parts == product.detect.dies else MODES.get(parts)
    names = " or ".join(match.name for match in fitting)
    partition = f", {compute} partition (1 of {parts})" if parts > 1 else ""
    links = links_of(folder)
    return Gpu(
        product=names + partition or "unknown",
        gfx=gfx,
        compute_units=units,
        memory_gb=memory_gb,
        group=group if parts == 1 else None,
        may_be=tuple(p.group for p in fitting if p.group and len(fitting) > 1 and parts == 1),
        render_minor=minor,
        node=int(folder.name),
        device_id=f"0x{values['device_id']:04x}" if values.get("device_id") else None,
        pci_address=pci,
        uuid=f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else None,
        numa_node=numa_node_of(root, device, links),
        compute_partition=compute,
        memory_partition=_stated(device / "current_memory_partition"),
        partition_of=group if parts > 1 else None,
        hive=f"0x{values['hive_id']:016x}" if values.get("hive_id") else None,
        firmware=values.get("fw_version") or None,
        links=links,
        # A tree without dev/ tells nothing about device nodes.
        usable=minor is None
        or not is_folder(root / "dev")
        or status_of(root / f"dev/dri/renderD{minor}") is not None,
    )


def _stated(mode: Path) -> str | None:
    """Return the mode in a file; None if unknown. A virtual function may answer UNKNOWN."""
    state = text(mode)
    return None if state == "UNKNOWN" else state


def matching(
    gfx: str, units: int, memory_gb: float, device_id: int, siblings: int
) -> list[Product]:
    """Return the products with the GPU's target and its PCI device id or, if unknown, its size.

    Size means the compute units of all partitions of a GPU together, and memory. Several groups may
    match equally.
    """
    same_target = [p for p in products() if p.gfx == gfx]
    for product in same_target:
        # The units are those of the whole device or of one partition of it.
        parts, rest = divmod(product.compute_units, units) if units else (0, 1)
        divides = rest == 0 and parts > 0 and product.detect.dies % parts == 0
        if device_id in product.detect.device_ids and divides:
            return [product]
    by_size = [
        p
        for p in same_target
        if p.compute_units == units * siblings and memory_gb * siblings >= p.detect.from_gb
    ]
    best = [p for p in by_size if p.detect.from_gb == max(q.detect.from_gb for q in by_size)]
    return best if len({p.group for p in best}) > 1 else best[:1]


def links_of(folder: Path) -> tuple[Link, ...]:
    """Return the links to CPUs and GPUs: io_links are direct, p2p_links pass through the host."""
    links = []
    for link in (link for kind in ("io_links", "p2p_links") for link in folders(folder / kind)):
        values = properties(link / "properties")
        if "node_to" in values and "type" in values:
            speed = values.get("max_bandwidth")  # MB/s
            kind = LINKS.get(values["type"], f"type {values['type']}")
            links.append(Link(values["node_to"], kind, speed / 1000 if speed else None))
    return tuple(links)


def numa_node_of(root: Path, device: Path, links: tuple[Link, ...]) -> int | None:
    """Return PCI's answer, else the linked CPU, since KFD numbers CPUs first, one per NUMA node."""
    node = number(device / "numa_node")
    if node is not None and node >= 0:
        return node
    cpus = (
        link.node
        for link in links
        if properties(root / NODES / str(link.node) / "properties").get("cpu_cores_count")
    )
    return next(cpus, None)
