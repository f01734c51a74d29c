"""Call the launcher as a user does, compose configurations, and write run directories."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.config.compose import compose
from launch.config.identity import composition, composition_hash
from launch.core import json_files
from launch.execution import orphans, supervise
from launch.machine.detect import Gpu, Host
from launch.plan import sealed
from launch.run import main
from launch.schema import Config

ROOT = Path(__file__).parents[1]
# config.json of model=tiny
TINY = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def pytest_configure() -> None:
    # launch/plan/process_env.py does the same for ranks on a CPU. It must precede the import of
    # torch. Two test processes share two cores, and spinning threads tripled the CPU time of
    # test_resume.py.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Background jobs of a shell without a terminal ignore SIGINT, and so do their children.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def launch(capfd, tmp_path, monkeypatch):
    """Return launch("mode=plan", ...), which runs in this process and in an empty directory.

    It must not start ranks.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        code = main([*arguments])
        captured = capfd.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def quick_supervision(monkeypatch):
    """Poll often, and check afterwards that all processes have ended."""
    monkeypatch.setattr(supervise, "POLL_S", 0.02)
    monkeypatch.setattr(supervise, "QUERY_EVERY_S", 0.02)
    yield
    assert orphans.marked({orphans.LAUNCHER: orphans.launcher()}) == [], "processes still run"


@pytest.fixture
def hangups():
    """Let SIGHUP end processes, even if `nohup` makes the tests and their children ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def command(*arguments: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    """Run `python launch/run.py ...` in a separate process and in `cwd`."""
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch/run.py"), *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        **kwargs,
    )


@functools.cache
def composed(*overrides: str) -> Config:
    """Return a composition. It is cached, so do not modify it."""
    return compose(list(overrides))


def leave_record(folder: Path, config: Config, status: str, **more) -> None:
    """Write a run's record with the fields that decide how it resumes."""
    fields = {
        "status": status,
        "composition": composition(config),
        "composition_hash": composition_hash(config),
    }
    json_files.write_json(
        folder / "record.json", sealed.seal({**dict.fromkeys(sealed.REQUIRED), **fields, **more})
    )


def leave_model(folder: Path) -> None:
    """Write a model directory that plans accept: model=tiny with an empty weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def host_with(num_gpus: int, gfx: str = "gfx942", **environ: str) -> Host:
    gpus = tuple(
        Gpu("test", gfx, 304, 206.2, "mi300x", render_minor=128 + i) for i in range(num_gpus)
    )
    nodes = (
        dict.fromkeys(("/dev/kfd", *(f"/dev/dri/renderD{128 + i}" for i in range(num_gpus))), 109)
        if num_gpus
        else {}
    )
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
