"""Run the launcher with podman behind DOCKER_HOST, as the user who runs this test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.conftest import ROOT
from tests.integration.conftest import PATIENCE_S, wait_until

pytestmark = pytest.mark.integration
SMOKE = ["runtime=docker", "container=cpu", "smoke=true", "hardware=cpu", "method=grpo"]


@pytest.fixture
def podman(engine, cpu_image, tmp_path) -> Iterator[docker.DockerClient]:
    """Yield a client of podman, which has the cpu image in a store of its own."""
    if shutil.which("podman") is None:
        pytest.skip("no podman (Debian: apt-get install podman catatonit)")
    folder = Path(tempfile.mkdtemp(prefix="podman-"))  # podman limits its path to 50 characters
    address = f"unix://{tmp_path}/podman.sock"
    argv = ["podman", "--root", str(folder / "store"), "--runroot", str(folder / "run")]
    service = subprocess.Popen([*argv, "system", "service", "--time=0", address])
    try:
        wait_until((tmp_path / "podman.sock").exists, service)
        client = docker.DockerClient(address, timeout=PATIENCE_S)
        client.images.load(engine.images.get(cpu_image).save(named=True))
        try:
            client.containers.run(cpu_image, ["true"], remove=True)
        except docker.errors.APIError as error:
            pytest.skip(f"podman cannot start a container on this machine: {error.explanation}")
        yield client
    finally:
        service.terminate()
        service.wait()
        remove = ["sh", "-c", 'umount "$0/store/overlay"; rm -rf "$0"', str(folder)]
        subprocess.run(remove if os.getuid() == 0 else ["podman", "unshare", *remove], check=True)


def test_train_with_podman(podman, tmp_path):
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/podman.sock", "COLUMNS": "200"}
    folder = tmp_path / "work"
    folder.mkdir()
    argv = [sys.executable, str(ROOT / "launch/run.py"), *SMOKE]
    settings = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    plan = subprocess.run([*argv, "mode=plan"], **settings)
    assert "engine      podman" in plan.stdout, plan.stderr
    done = subprocess.run(argv, timeout=PATIENCE_S, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (path.parent for path in folder.glob("runs/*/[0-9]*/record.json"))
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    assert {path.lstat().st_uid for path in Path(folder).rglob("*")} == {os.getuid()}
    assert podman.api.containers(all=True) == []
