"""Clocks of an AMD GPU's dies (XCDs) from the kernel's `gpu_metrics`, a binary table of its own for each version."""

from __future__ import annotations

import struct
from pathlib import Path

# Byte at which `current_gfxclk`, eight 16-bit numbers in MHz, begins: the structs gpu_metrics_v1_4 to v1_8 of Linux's
# drivers/gpu/drm/amd/include/kgd_pp_interface.h. Older tables (v1.0 to v1.3, v2, v3) are of GPUs with one die; v1.9 has no fixed places.
OFFSETS = {(1, 4): 240, (1, 5): 312, (1, 6): 264, (1, 7): 296, (1, 8): 296}
DIES = 8
ABSENT = (0, 0xFFFF)  # of a die that is not there: an MI300A has six


def of_device(address: str, sysfs: Path = Path("/sys")) -> list[int]:
    """MHz of each die of the GPU at this PCI address (`0000:05:00.0`). Raises OSError and ValueError where that cannot be known."""
    return parse((sysfs / "bus/pci/devices" / address / "gpu_metrics").read_bytes())


def parse(table: bytes) -> list[int]:
    """MHz of each die. Raises ValueError for a table that does not state them."""
    if len(table) < 4:
        raise ValueError(f"gpu_metrics has {len(table)} bytes")
    size, *version = struct.unpack_from("<HBB", table)
    name = "gpu_metrics v{}.{}".format(*version)
    offset = OFFSETS.get((version[0], version[1]))
    if offset is None:
        raise ValueError(f"{name} states no clock of each die, or not where we would know it")
    if min(size, len(table)) < offset + 2 * DIES:
        raise ValueError(f"{name} is cut off after {len(table)} bytes")
    found = [mhz for mhz in struct.unpack_from(f"<{DIES}H", table, offset) if mhz not in ABSENT]
    if not found:
        raise ValueError(f"{name} states no clock")
    return found
