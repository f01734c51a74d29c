"""Run the launcher with podman behind DOCKER_HOST, rootful and rootless."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import psutil
import pytest

from tests.conftest import ROOT
from tests.integration.conftest import PATIENCE_S, skip_without, wait_until
from tests.integration.users import UID, Caller

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
# Start podman as a user without privileges, whose name and subordinate ids only this process sees.
# In a pid namespace, the process that podman leaves for later commands ends with the service.
ROOTLESS = """
folder=$0 uid=$1
shift
for name in passwd subuid subgid; do mount --bind "$folder/$name" "/etc/$name"; done
cd "$folder"
export HOME="$folder" XDG_RUNTIME_DIR="$folder"
exec setpriv --reuid="$uid" --regid="$uid" --clear-groups "$@"
"""
# podman's own networks need other packages on each distribution.
SMOKE = """
runtime=docker container=cpu smoke=true hardware=cpu method=grpo runtime.network=host
""".split()


def open_folder(prefix: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    return folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for podman, which limits its path to 50 characters."""
    if shutil.which("podman") is None:
        skip_without("no podman (Debian: apt-get install podman catatonit)")
    folder = open_folder("podman-")
    yield folder
    remove = ["sh", "-c", 'umount "$0/store/overlay"; rm -rf "$0"', str(folder)]
    subprocess.run(remove if os.getuid() == 0 else ["podman", "unshare", *remove], check=True)


@contextlib.contextmanager
def service(folder: Path, engine, cpu_image: str, *prefix: str) -> Iterator[docker.DockerClient]:
    """Yield a client of podman, which has the cpu image in a store of its own."""
    address, runtime = f"unix://{folder}/podman.sock", folder / "limited-runc"
    runtime.write_text(RUNC)
    runtime.chmod(0o755)
    argv = [*prefix, "podman", f"--runtime={runtime}", "--storage-driver=overlay"]
    argv += [f"--root={folder / 'store'}", f"--runroot={folder / 'run'}"]
    process = subprocess.Popen([*argv, "system", "service", "--time=0", address])
    try:
        wait_until((folder / "podman.sock").exists, process)
        client = docker.DockerClient(address, timeout=PATIENCE_S)
        client.images.load(engine.images.get(cpu_image).save(named=True))
        yield client
    finally:
        children = psutil.Process(process.pid).children()  # of unshare, which blocks SIGTERM
        for each in (*children, process):
            each.kill()
        process.wait()


def test_train_with_podman(folder, engine, cpu_image, tmp_path):
    argv = [sys.executable, str(ROOT / "launch/run.py"), *SMOKE]
    env = {**os.environ, "DOCKER_HOST": f"unix://{folder}/podman.sock", "COLUMNS": "200"}
    settings = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    with service(folder, engine, cpu_image) as podman:
        plan = subprocess.run([*argv, "mode=plan"], **settings)
        done = subprocess.run(argv, timeout=PATIENCE_S, **settings)
        check(podman, plan, done, tmp_path, os.getuid())


def test_train_with_rootless_podman(folder, engine, cpu_image):
    if os.getuid() != 0:
        pytest.skip("podman of another user than root is rootless in the test above")
    if shutil.which("newuidmap") is None:
        skip_without("no newuidmap (Debian: apt-get install uidmap)")
    names = f"{Path('/etc/passwd').read_text()}caller:x:{UID}:{UID}::/:/bin/sh\n"
    ids = f"caller:{1 << 20}:65536\n"
    for name, text in {"passwd": names, "subuid": ids, "subgid": ids}.items():
        (folder / name).write_text(text)
    os.chown(folder, UID, UID)
    namespaces = "unshare --mount --pid --fork --mount-proc".split()
    prefix = [*namespaces, "sh", "-ec", ROOTLESS, str(folder), str(UID)]
    mapped = subprocess.run([*prefix, "podman", "unshare", "true"], capture_output=True, text=True)
    if mapped.returncode:  # not a missing requirement, so it does not fail in CI
        pytest.skip(f"this machine has no user namespace for rootless podman: {mapped.stderr}")
    with service(folder, engine, cpu_image, *prefix) as podman:
        try:
            podman.containers.run(cpu_image, ["true"], remove=True, network_mode="host")
        except docker.errors.DockerException as error:
            pytest.skip(f"rootless podman starts no container on this machine: {error}")
        caller = Caller(open_folder("caller-"), open_folder("cache-"), podman)
        try:
            address = {"DOCKER_HOST": f"unix://{folder}/podman.sock"}
            plan, done = caller.run(*SMOKE, "mode=plan", **address), caller.run(*SMOKE, **address)
            check(podman, plan, done, caller.home, UID)
        finally:
            caller.leave()
            shutil.rmtree(caller.cache)


def check(podman, plan, done, folder: Path, uid: int) -> None:
    """Check the engine in a plan, the result of the run, its files, and that nothing is left."""
    (line,) = (line for line in plan.stdout.splitlines() if "engine      podman" in line)
    assert ("rootless" in line) == (uid != 0)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (path.parent for path in folder.glob("runs/*/[0-9]*/record.json"))
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    assert {path.lstat().st_uid for path in folder.rglob("*")} == {uid}
    assert podman.api.containers(all=True) == []
