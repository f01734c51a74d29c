"""Test stacks of hung processes, from py-spy or from the process itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.execution import orphans, stacks
from tests.helpers.supervised import eventually

WAITS = (
    "import faulthandler, signal, time\n{}\ndef waits_here():\n    print('up', flush=True)\n  "
    "  while True: time.sleep(1)\nwaits_here()"
)
LISTENS = "faulthandler.register(signal.SIGUSR1)"


@pytest.fixture
def start(tmp_path):
    children = []

    def call(*argv: str, **environ: str) -> int:
        log = (tmp_path / "log").open("w")
        children.append(
            subprocess.Popen(
                argv, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=log
            )
        )
        assert children[-1].stdout.readline() == b"up\n"
        return children[-1].pid

    yield call
    for child in children:
        child.kill()
        child.communicate()


def has_py_spy() -> bool:
    here = str(Path(sys.executable).parent)
    return bool(shutil.which("py-spy") or shutil.which("py-spy", path=here))


@pytest.mark.skipif(not has_py_spy(), reason="py-spy is not installed here")
def test_py_spy_shows_where_a_rank_waits(start, tmp_path):
    pid = start(sys.executable, "-c", WAITS.format(""), RANK="3")
    stacks.dump([pid], tmp_path)
    text = (tmp_path / f"rank3-{pid}.txt").read_text()
    if "Permission Denied" in text:
        pytest.skip("kernel.yama.ptrace_scope closes children to their parent here")
    assert "waits_here" in text
    assert text.startswith(sys.executable)


@pytest.mark.parametrize(("script", "reason"), [
    (None, "py-spy is not installed"),
    ("echo no leave >&2; exit 1", "no leave"),
    ("exec sleep 30", "py-spy did not answer"),
])  # fmt: skip
def test_without_py_spy_the_process_prints_its_stacks_into_its_log(
    start, tmp_path, monkeypatch, script, reason
):
    (spy := tmp_path / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
    spy.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(spy) if script else None)
    monkeypatch.setattr(stacks, "TIMEOUT_S", 0.5)
    deaf, listens = (start(sys.executable, "-c", WAITS.format(how)) for how in ("", LISTENS))
    stacks.dump([listens, deaf], tmp_path)
    text = (tmp_path / f"{listens}.txt").read_text()
    assert reason in text
    assert "so the stacks" in text
    assert eventually(lambda: "waits_here" in (tmp_path / "log").read_text())
    assert f"no stacks: {reason}" in (tmp_path / f"{deaf}.txt").read_text()
    assert orphans.identity(deaf), "SIGUSR1 would have ended it"
