"""Test containers/lock.py and what its locks in containers/cpu/ promise."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from containers import add_ons, environment, lock
from containers.lock import LOCKS

# ---- How they are made


def test_a_lock_is_resolved_beside_earlier_ones_without_naming_a_path_of_this_machine() -> None:
    first, *rest = (lock.uv_compile(Path("uv"), name) for name in lock.CONSTRAINTS)
    assert first[-1] == "containers/cpu/requirements.in"
    assert "--constraints" not in first
    brought = {f"--no-emit-package={name}" for name in ("torch", "triton", "nvidia-nccl-cu13")}
    assert brought <= set(first)
    assert all("containers/cpu/requirements.lock" in command for command in rest)
    assert not [word for command in (first, *rest) for word in command if word.startswith("/")]
    vllm = lock.uv_compile(Path("uv"), "vllm")
    assert {"containers/cpu/dev.lock", "containers/cpu/vllm.toml"} < set(vllm)


# ---- What they promise

REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")
DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def blocks(file: Path) -> list[tuple[str, str, list[str]]]:
    """Return (name, version, digests) of each requirement: its line and those indented below."""
    entries: list[tuple[str, str, list[str]]] = []
    for line in file.read_text().splitlines():
        if match := REQUIREMENT.match(line):
            entries.append((match[1].lower(), match[2], []))
        if digest := DIGEST.search(line):
            entries[-1][2].append(digest[1])
    return entries


@pytest.mark.parametrize("name", sorted({*lock.CONSTRAINTS} - {"torch_pypi", "kernels"}))
def test_no_build_of_torch_and_nothing_of_cuda_in_the_shared_locks(name: str) -> None:
    builds = r"(nvidia|cuda)-|(pytorch-)?triton|torch$"
    assert not [name for name, _, _ in blocks(LOCKS / f"{name}.lock") if re.match(builds, name)]


@pytest.mark.parametrize("name", lock.CONSTRAINTS)
def test_lock_holds_what_its_source_asks_for(name: str) -> None:
    lines = [line.split("#")[0].strip() for line in (LOCKS / f"{name}.in").read_text().splitlines()]
    locked = {package: version for package, version, _ in blocks(LOCKS / f"{name}.lock")}
    for need in (Requirement(line) for line in lines if line):
        if (name, need.name) != ("requirements", "torch"):
            assert need.name.lower() in locked
            assert locked[need.name.lower()] in need.specifier


@pytest.mark.parametrize(
    ("one_lock", "other_lock"),
    [
        *(("requirements", name) for name in ("tools", "dev", "torch_pypi")),
        *(
            (name, add_on)
            for name in ("requirements", "tools", "dev")
            for add_on in add_ons.ADD_ONS
        ),
        ("liger", "kernels"),
        *(("vllm", name) for name in ("gguf", "lm-eval")),
    ],
)
def test_a_lock_changes_nothing_that_another_has_installed(one_lock: str, other_lock: str) -> None:
    one, other = (
        {(package, version) for package, version, _ in blocks(LOCKS / f"{name}.lock")}
        for name in (one_lock, other_lock)
    )
    names = {name for name, _ in one} & {name for name, _ in other}
    assert {pin for pin in one if pin[0] in names} == {pin for pin in other if pin[0] in names}


def test_cpu_torch_has_one_digest_for_each_python_and_machine() -> None:
    text = (LOCKS / "torch.lock").read_text()
    pattern = (
        r"# (torch-\S+\.whl)\ntorch==(\S+)\+cpu ; python_version == \"3\.(\d+)\" and "
        r"platform_machine == \"(\w+)\" \\\n"
        r"    --hash=sha256:([0-9a-f]{64})\n"
    )
    entries = re.findall(pattern, text)
    assert {(int(minor), machine) for _, _, minor, machine, _ in entries} == {
        (minor, machine) for minor in (11, 12, 13, 14) for machine in ("x86_64", "aarch64")
    }
    assert (
        len({digest for *_, digest in entries})
        == len(entries)
        == len(blocks(LOCKS / "torch.lock"))
        == 8
    )
    for wheel, version, minor, machine, _ in entries:
        assert version == environment.TORCH
        assert wheel == f"torch-{version}+cpu-cp3{minor}-cp3{minor}-manylinux_2_28_{machine}.whl"


def test_torch_is_one_version_everywhere() -> None:
    assert f"torch=={environment.TORCH}" in (LOCKS / "requirements.in").read_text().split()
    assert ("torch", environment.TORCH) in {
        (name, version) for name, version, _ in blocks(LOCKS / "torch_pypi.lock")
    }


def test_triton_is_the_one_that_torch_asks_for() -> None:
    pins = [
        {(name, version) for name, version, _ in blocks(LOCKS / f"{file}.lock")}
        for file in ("kernels", "torch_pypi")
    ]
    assert {name for name, _ in pins[0]} == {"triton", "liger-kernel"}
    assert {pin for pin in pins[0] if pin[0] == "triton"} == {
        pin for pin in pins[1] if pin[0] == "triton"
    }
    assert set(add_ons.ADD_ONS) < set(lock.CONSTRAINTS)


def test_this_environment_is_the_locked_one() -> None:
    for line in (LOCKS / "requirements.in").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            assert importlib.metadata.version(name).split("+")[0] == version
