"""Test probe.py, and how build.py compares its output with the lock."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from containers import build
from containers.install import PackagesError
from tests.helpers.build_examples import FOUND, IMAGE, OPEN

ROOT = Path(__file__).parents[2]


# ---- The lock and the image


@pytest.mark.parametrize(("stated", "actual", "match"), [
    ("rocm 7.2.3", "7.2.53211", True),  # compare major and minor
    ("rocm 7.2", "7.14.0", False),
    ("2.13", "2.13.5+rocm7.2", True),
    ("2.13", "2.1.3", False),
    ("2.13.0", "2.13.0+cpu", True),
    ("2.13.0", "2.13.1", False),
    ("2.7.0", "2.7.0a0+gitf717b2a", True),
    ("2.13.0+cpu", "2.13.0+rocm7.2", False),
    ("3.1", "3.12.13", False),
    ("2.13", "unreadable", False),
])  # fmt: skip
def test_version_matches_release(stated, actual, match):
    field, _, version = stated.rpartition(" ")
    assert build.matches(field or "torch", version, actual) is match


@pytest.mark.parametrize(
    ("image", "change", "wrong", "notes"),
    [
        ({}, {}, [], []),
        ({}, {"torch": "2.12.0"}, ["torch: the lock says 2.13, the image has 2.12.0"], []),
        ({}, {"torch": None}, ["torch: the lock says 2.13, the image has none"], []),
        (
            {},
            {"gfx": "gfx942"},
            ["gfx: the lock says gfx90a gfx942, the image has gfx942"],
            [],
        ),
        ({}, {"gfx": ""}, ["gfx: the lock says gfx90a gfx942, the image has none"], []),
        ({}, {"rccl": "2.30.4"}, ["rccl: the lock says 2.27.7, the image has 2.30.4"], []),
        ({}, {"aiter": None}, ["aiter: the lock says 0.1.23, the image has none"], []),
        ({"gfx": ["cpu"]}, {"gfx": ""}, [], []),
        ({"vllm": "none"}, {}, ["vllm: the lock says none, the image has 0.31.0+rocm723"], []),
        ({"vllm": "none"}, {"vllm": None}, [], []),
        (
            {"torch": "unknown"},
            {},
            [],
            ["note: torch: the lock says unknown, the image has 2.13.0+rocm7.2"],
        ),
    ],
)
def test_report_all_differences(image, change, wrong, notes, capsys):
    image, probed = dataclasses.replace(IMAGE, **image), {**FOUND, **change}
    if not wrong:
        build.compare(image, probed)
        assert capsys.readouterr().out.splitlines() == notes
        return
    with pytest.raises(PackagesError) as error:
        build.compare(image, probed)
    assert str(error.value).splitlines()[1:-1] == [f"  {line}" for line in wrong]


def test_only_python_may_differ_from_the_lock_of_an_unverified_base(capsys):
    probed = {**FOUND, "python": "3.11.2"}
    build.compare(OPEN, probed)
    assert capsys.readouterr().out.startswith("note: python: ")
    with pytest.raises(PackagesError, match=r"contradicts the image mine:\n  python: "):
        build.compare(IMAGE, probed)


# ---- The probe


def test_probe_prints_one_line():
    done = subprocess.run(
        [sys.executable, ROOT / "containers/probe.py"], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    probed = json.loads(line)
    assert probed.keys() <= FOUND.keys()
    assert probed["gfx"] == ""
    assert probed["python"] == ".".join(map(str, sys.version_info[:3]))
