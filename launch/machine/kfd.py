"""AMD GPUs, from the kernel's topology (/sys/class/kfd) and from what amdgpu says of each PCI device. Needs no ROCm.

Sources: linux/drivers/gpu/drm/amd/amdkfd/kfd_topology.c (what each property means), include/uapi/linux/kfd_sysfs.h.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from launch.machine.gpu import Gpu, Link
from launch.machine.products import Product, products
from launch.machine.sysfs import folders, is_folder, number, properties, status_of, text

NODES = "sys/class/kfd/kfd/topology/nodes"
LINKS = {2: "pcie", 11: "xgmi"}  # HSA_IOLINKTYPE_*
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX"}  # by the number of partitions; one for each die is CPX
GTT = ("gfx1150", "gfx1151")  # integrated: their memory is the system's, and mem_banks counts only the small part that the BIOS sets aside


def gpus(root: Path) -> list[Gpu]:
    """Every GPU that the kernel shows, also those that this container was not given."""
    nodes = {int(folder.name): folder for folder in folders(root / NODES)}
    values = {node: properties(folder / "properties") for node, folder in nodes.items()}
    cards = Counter(_card(found, node) for node, found in values.items())
    gpus = []
    for node, folder in nodes.items():
        if values[node].get("gfx_target_version"):
            gpus.append(_gpu(root, folder, values[node], siblings=cards[_card(values[node], node)]))
        elif _closed(folder / "properties"):  # the kernel refuses a container's view of a device that it was not given
            gpus.append(Gpu("unknown", "unknown", None, None, None, node=node, usable=False))
    return gpus


def unread(root: Path) -> list[int]:
    """Nodes of which nobody can say whether they are GPUs: files without a target and without a CPU's cores, which the kernel gave all the
    same."""
    found = {int(folder.name): folder / "properties" for folder in folders(root / NODES)}
    values = {node: properties(file) for node, file in found.items()}
    known = ("gfx_target_version", "cpu_cores_count")
    return [node for node, file in found.items() if not any(values[node].get(name) for name in known) and not _closed(file)]


def _closed(file: Path) -> bool:
    try:
        file.read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _card(values: dict[str, int], node: int) -> tuple[str, int]:
    """The same for all partitions of one GPU: they share its PCI slot. Newer drivers give each a serial number of its own."""
    serial, location = values.get("unique_id", 0), values.get("location_id", 0)
    if location:
        return "slot", values.get("domain", 0) << 16 | location & 0xFFF8
    return ("serial", serial) if serial else ("node", node)


def _gpu(root: Path, folder: Path, values: dict[str, int], siblings: int) -> Gpu:
    version, minor = values["gfx_target_version"], values.get("drm_render_minor")
    gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    units = values.get("simd_count", 0) // (values.get("simd_per_cu", 0) or 4) or None
    pci = _pci_address(values, siblings)
    device = root / "sys/bus/pci/devices" / (pci or "none")
    memory_gb = _memory_gb(folder, device, gfx)
    fitting = _products(gfx, units or 0, memory_gb or 0, values.get("device_id", 0), siblings)
    product, group = (fitting[0], fitting[0].group if len(fitting) == 1 else None) if fitting else (None, None)
    parts = product.compute_units // units if product and units else 1
    compute = _stated(device / "current_compute_partition") or (
        _mode(parts, product.detect.dies) if product and product.detect.dies > 1 else None
    )
    links = _links(folder)
    return Gpu(
        product=" or ".join(one.name for one in fitting) + (f", {compute} partition (1 of {parts})" if parts > 1 else "") or "unknown",
        gfx=gfx,
        compute_units=units,
        memory_gb=memory_gb,
        group=group if parts == 1 else None,
        may_be=tuple(one.group for one in fitting if one.group and len(fitting) > 1 and parts == 1),
        render_minor=minor,
        node=int(folder.name),
        device_id=f"0x{values['device_id']:04x}" if values.get("device_id") else None,
        pci_address=pci,
        uuid=f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else None,
        numa_node=_numa_node(root, device, links),
        compute_partition=compute,
        memory_partition=_stated(device / "current_memory_partition"),
        partition_of=group if parts > 1 else None,
        hive=f"0x{values['hive_id']:016x}" if values.get("hive_id") else None,
        firmware=values.get("fw_version") or None,
        links=links,
        # A tree without dev/ says nothing about device nodes.
        usable=minor is None or not is_folder(root / "dev") or status_of(root / f"dev/dri/renderD{minor}") is not None,
    )


def _stated(mode: Path) -> str | None:
    """A virtual function may answer UNKNOWN."""
    found = text(mode)
    return None if found == "UNKNOWN" else found


def _pci_address(values: dict[str, int], siblings: int) -> str | None:
    """Bus, device and function stand in location_id; of a partition, whose number the kernel puts there too, the function is 0."""
    location = values.get("location_id", 0)
    if not location:
        return None
    function = location & 7 if siblings == 1 else 0
    return f"{values.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{function}"


def _memory_gb(folder: Path, device: Path, gfx: str) -> float | None:
    if gfx in GTT:
        total = number(device / "mem_info_gtt_total")
    else:
        total = sum(properties(bank).get("size_in_bytes", 0) for bank in folder.glob("mem_banks/*/properties"))
    return total / 1e9 if total else None


def _products(gfx: str, units: int, memory_gb: float, device_id: int, siblings: int) -> list[Product]:
    """Of its target, by PCI device id where the table has it, else by the compute units of all partitions of a GPU together, and by
    memory. Several where groups fit equally."""
    by_id = [p for p in products() if p.gfx == gfx and device_id in p.detect.device_ids and _divides(p, units)]
    fits = [p for p in products() if p.gfx == gfx and p.compute_units == units * siblings and memory_gb * siblings >= p.detect.from_gb]
    best = [p for p in fits if p.detect.from_gb == max(other.detect.from_gb for other in fits)]
    return by_id[:1] or (best if len({p.group for p in best}) > 1 else best[:1])


def _divides(product: Product, units: int) -> bool:
    """Whether so many compute units are the whole device or one partition of it."""
    return any(product.detect.dies % parts == 0 and units * parts == product.compute_units for parts in range(1, product.detect.dies + 1))


def _mode(parts: int, dies: int) -> str | None:
    return "CPX" if parts == dies else MODES.get(parts)


def _links(folder: Path) -> tuple[Link, ...]:
    """To CPUs and GPUs: io_links are direct, p2p_links pass through the host."""
    found = []
    for link in (link for kind in ("io_links", "p2p_links") for link in folders(folder / kind)):
        values = properties(link / "properties")
        if "node_to" in values and "type" in values:
            speed = values.get("max_bandwidth")  # MB/s
            kind = LINKS.get(values["type"], f"type {values['type']}")
            found.append(Link(values["node_to"], kind, speed / 1000 if speed else None))
    return tuple(found)


def _numa_node(root: Path, device: Path, links: tuple[Link, ...]) -> int | None:
    """As PCI says (-1: it does not), else the CPU that the GPU is linked to: KFD numbers CPUs first, one for each NUMA node."""
    found = number(device / "numa_node")
    if found is not None and found >= 0:
        return found
    cpus = (link.node for link in links if properties(root / NODES / str(link.node) / "properties").get("cpu_cores_count"))
    return next(cpus, None)
