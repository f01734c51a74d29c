"""Detect NVIDIA GPUs by NVML, or by /proc/driver/nvidia if pynvml is not installed."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.machine.gpu import Gpu
from launch.machine.products import Product, products
from launch.machine.sysfs import number, text

FOLDER = "proc/driver/nvidia/gpus"


def gpus(root: Path) -> list[Gpu]:
    """Return the GPUs of a machine; NVML is asked only about this machine, not a copied tree."""
    if root == Path("/") and (Path("/dev/nvidiactl").exists() or Path("/", FOLDER).is_dir()):
        with nvml() as library:
            if library is not None:
                return [gpu_from_nvml(library, n) for n in range(library.nvmlDeviceGetCount())]
    return [gpu_from_proc(root, file) for file in sorted((root / FOLDER).glob("*/information"))]


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the initialized pynvml; None if it is not installed or the driver does not answer."""
    try:
        import pynvml  # not a dependency; torch's CUDA builds and vLLM install it
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def memory(addresses: list[str]) -> dict[str, tuple[int, int]]:
    """Return (used, total) bytes by PCI address; GPUs without an answer from NVML are left out."""
    with nvml() as library:
        if library is None:
            return {}
        sizes = {}
        for address in addresses:
            with contextlib.suppress(library.NVMLError):
                handle = library.nvmlDeviceGetHandleByPciBusId(address.encode())
                info = library.nvmlDeviceGetMemoryInfo(handle)
                sizes[address] = (int(info.used), int(info.total))
    return sizes


def _query(library: Any, function: Callable[[], Any]) -> Any:
    """Return what a call of NVML returns; None if this GPU or driver does not support it."""
    try:
        return function()
    except library.NVMLError:
        return None


def gpu_from_nvml(library: Any, index: int) -> Gpu:
    """Return the facts that NVML reports about a GPU."""
    handle = library.nvmlDeviceGetHandleByIndex(index)
    name = _query(library, lambda: library.nvmlDeviceGetName(handle)) or "unknown"
    product = _product(name)
    size = _query(library, lambda: library.nvmlDeviceGetMemoryInfo(handle).total)
    capability = _query(library, lambda: library.nvmlDeviceGetCudaComputeCapability(handle))
    bus = _query(library, lambda: library.nvmlDeviceGetPciInfo(handle).busId)
    # NVML writes the PCI domain with eight digits (00000000:19:00.0), sysfs with four.
    address = bus.lower()[-12:] if bus else None
    return Gpu(
        product=name,
        gfx="sm_{}{}".format(*capability) if capability else "unknown",
        compute_units=None,
        memory_gb=size / 1e9 if size else None,
        group=product.group if product else None,
        pci_address=address,
        uuid=_query(library, lambda: library.nvmlDeviceGetUUID(handle)),
        numa_node=_numa_node(Path("/"), address),
    )


def gpu_from_proc(root: Path, file: Path) -> Gpu:
    """Return the facts in the driver's `information` file about a GPU."""
    rows = (line.partition(":") for line in (text(file) or "").splitlines())
    values = {name.strip(): value.strip() for name, _, value in rows}
    name, address = values.get("Model") or "unknown", values.get("Bus Location") or file.parent.name
    product = _product(name)
    gfx, group = (product.gfx, product.group) if product else ("unknown", None)
    uuid, numa_node = values.get("GPU UUID"), _numa_node(root, address)
    return Gpu(name, gfx, None, None, group, pci_address=address, uuid=uuid, numa_node=numa_node)


def _product(name: str) -> Product | None:
    """Return the product whose group is a word of the driver's name, such as NVIDIA H100 80GB."""
    nvidias = (product for product in products() if product.gfx.startswith("sm_"))
    return next((p for p in nvidias if re.search(rf"\b{p.group}\b", name, re.IGNORECASE)), None)


def _numa_node(root: Path, address: str | None) -> int | None:
    node = number(root / "sys/bus/pci/devices" / address / "numa_node") if address else None
    return node if node is not None and node >= 0 else None
