"""Test how the launcher recognizes a container that somebody else started."""

from __future__ import annotations

import pytest

from launch.machine import inside


@pytest.mark.parametrize(("files", "environ", "is_container", "is_rented"), [
    ("dev/kfd", {}, False, False),
    ("dev/kfd .dockerenv", {}, True, True),
    ("dev/kfd run/.containerenv", {}, True, True),
    ("dev/kfd proc/1/cgroup", {}, True, True),
    ("dev/kfd", {inside.POD: "10.0.0.1"}, True, True),
    ("dev/kfd .dockerenv var/run/docker.sock", {}, True, False),
    ("dev/kfd .dockerenv", {inside.DOCKER_HOST: "tcp://host:2375"}, True, False),
    (".dockerenv", {}, True, False),  # plans for machines with AMD GPUs stay the same
])  # fmt: skip
def test_containers(tmp_path, files, environ, is_container, is_rented):
    for file in map(tmp_path.joinpath, ["proc/1/cgroup", *files.split()]):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("0::/init.scope\n")
    if "cgroup" in files:
        (tmp_path / "proc/1/cgroup").write_text("0::/kubepods.slice/kubepods-pod1.slice\n")
    assert inside.container(environ, tmp_path) == is_container
    assert inside.rented(environ, tmp_path) == is_rented
