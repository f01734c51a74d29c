"""Test the sandbox in a plan: what its container is given, and no other process is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from containers.sandbox import server
from launch.core.errors import HostError
from launch.execution import execute, record, sandboxed
from launch.plan.container import sdk_arguments
from launch.plan.planning import make_plan
from launch.plan.views import as_json
from tests.conftest import composed, host_with

RUN = Path("/runs/code/1")
CODE = [
    "hardware=mi300x",
    "method=grpo",
    "model=qwen3_4b",
    "data=code",
    "~method.rewards.reasoning_gym",
    "+method.rewards.code_tests=1.0",
]


def plan(*overrides: str):
    return make_plan(composed(*CODE, *overrides), host_with(8), RUN)


@pytest.mark.parametrize("runtime", ["local", "docker"])
def test_it_starts_first_and_is_confined_under_every_runtime(runtime):
    made = plan(f"runtime={runtime}", "method.sandbox.memory_gb=0.4", "method.sandbox.processes=32")
    assert [p.kind for p in made.processes] == ["verifier", "server", "trainer"]
    shown = as_json(made)["processes"][0]
    assert (shown["name"], shown["argv"][2:], shown["env"], shown["gpus"]) == (
        "sandbox",
        ["10", "400000000", "64000", "64000000"],
        {},
        [],
    )
    given = shown["container"]
    assert given["image"].startswith("rocm-recipes/sandbox:")
    assert {
        key: given[key]
        for key in (
            "user",
            "network",
            "ipc",
            "read_only",
            "pids",
            "cap_drop",
            "cap_add",
            "security_opt",
        )
    } == {
        "user": "65534:65534",
        "network": "none",
        "ipc": "none",
        "read_only": True,
        "pids": 32,
        "cap_drop": ["ALL"],
        "cap_add": [],
        "security_opt": ["no-new-privileges:true"],
    }
    assert [given[key] for key in ("mounts", "devices", "groups", "secrets", "nvidia_gpus")] == [
        [],
        [],
        [],
        [],
        [],
    ]
    host = sdk_arguments(made.containers["sandbox"])["host"]
    assert (host["mem_limit"], host["memswap_limit"]) == (500_000_000, 500_000_000)
    assert (host["init"], host["read_only"], host["auto_remove"], host["network_mode"]) == (
        False,
        True,
        True,
        "none",
    )
    assert list(host["tmpfs"]) == ["/tmp"]


def test_no_container_sees_the_engines_socket():
    made = plan("runtime=docker")
    sources = [mount.source for spec in made.containers.values() for mount in spec.mounts]
    assert len(made.containers) == 3
    # Nor a directory above it, which would show it all the same.
    sockets = [Path("/var/run/docker.sock"), Path("/run/docker.sock")]
    assert [s for s in sources if any(socket.is_relative_to(s) for socket in sockets)] == []


def test_without_the_reward_there_is_none():
    made = make_plan(
        composed("hardware=mi300x", "method=grpo", "model=qwen3_4b", "runtime=local"),
        host_with(8),
        RUN,
    )
    assert ([p.kind for p in made.processes], made.containers) == (["server", "trainer"], {})


def test_without_an_engine_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(
        HostError,
        match=r"No docker engine answers(?s:.*)code_tests runs code in containers",
    ):
        execute.check_sandbox(plan("runtime=local"), host_with(8))


def test_ranks_and_the_record_know_the_image_that_code_runs_in(tmp_path):
    made, host = make_plan(composed(*CODE, "runtime=local"), host_with(8), tmp_path), host_with(8)
    execute.write_inputs(made, "sha256:1")
    assert OmegaConf.load(tmp_path / "config.yaml").sandbox_image == "sha256:1"
    assert record.begin(made, host, None, None, "sha256:1")["sandbox_image"] == "sha256:1"


def test_an_answer_that_no_float_holds_is_wrong_and_no_end_of_the_server(monkeypatch):
    monkeypatch.setattr(server, "run", lambda *arguments: b'{"value": 1' + b"0" * 400 + b"}")
    with pytest.raises(server.Wrong):
        server.passes({"call": "f(1)", "expected": 1.5}, "", None, 0.0, server.Limits(1.0, 1, 1, 1))


class FakeContainer:
    """Says that it is ready, and then nothing until it is removed."""

    def __init__(self) -> None:
        self.removed = threading.Event()

    def attach_socket(self, params):
        self._sock = self
        return self

    def sendall(self, job):
        pass

    def start(self):
        pass

    def remove(self, force):
        self.removed.set()


@pytest.mark.parametrize("while_it_is_made", [False, True])
def test_a_container_is_not_replaced_after_the_run_has_ended(
    monkeypatch, tmp_path, while_it_is_made
):
    """Nobody would remove a container that is made after the run has ended."""
    made = []

    def create(client, spec, image, host):
        made.append(FakeContainer())
        if len(made) > 1:
            worker.close()
        return made[-1]

    def frames(stream, tty):
        yield sandboxed.STDOUT, b'{"languages": ["python"]}\n'
        stream.removed.wait(5)

    monkeypatch.setattr(sandboxed.engine, "create", create)
    monkeypatch.setattr(sandboxed, "frames_iter", frames)
    worker = sandboxed.Worker(
        None, plan().containers["sandbox"], "image", host_with(8), tmp_path / "log", 5.0
    )
    threading.Timer(0.05, worker.end if while_it_is_made else worker.close).start()
    began = time.monotonic()
    assert worker.run({"tests": [1]})["error"] == sandboxed.WENT
    assert time.monotonic() - began < 4
    assert [container.removed.is_set() for container in made] == [True] * (1 + while_it_is_made)
