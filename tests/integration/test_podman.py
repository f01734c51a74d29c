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
from tests.integration.conftest import PATIENCE_S, skip_without, wait_until

pytestmark = pytest.mark.integration
# podman raises limits of processes, which needs CAP_SYS_RESOURCE. A machine without it lowers them.
RUNC = """\
#!/usr/bin/env python3
import json, os, resource, sys
from pathlib import Path
if "--bundle" in sys.argv:
    file = Path(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    config = json.loads(file.read_text())
    for limit in config["process"].get("rlimits", []):
        highest = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if highest != resource.RLIM_INFINITY:
            limit["hard"], limit["soft"] = min(limit["hard"], highest), min(limit["soft"], highest)
    file.write_text(json.dumps(config))
os.execvp("runc", ["runc", *sys.argv[1:]])
"""
# podman's own networks need other packages on each distribution.
SMOKE = """
runtime=docker container=cpu smoke=true hardware=cpu runtime.network=host
""".split()


@pytest.fixture
def podman(engine, cpu_image, tmp_path) -> Iterator[docker.DockerClient]:
    """Yield a client of podman, which has the cpu image in a store of its own."""
    if shutil.which("podman") is None:
        return skip_without("no podman (Debian: apt-get install podman catatonit)")
    folder = Path(tempfile.mkdtemp(prefix="podman-"))  # podman limits its path to 50 characters
    address = f"unix://{tmp_path}/podman.sock"
    runtime = folder / "runc"
    runtime.write_text(RUNC)
    runtime.chmod(0o755)
    argv = ["podman", f"--runtime={runtime}"]
    argv += [f"--root={folder / 'store'}", f"--runroot={folder / 'run'}"]
    service = subprocess.Popen([*argv, "system", "service", "--time=0", address])
    try:
        wait_until((tmp_path / "podman.sock").exists, service)
        client = docker.DockerClient(address, timeout=PATIENCE_S)
        client.images.load(engine.images.get(cpu_image).save(named=True))
        yield client
    finally:
        service.terminate()
        service.wait()
        remove = ["sh", "-c", 'umount "$0/store/overlay"; rm -rf "$0"', str(folder)]
        subprocess.run(remove if os.getuid() == 0 else ["podman", "unshare", *remove], check=True)
    return None


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
