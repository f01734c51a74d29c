"""What several tests need: the launcher called as a person calls it, and compositions without a command line."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.compose import compose
from launch.files import rundir, sealed
from launch.machine.detect import Gpu, Host
from launch.plan import composition, composition_hash
from launch.run import main
from launch.schema import Config
from launch.supervision import orphans, supervise

ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    # As launch/environment.py gives ranks on a CPU, before anything imports torch: two test processes share two cores, and threads that
    # spin while they wait made the trainings of test_resume.py take three times the CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A shell that is no terminal's starts what stands before `&` with SIGINT ignored, and every child inherits that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def launch(capfd, tmp_path, monkeypatch):
    """`launch("mode=plan", ...)` in this process, in an empty directory. For what starts no rank."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        code = main([*arguments])
        captured = capfd.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def quick_supervision(monkeypatch):
    """Looks often, and sees afterwards that no process is left."""
    monkeypatch.setattr(supervise, "POLL_S", 0.02)
    monkeypatch.setattr(supervise, "ASK_EVERY_S", 0.02)
    yield
    assert orphans.marked({orphans.LAUNCHER: orphans.launcher()}) == [], "processes are left"


@pytest.fixture
def hangups():
    """SIGHUP is heard, also where `nohup` has the tests ignore it, and so every child."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def command(*arguments: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    """`python launch/run.py ...` as a process of its own, from another directory than the repository's."""
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch/run.py"), *arguments], cwd=cwd, env=env, capture_output=True, text=True, **kwargs
    )


@functools.cache
def composed(*overrides: str) -> Config:
    """A composition; shared, so read it only."""
    return compose(list(overrides))


def leave_record(folder: Path, config: Config, status: str, **more) -> None:
    """The record of a run that stopped, with what of it decides whether, and how, the run goes on."""
    known = {"status": status, "composition": composition(config), "composition_hash": composition_hash(config)}
    rundir.write_json(folder / "record.json", sealed.seal({**dict.fromkeys(sealed.REQUIRED), **known, **more}))


def leave_model(folder: Path) -> None:
    """A model's directory as the plan reads it: Qwen3's architecture by name, and a file of weights that is whole and holds none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def host_with(num_gpus: int, gfx: str = "gfx942", **environ: str) -> Host:
    gpus = tuple(Gpu("test", gfx, 304, 206.2, "mi300x", render_minor=128 + i) for i in range(num_gpus))
    nodes = dict.fromkeys(("/dev/kfd", *(f"/dev/dri/renderD{128 + i}" for i in range(num_gpus))), 109) if num_gpus else {}
    return Host(
        python="python",
        num_cores=64,
        gpus=gpus,
        environ=environ,
        cwd="/home/me/work",
        home="/home/me",
        uid=1000,
        gid=1000,
        gids={"video": 44, "render": 109},
        member_of=(1000, 44, 109),
        device_nodes=nodes,
        sysroot="/nowhere",
    )
