"""Run the cpu image with docker and Apptainer on two virtual nodes, and with Apptainer alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launch.core import json_files
from launch.execution import orphans
from tests.conftest import command
from tests.integration.conftest import PATIENCE_S, started, wait_until
from tests.integration.test_slurm import SMALL, STEPS, TWO_NODES, cluster, newest

pytestmark = pytest.mark.integration
__all__ = ["cluster"]  # a fixture
APPTAINER = ["runtime=apptainer", "container=cpu"]
LONG = """
hardware.gpus_per_node=2 data.num_train=24000 method.args.max_steps=3000
method.args.save_steps=1000 runtime.stop_timeout_s=60
""".split()


@pytest.mark.parametrize("container", ["docker", "apptainer"])
@pytest.mark.usefixtures("apptainer", "cpu_image")
def test_two_nodes_train_in_the_same_image(cluster, tmp_path, container, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sentinel")
    image = [f"runtime.slurm.container={container}", "container=cpu"]
    overrides = [*TWO_NODES, *SMALL, *image, "runtime.secrets=[MY_TOKEN]"]
    done = command(*overrides, "runtime.slurm.wait=true", cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.log()
    run_dir = newest(tmp_path)
    assert len(json_files.read_metrics(run_dir / "metrics.jsonl")) == STEPS
    record = json_files.read_json(run_dir / "record.json")
    assert record["image"]["labels"]["image"] == "cpu"
    assert secrets() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
@pytest.mark.usefixtures("apptainer", "cpu_image")
def test_apptainer_saves_when_its_launcher_ends(tmp_path, number, code):
    launcher = started(*APPTAINER, *SMALL, *LONG, cwd=tmp_path)
    wait_until(lambda: any(tmp_path.glob("runs/*/[0-9]*/metrics.jsonl")), launcher)
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE_S) == code
    wait_until(lambda: not processes(tmp_path))
    assert len(checkpoints(tmp_path)) == 1
    (record,) = map(json_files.read_json, tmp_path.glob("runs/*/[0-9]*/record.json"))
    assert record["image"]["labels"]["image"] == "cpu"
    assert Path(record["image"]["id"]).suffix == ".sif"
    assert {path.lstat().st_uid for path in tmp_path.rglob("*")} == {os.getuid()}


def checkpoints(folder: Path) -> list[int]:
    paths = folder.glob("runs/*/[0-9]*/checkpoints/checkpoint-*[0-9]")
    return [int(path.name.rpartition("-")[2]) for path in paths]


def processes(folder: Path) -> list[int]:
    return [pid for pid in orphans.marked({}) if str(folder) in command_line(pid)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the process has just ended
        return ""


def secrets() -> list[Path]:
    base = Path(os.environ.get("XDG_RUNTIME_DIR", "/dev/shm"))
    return list(base.glob(f"rocm-recipes-{os.getuid()}/*/MY_TOKEN"))
