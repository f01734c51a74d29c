"""Test topology=split in containers, with vLLM for the CPU: kill the server, then the trainers.

The packages of `make vllm` are mounted, because an image with them takes minutes to build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import docker
import pytest

from containers import images
from containers.images import LABEL
from containers.pip_settings import pip_options, uv_settings
from launch.core import json_files
from launch.inputs import paths
from launch.machine import detect
from tests.integration.conftest import PATIENCE_S, inside, skip_without, started, wait_until
from tests.integration.test_split import KILLED, SMALL, only_run, prepared

pytestmark = pytest.mark.integration

IMAGE = "rocm-recipes-test/cpu-vllm"
# Debian's base has no libnuma, which vLLM's build for the CPU needs. The host has the same release.
NUMA = Path("/usr/lib/x86_64-linux-gnu/libnuma.so.1")
# Containers start the program `vllm`. Compiling would need a C++ compiler.
SPLIT = f"""
runtime=docker container=custom container.reference={IMAGE} user_env.TORCHDYNAMO_DISABLE=1
topology=split hardware.vllm=true topology.server_max_length=256 model.num_layers=2
hardware.gpus_per_node=2 topology.num_gpus=2 method.args.save_steps=2 method.args.max_steps=6
method.args.max_completion_length=16
""".split()
HELD = [override.replace("faults.reward", "faults.held") for override in SMALL]


@pytest.fixture(scope="module")
def vllm_packages(engine, cpu_image) -> Path:
    """Return a folder with the packages of `make vllm` for the Python of the cpu image."""
    version = "import sys; print(*sys.version_info[:2], sep='.')"
    python = inside(engine, cpu_image, "python3", "-c", version).strip()
    lock = images.FOLDER / "cpu/vllm.lock"
    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    folder = (
        paths.cache_dir(detect.host(sys.executable)) / f"rocm-recipes/tests/vllm-{python}-{key}"
    )
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        # uv has the wheels of `make vllm` in its cache.
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
        uv += ["--only-binary=:all:", "--index-strategy=unsafe-best-match"]
        uv += [f"--python-version={python}", f"--target={unfinished}", "-r", str(lock)]
        env = {**uv_settings(pip_options()), **os.environ}
        subprocess.run(uv, env=env, check=True)
        unfinished.rename(folder)
    return folder


@pytest.fixture
def image(engine, cpu_image, remove, tmp_path) -> None:
    """Add libnuma and the program `vllm` to the cpu image."""
    if not NUMA.exists():
        skip_without("no libnuma (Debian, Ubuntu: apt-get install libnuma1)")
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / NUMA.name).write_bytes(NUMA.read_bytes())
    (folder / "vllm").write_text('#!/bin/sh\nexec python3 -m vllm.entrypoints.cli.main "$@"\n')
    (folder / "vllm").chmod(0o755)
    (folder / "Dockerfile").write_text(
        f"FROM {cpu_image}\nCOPY {NUMA.name} {NUMA.parent}/\nCOPY vllm /usr/local/bin/\n"
    )
    engine.images.build(path=str(folder), tag=IMAGE, rm=True, forcerm=True, network_mode="none")
    remove.append(IMAGE)


def containers(engine, run: Path) -> dict[str, docker.models.containers.Container]:
    """Return the containers of a run in any state, by process."""
    found = engine.containers.list(
        all=True, filters={"label": f"{LABEL}.run={run}"}, ignore_removed=True
    )
    return {container.labels[f"{LABEL}.process"]: container for container in found}


def kill_after(
    engine, folder: Path, overrides: list[str], process: str, step: int
) -> tuple[int, str]:
    """Kill a container of a new run while the trainers hold; return the exit code and output."""
    (folder / "hold").write_text(str(step))
    launcher = started(*overrides, cwd=folder)
    try:
        line = f"holding after step {step}"
        wait_until(lambda: line in (folder / "output").read_text(), launcher)
        containers(engine, only_run(folder))[process].kill()
        if process == "trainers":
            (folder / "hold").write_text("")
        code = launcher.wait(PATIENCE_S)
    finally:
        launcher.kill()
        launcher.wait()
        for container in containers(engine, only_run(folder)).values():
            container.remove(force=True)
            pytest.fail(f"{container.name} was left")
    return code, (folder / "output").read_text()


def steps(folder: Path) -> list[int]:
    return [
        row["step"]
        for file in folder.glob("runs/*/[0-9]*/metrics.jsonl")
        for row in json_files.read_metrics(file)
    ]


@pytest.mark.usefixtures("image")
def test_kills_of_server_and_trainers(engine, vllm_packages, tmp_path):
    folder = prepared(tmp_path / "work")
    overrides = [*HELD, *SPLIT, f"user_env.PYTHONPATH={vllm_packages}"]

    code, output = kill_after(engine, folder, overrides, "server", step=2)
    run = only_run(folder)
    record = json.loads((run / "record.json").read_text())
    assert (code, record["status"], record["exit_code"]) == (4, "failed", 4), output
    assert f"server {KILLED}" in output
    assert "trainers failed" not in output
    # The trainers outlived the server, finished their step and saved it.
    assert steps(folder) == [1, 2, 3]
    assert (run / "checkpoints/checkpoint-3").is_dir()

    restarting = [*overrides, "runtime.max_restarts=1"]
    code, output = kill_after(engine, folder, restarting, "trainers", step=4)
    assert code == 0, output
    assert f"trainers {KILLED}" in output
    starts = output.split("restart 1 of 1")
    resumed = [re.findall(rf"resuming from {run}/checkpoints/(.*)", start)[:1] for start in starts]
    assert resumed == [["checkpoint-3"], ["checkpoint-4"]], output
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["restarts"]) == ("done", 1)
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
