"""Test the sandbox in a plan, and that only its container can run code."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from launch.core.errors import HostError
from launch.execution import execute, sandboxed
from launch.plan.container import sdk_arguments
from launch.plan.planning import make_plan
from launch.plan.views import as_json
from tests.conftest import composed, host_with

RUN = Path("/runs/code/1")
CODE = (
    "hardware=mi300x method=grpo model=qwen3_4b data=code ~method.rewards.reasoning_gym "
    "+method.rewards.code_tests=1.0"
).split()


def plan(*overrides: str):
    return make_plan(composed(*CODE, *overrides), host_with(8), RUN)


@pytest.mark.parametrize("runtime", ["local", "docker"])
def test_it_starts_first_and_is_confined_with_every_runtime(runtime):
    sandboxed_plan = plan(
        f"runtime={runtime}", "method.sandbox.memory_gb=0.4", "method.sandbox.processes=32"
    )
    kinds = ["verifier", *["pause"] * (runtime == "docker"), "server", "trainer"]
    assert [p.kind for p in sandboxed_plan.processes] == kinds
    process = as_json(sandboxed_plan)["processes"][0]
    assert process["name"] == "sandbox"
    assert process["argv"][2:] == ["10", "400000000", "64000", "64000000"]
    assert (process["env"], process["gpus"]) == ({}, [])
    confined = {
        "user": "65534:65534",
        "network": "none",
        "ipc": "none",
        "read_only": True,
        "pids": 32,
        "cap_drop": ["ALL"],
        "cap_add": [],
        "security_opt": ["no-new-privileges:true"],
        **dict.fromkeys(("mounts", "devices", "groups", "secrets", "nvidia_gpus"), []),
    }
    container = process["container"]
    assert container["image"].startswith("rocm-recipes/sandbox:")
    assert {key: container[key] for key in confined} == confined
    host = sdk_arguments(sandboxed_plan.containers["sandbox"])["host"]
    assert (host["mem_limit"], host["memswap_limit"]) == (500_000_000, 500_000_000)
    assert (host["init"], host["read_only"], host["network_mode"]) == (False, True, "none")
    assert (host["auto_remove"], list(host["tmpfs"])) == (True, ["/tmp"])
    # No other container may see the engine's socket, or a directory above it.
    mounts = [m.source for spec in sandboxed_plan.containers.values() for m in spec.mounts]
    sockets = [Path("/var/run/docker.sock"), Path("/run/docker.sock")]
    assert [m for m in mounts if any(socket.is_relative_to(m) for socket in sockets)] == []


def test_without_the_reward_there_is_no_sandbox():
    config = composed("hardware=mi300x", "method=grpo", "model=qwen3_4b", "runtime=local")
    assert make_plan(config, host_with(8), RUN).containers == {}


def test_without_an_engine_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(HostError, match=r"code_tests"):
        execute.check_sandbox(plan("runtime=local"), host_with(8))


class FakeContainer:
    """A container that reports that it is ready and then writes nothing."""

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


@pytest.mark.parametrize("during_creation", [False, True])
def test_a_container_is_not_replaced_after_the_run_has_ended(
    monkeypatch, tmp_path, during_creation
):
    """Nothing would remove a container that is created later."""
    made = []

    def create(client, spec, image, host):
        made.append(FakeContainer())
        if len(made) > 1:
            worker.close()
        return made[-1]

    def frames(stream, tty):
        yield sandboxed.STDOUT, b'{"languages": ["python"]}\n'
        stream.removed.wait(5)

    monkeypatch.setattr(sandboxed.docker_engine, "create", create)
    monkeypatch.setattr(sandboxed, "frames_iter", frames)
    worker = sandboxed.Worker(
        None, plan().containers["sandbox"], "image", host_with(8), tmp_path / "log", 5.0
    )
    threading.Timer(0.05, worker.kill if during_creation else worker.close).start()
    began = time.monotonic()
    assert worker.run({"tests": [1]})["error"] == sandboxed.EXITED_DURING_JOB
    assert time.monotonic() - began < 4
    assert [container.removed.is_set() for container in made] == [True] * (1 + during_creation)
