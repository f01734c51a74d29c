"""Test the signals that the launcher handles, and its exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config.identity import composition_hash
from launch.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    HostError,
    os_error_text,
)
from launch.core.stop_signals import STOP_SIGNALS
from launch.execution import execute
from launch.execution.supervise import Outcome
from launch.plan.planning import make_plan
from tests.conftest import composed, host_with
from tests.helpers.supervised import DONE, executed, plan_of
from tests.launch.conftest import COMMIT


@pytest.mark.usefixtures("hangups")
def test_signals_are_collected_and_the_old_handlers_restored():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with execute.signals() as received:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
    assert received == list(STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with execute.signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("status", "result", "code"), [
    ("done", "done", EXIT_DONE),
    ("done", None, EXIT_FAILED),
    ("interrupted", None, EXIT_INTERRUPTED),
    ("interrupted", "done", EXIT_DONE),  # the signal came after the run had ended
    ("failed", "interrupted", EXIT_FAILED),  # the server failed, and the ranks saved
    ("hung", "interrupted", EXIT_HUNG),
])  # fmt: skip
def test_exit_code(tmp_path, status, result, code):
    plan, outcome = plan_of(tmp_path, {"trainers": DONE}), Outcome(status, "trainers")
    assert execute.exit_code(plan, outcome, {"status": result}) == code


def test_a_server_needs_a_free_port(tmp_path):
    config = composed("hardware=mi300x", "runtime=local", "method=serve", "model=qwen3_0_6b")
    host = dataclasses.replace(host_with(8), listening=frozenset({8000, 8001}))
    plan = make_plan(config, host, tmp_path)
    with pytest.raises(HostError, match=r"^method\.args\.port=8000: .*method\.args\.port=8002"):
        execute.check_port(plan, host)
    execute.check_port(plan, host_with(8))


FILL = """
while True:
    with open(run / "filling", "ab", buffering=0) as file:
        file.write(bytes(4096))
"""
MAKE_FILES = """
for number in range(1000):
    (run / str(number)).touch()
"""
MOUNT = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


@pytest.mark.parametrize(("limit", "script"), [("size=5m", FILL), ("nr_inodes=40", MAKE_FILES)])
def test_a_run_that_fills_the_disk_is_recorded_as_failed(tmp_path, limit, script):
    mount = f"mount -t tmpfs -o {limit} tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*MOUNT, mount]).returncode:
        pytest.skip("this user cannot mount a file system")
    program = f"{sys.executable} {Path(__file__).parents[2] / 'helpers/supervised.py'}"
    run = (
        f"{program} {tmp_path}/run trainers='{script}' >&2; echo $?; cat {tmp_path}/run/record.json"
    )
    done = subprocess.run([*MOUNT, f"{mount} && {run}"], capture_output=True, text=True)
    code, _, record = done.stdout.partition("\n")
    content = json.loads(record)
    assert (code, content["status"]) == (str(EXIT_FAILED), "failed")
    assert content["failure"].splitlines()[0] in done.stderr
    assert f"{tmp_path}/run: No space left on device" in done.stderr
    assert "run_root=" in done.stderr


def test_nothing_starts_without_space_for_the_record(tmp_path):
    plan = plan_of(tmp_path, {"trainers": DONE})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            execute.execute(plan, host_with(0), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os_error_text(error.value).startswith(f"{tmp_path / execute.RESERVED}: ")
    assert not (tmp_path / "record.json").exists()
    assert executed(plan)[0] == EXIT_DONE
    assert not (tmp_path / execute.RESERVED).exists()


def test_a_run_records_the_newest_commit_of_its_model(tmp_path, hub):
    hub("HuggingFaceTB/SmolLM2-135M-Instruct")
    host = dataclasses.replace(host_with(0), python="true")
    config = composed("hardware=cpu", "model=smollm2_135m", "tracking=none")
    plan = make_plan(config, host, tmp_path / "run")
    execute.execute(plan, host, None)
    record = json.loads((plan.run_dir / "record.json").read_text())
    assert record["model"]["revision"] == record["composition"]["model"]["revision"] == COMMIT
    assert f"revision: {COMMIT}" in (plan.run_dir / "config.yaml").read_text()
    assert record["composition_hash"] == composition_hash(config)  # resume=auto finds the run
