"""Test reading the clocks of an AMD GPU's dies from the kernel's tables."""

import struct

import pytest

from recipes.measure import clocks

MI300X = [2100, 2098, 2100, 2095, 2100, 2100, 2088, 1990]


def table(version: tuple[int, int], size: int, mhz: list[int]) -> bytes:
    """Return a table whose bytes are 7 except for the clocks."""
    offset = clocks.OFFSETS[version]
    body = bytearray(b"\x07" * size)
    struct.pack_into("<HBB", body, 0, size, *version)
    struct.pack_into("<8H", body, offset, *mhz, *[0xFFFF] * (8 - len(mhz)))
    return bytes(body)


# Sizes of the kernel's structs, computed by ctypes from the header.
@pytest.mark.parametrize(
    ("version", "size"), [((1, 4), 288), ((1, 5), 360), ((1, 6), 312), ((1, 7), 344), ((1, 8), 344)]
)
def test_clocks_of_each_version(version, size):
    assert clocks.parse(table(version, size, MI300X)) == MI300X
    assert clocks.parse(table(version, size, MI300X[:6])) == MI300X[:6], "an MI300A has six dies"


@pytest.mark.parametrize("content", [
    b"",
    struct.pack("<HBB", 120, 1, 3) + bytes(116),  # of one die
    table((1, 5), 360, MI300X)[:320],  # cut off
    table((1, 4), 288, []),  # no die
])  # fmt: skip
def test_tables_without_clocks_are_rejected(content):
    with pytest.raises(ValueError, match=f"of {len(content)} bytes"):
        clocks.parse(content)
