"""Read the clocks of an AMD GPU's dies (XCDs) from the kernel's binary table `gpu_metrics`."""

from __future__ import annotations

import struct
from pathlib import Path

# Table version -> first byte of `current_gfxclk`, eight 16-bit numbers in MHz. Source:
# gpu_metrics_v1_4 to v1_8 in Linux's drivers/gpu/drm/amd/include/kgd_pp_interface.h. Tables v1.0 to
# v1.3, v2 and v3 are for GPUs with one die; v1.9 has no fixed offsets.
OFFSETS = {(1, 4): 240, (1, 5): 312, (1, 6): 264, (1, 7): 296, (1, 8): 296}
DIES = 8
ABSENT = (0, 0xFFFF)  # values of a missing die; an MI300A has only six dies


def die_clocks(address: str, sysfs: Path = Path("/sys")) -> list[int]:
    """Return the MHz of each die of the GPU at a PCI address. Raises OSError, ValueError."""
    return parse((sysfs / "bus/pci/devices" / address / "gpu_metrics").read_bytes())


def parse(table: bytes) -> list[int]:
    """Return the MHz of each die. Raises ValueError if the table does not contain them."""
    size, *version = struct.unpack_from("<HBB", table.ljust(4, b"\0"))
    offset = OFFSETS.get(tuple(version))
    dies = []
    if offset is not None and offset + 2 * DIES <= min(size, len(table)):
        clocks = struct.unpack_from(f"<{DIES}H", table, offset)
        dies = [mhz for mhz in clocks if mhz not in ABSENT]
    if not dies:
        name = "gpu_metrics v{}.{}".format(*version)
        raise ValueError(f"{name} of {len(table)} bytes does not contain the clocks of dies")
    return dies
