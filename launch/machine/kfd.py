"""Detect AMD GPUs from the kernel's topology (/sys/class/kfd) and amdgpu's files, without ROCm.

Sources of the properties: linux/drivers/gpu/drm/amd/amdkfd/kfd_topology.c and
include/uapi/linux/kfd_sysfs.h.
"""

from collections import Counter
from pathlib import Path

from launch.machine.gpu import Gpu, Link
from launch.machine.products import Product, products
from launch.machine.sysfs import folders, is_folder, number, properties, status_of, text

NODES = "sys/class/kfd/kfd/topology/nodes"
LINKS = {2: "pcie", 11: "xgmi"}  # HSA_IOLINKTYPE_*
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX"}  # by number of partitions; CPX has one per die
# Properties that only a GPU has. Old kernels do not report the first.
GPU_PROPERTIES = ("gfx_target_version", "simd_count")
# Integrated GPUs, which use the system's memory. Their mem_banks only show the small part that the
# BIOS reserves.
INTEGRATED = ("gfx1150", "gfx1151")


def gpus(root: Path) -> list[Gpu]:
    """Return every GPU that the kernel shows, including GPUs that this container did not get."""
    nodes = {int(folder.name): folder for folder in folders(root / NODES)}
    values = {node: properties(folder / "properties") for node, folder in nodes.items()}
    keys = {node: _device_key(node_values, node) for node, node_values in values.items()}
    num_partitions = Counter(keys.values())
    gpus = []
    for node, folder in nodes.items():
        if any(map(values[node].get, GPU_PROPERTIES)):
            gpus.append(gpu_of(root, folder, values[node], num_partitions[keys[node]]))
        elif _is_unreadable(folder / "properties"):  # the kernel hides the GPU from this container
            gpus.append(Gpu("unknown", "unknown", None, None, None, node=node, usable=False))
    return gpus


def unidentified_nodes(root: Path) -> list[int]:
    """Return the readable nodes that are neither GPUs nor CPUs by their properties."""
    files = {int(folder.name): folder / "properties" for folder in folders(root / NODES)}
    keys = (*GPU_PROPERTIES, "cpu_cores_count")
    return [
        node
        for node, file in files.items()
        if not any(map(properties(file).get, keys)) and not _is_unreadable(file)
    ]


def _is_unreadable(file: Path) -> bool:
    try:
        file.read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _device_key(values: dict[str, int], node: int) -> tuple[str, int]:
    """Return a key that all partitions of a GPU share: its PCI slot, or else its serial number.

    Newer drivers report a different serial number for each partition.
    """
    serial, location = values.get("unique_id", 0), values.get("location_id", 0)
    if location:
        return "slot", values.get("domain", 0) << 16 | location & 0xFFF8
    return ("serial", serial) if serial else ("node", node)


def gpu_of(root: Path, folder: Path, values: dict[str, int], siblings: int) -> Gpu:
    """Return the facts about a node; `siblings` is the number of partitions of its GPU."""
    version, minor = values.get("gfx_target_version"), values.get("drm_render_minor")
    gfx = "unknown"
    if version:
        gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    units = values.get("simd_count", 0) // (values.get("simd_per_cu", 0) or 4) or None
    pci = None
    if location := values.get("location_id", 0):  # bus, device and function
        # A partition's function is its number; the PCI device has function 0.
        function = location & 7 if siblings == 1 else 0
        slot = f"{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{function}"
        pci = f"{values.get('domain', 0):04x}:{slot}"
    device = root / "sys/bus/pci/devices" / (pci or "none")
    if gfx in INTEGRATED:
        memory = number(device / "mem_info_gtt_total")
    else:
        banks = folder.glob("mem_banks/*/properties")
        memory = sum(properties(bank).get("size_in_bytes", 0) for bank in banks)
    memory_gb = memory / 1e9 if memory else None
    matches = matching(gfx, units or 0, memory_gb or 0, values.get("device_id", 0), siblings)
    product = matches[0] if matches else None
    group = product.group if product and len(matches) == 1 else None
    parts = product.compute_units // units if product and units else 1
    compute = _partition_mode(device / "current_compute_partition")
    if not compute and product and product.detect.dies > 1:
        compute = "CPX" if parts == product.detect.dies else MODES.get(parts)
    names = " or ".join(match.name for match in matches)
    partition = f", {compute} partition (1 of {parts})" if parts > 1 else ""
    links = links_of(folder)
    return Gpu(
        product=names + partition or "unknown",
        gfx=gfx,
        compute_units=units,
        memory_gb=memory_gb,
        group=group if parts == 1 else None,
        may_be=tuple(p.group for p in matches if p.group and len(matches) > 1 and parts == 1),
        render_minor=minor,
        node=int(folder.name),
        device_id=f"0x{values['device_id']:04x}" if values.get("device_id") else None,
        pci_address=pci,
        uuid=f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else None,
        numa_node=numa_node_of(root, device, links),
        compute_partition=compute,
        memory_partition=_partition_mode(device / "current_memory_partition"),
        partition_of=group if parts > 1 else None,
        hive=f"0x{values['hive_id']:016x}" if values.get("hive_id") else None,
        firmware=values.get("fw_version") or None,
        links=links,
        # A copied tree without dev/ lacks device nodes, so assume that its GPUs are usable.
        usable=minor is None
        or not is_folder(root / "dev")
        or status_of(root / f"dev/dri/renderD{minor}") is not None,
    )


def _partition_mode(file: Path) -> str | None:
    """Return the partition mode in a file; None if unknown, as in some virtual functions."""
    mode = text(file)
    return None if mode == "UNKNOWN" else mode


def matching(
    gfx: str, units: int, memory_gb: float, device_id: int, siblings: int
) -> list[Product]:
    """Return the products that match a device: several only if they belong to different groups.

    A product with the device's compiler target matches by its PCI device id. If no id matches, it
    matches by the compute units and memory of all partitions together.
    """
    same_target = [p for p in products() if p.gfx == gfx]
    for product in same_target:
        # `units` counts the complete GPU or one of its partitions.
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
    """Return the links to CPUs and GPUs: direct io_links, and p2p_links through the host."""
    links = []
    for link in (link for kind in ("io_links", "p2p_links") for link in folders(folder / kind)):
        values = properties(link / "properties")
        if "node_to" in values and "type" in values:
            speed = values.get("max_bandwidth")  # MB/s
            kind = LINKS.get(values["type"], f"type {values['type']}")
            links.append(Link(values["node_to"], kind, speed / 1000 if speed else None))
    return tuple(links)


def numa_node_of(root: Path, device: Path, links: tuple[Link, ...]) -> int | None:
    """Return the NUMA node of the PCI device or, if unknown, of the CPU it is linked to."""
    node = number(device / "numa_node")
    if node is not None and node >= 0:
        return node
    cpus = (  # KFD's first nodes are the CPUs, one for each NUMA node, so their numbers agree
        link.node
        for link in links
        if properties(root / NODES / str(link.node) / "properties").get("cpu_cores_count")
    )
    return next(cpus, None)
