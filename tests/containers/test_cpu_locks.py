"""Test containers/lock.py and the locks in containers/cpu/."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from containers import environment, lock
from containers.lock import LOCKS


def test_uv_paths_are_relative() -> None:
    for name in lock.CONSTRAINTS:
        command = lock.uv_compile(Path("uv"), name)
        assert not [word for word in command if word.startswith("/")]


# ---- The locks

REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")
DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def blocks(file: Path) -> list[tuple[str, str, list[str]]]:
    """Return (name, version, digests) of each requirement."""
    entries: list[tuple[str, str, list[str]]] = []
    for line in file.read_text().splitlines():
        if match := REQUIREMENT.match(line):
            entries.append((match[1].lower(), match[2], []))
        if digest := DIGEST.search(line):
            entries[-1][2].append(digest[1])
    return entries


def blocks_of(name: str) -> list[tuple[str, str]]:
    """Return (name, version) of each requirement of a lock."""
    return [(package, version) for package, version, _ in blocks(LOCKS / f"{name}.lock")]


@pytest.mark.parametrize("name", sorted({*lock.CONSTRAINTS} - {"torch_pypi", "kernels"}))
def test_shared_locks_have_no_torch_or_cuda(name: str) -> None:
    builds = r"(nvidia|cuda)-|(pytorch-)?triton|torch$"
    assert not [package for package, _ in blocks_of(name) if re.match(builds, package)]


@pytest.mark.parametrize("name", lock.CONSTRAINTS)
def test_lock_satisfies_its_source(name: str) -> None:
    lines = [line.split("#")[0].strip() for line in (LOCKS / f"{name}.in").read_text().splitlines()]
    locked = dict(blocks_of(name))
    for need in (Requirement(line) for line in lines if line):
        if (name, need.name) != ("requirements", "torch"):
            assert need.name.lower() in locked
            assert locked[need.name.lower()] in need.specifier


@pytest.mark.parametrize(
    ("lock_name", "other_name"),
    [
        *(("requirements", name) for name in ("tools", "dev", "torch_pypi")),
        *(
            (name, add_on)
            for name in ("requirements", "tools", "dev")
            for add_on in environment.ADD_ONS
        ),
        ("liger", "kernels"),
        *(("vllm", name) for name in ("gguf", "lm-eval")),
    ],
)
def test_locks_agree_on_versions(lock_name: str, other_name: str) -> None:
    pins, others = (set(blocks_of(name)) for name in (lock_name, other_name))
    names = {name for name, _ in pins} & {name for name, _ in others}
    assert {pin for pin in pins ^ others if pin[0] in names} == set()


def test_cpu_torch_has_digest_for_each_python_and_machine() -> None:
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


def test_torch_and_triton_versions_agree() -> None:
    of_torch, kernels = (set(blocks_of(file)) for file in ("torch_pypi", "kernels"))
    assert f"torch=={environment.TORCH}" in (LOCKS / "requirements.in").read_text().split()
    assert ("torch", environment.TORCH) in of_torch
    assert {name for name, _ in kernels} == {"triton", "liger-kernel"}
    assert {pin for pin in kernels if pin[0] == "triton"} <= of_torch
    assert set(environment.ADD_ONS) < set(lock.CONSTRAINTS)


def test_environment_has_locked_versions() -> None:
    for line in (LOCKS / "requirements.in").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            assert importlib.metadata.version(name).split("+")[0] == version
