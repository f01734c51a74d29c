"""Stacks of processes that hang: by py-spy from outside, else by the process itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.execution import stacks
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
    return bool(
        shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    )


@pytest.mark.skipif(not has_py_spy(), reason="py-spy is not installed here")
def test_py_spy_sees_where_a_rank_stands(start, tmp_path):
    pid = start(sys.executable, "-c", WAITS.format(""), RANK="3")
    stacks.dump([pid], tmp_path)
    found = (tmp_path / f"rank3-{pid}.txt").read_text()
    if "Permission Denied" in found:
        pytest.skip(
            "this machine does not let a process look into its children (kernel.yama.ptrace_scope)"
        )
    assert "waits_here" in found
    assert found.startswith(sys.executable)


def test_without_py_spy_the_process_writes_its_own(start, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    listens, deaf = (start(sys.executable, "-c", WAITS.format(how)) for how in (LISTENS, ""))
    stacks.dump([listens, deaf], tmp_path)
    assert "py-spy is not installed" in (tmp_path / f"{listens}.txt").read_text()
    assert "no stacks: py-spy is not installed" in (tmp_path / f"{deaf}.txt").read_text()
    assert stacks._text(deaf, "stat"), "SIGUSR1 would have ended it"


def test_the_stacks_that_a_process_writes_are_in_its_log(start, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    pid = start(sys.executable, "-c", WAITS.format(LISTENS))
    stacks.dump([pid], tmp_path)
    assert eventually(lambda: "waits_here" in (tmp_path / "log").read_text())


def test_py_spy_that_fails_and_one_that_says_nothing(start, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(spy))
    pid = start(sys.executable, "-c", WAITS.format(""))
    for script, told in (
        ("echo no leave >&2; exit 1", "no stacks: no leave"),
        ("exit 4", "no stacks: py-spy ended with 4"),
    ):
        spy.write_text(f"#!/bin/sh\n{script}\n")
        spy.chmod(0o755)
        stacks.dump([pid], tmp_path)
        assert told in (tmp_path / f"{pid}.txt").read_text()
    monkeypatch.setattr(stacks, "WITHIN_S", 0.1)
    spy.write_text("#!/bin/sh\nexec sleep 30\n")
    stacks.dump([pid], tmp_path)
    assert "no stacks: py-spy had no answer in 0.1 s" in (tmp_path / f"{pid}.txt").read_text()


def test_only_python_processes_and_only_those_that_are_there(start, tmp_path):
    shell = start("/bin/sh", "-c", "echo up; read line")
    folder = tmp_path / "stacks"
    folder.mkdir()
    stacks.dump([shell, 2**22 + 1], folder)
    assert list(folder.iterdir()) == []
