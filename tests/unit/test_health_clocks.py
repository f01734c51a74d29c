"""Clocks of the dies of an AMD GPU, from tables as the kernel writes them."""

import struct

import pytest

from recipes.health import clocks

MI300X = [2100, 2098, 2100, 2095, 2100, 2100, 2088, 1990]


def table(version: tuple[int, int], size: int, mhz: list[int]) -> bytes:
    """Everything but the clocks is 7, which no clock is."""
    offset = clocks.OFFSETS[version]
    body = bytearray(b"\x07" * size)
    struct.pack_into("<HBB", body, 0, size, *version)
    struct.pack_into("<8H", body, offset, *mhz, *[0xFFFF] * (8 - len(mhz)))
    return bytes(body)


# Sizes of the structs up to the clocks' end and beyond, as the kernel's compiler lays them out: worked out by ctypes from the header.
@pytest.mark.parametrize(("version", "size"), [((1, 4), 288), ((1, 5), 360), ((1, 6), 312), ((1, 7), 344), ((1, 8), 344)])
def test_each_version(version, size):
    assert clocks.parse(table(version, size, MI300X)) == MI300X
    assert clocks.parse(table(version, size, MI300X[:6])) == MI300X[:6], "an MI300A has six dies"


def test_of_a_device(tmp_path):
    file = tmp_path / "bus/pci/devices/0000:05:00.0/gpu_metrics"
    file.parent.mkdir(parents=True)
    file.write_bytes(table((1, 5), 360, MI300X))
    assert clocks.of_device("0000:05:00.0", tmp_path) == MI300X
    with pytest.raises(FileNotFoundError):
        clocks.of_device("0000:26:00.0", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "gpu_metrics has 0 bytes"),
        (struct.pack("<HBB", 120, 1, 3) + bytes(116), "gpu_metrics v1.3 states no clock of each die"),
        (struct.pack("<HBB", 64, 1, 9) + bytes(60), "gpu_metrics v1.9 states no clock of each die"),
        (table((1, 5), 360, MI300X)[:320], "gpu_metrics v1.5 is cut off after 320 bytes"),
        (table((1, 4), 288, []), "gpu_metrics v1.4 states no clock"),
    ],
)
def test_a_table_that_does_not_say(content, message):
    with pytest.raises(ValueError, match=message):
        clocks.parse(content)
