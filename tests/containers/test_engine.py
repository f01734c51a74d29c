"""Test containers/engine.py without a docker engine."""

from __future__ import annotations

import queue

import docker
import pytest

from containers import engine
from launch.core.errors import HostError


@pytest.mark.parametrize(("explanation", "named"), [
    ('Get "https://r.example.com/v2/": proxyconnect tcp: dial tcp 127.0.0.1:9: connect: refused',
     "https://docs.docker.com/engine/daemon/proxy"),
    ("write /var/lib/docker/tmp/x: no space left on device", "docker image prune"),
    ("pull access denied for x", "docker login"),
])  # fmt: skip
def test_remedy_of_a_failed_pull(explanation, named, monkeypatch):
    client = docker.DockerClient("unix:///absent.sock", version="1.41")
    monkeypatch.setattr(client.api, "pull", lambda *_, **__: [{"error": explanation}])
    with pytest.raises(HostError) as error:
        engine.pull(client, "x:1", print)
    first, remedy = str(error.value).splitlines()
    assert first.endswith(explanation)
    assert named in remedy


def layer(id: str, status: str, current: float, total: float) -> dict:
    detail = {"current": current * 1e9, "total": total * 1e9}
    return {"id": id, "status": status, "progress": "[=>  ]", "progressDetail": detail}


def test_follow_a_pull_and_a_push():
    shown: list[str] = []
    events = [
        {"id": "1.0", "status": "Pulling from mine"},
        layer("a", "Downloading", 0.1, 1),
        layer("b", "Downloading", 0.5, 2),
        {"id": "a", "status": "Download complete", "progressDetail": {}},
        layer("b", "Downloading", 1.5, 2),
        layer("a", "Extracting", 1, 1),
        {"progressDetail": {}, "aux": {"Tag": "1", "Digest": "sha256:d"}},
    ]
    assert engine.follow(events, shown.append) == "sha256:d"
    assert shown == [
        "Pulling from mine",
        "Downloading 0.1 of 1.0 GB",
        "Downloading 0.6 of 3.0 GB",
        "Downloading 1.6 of 3.0 GB",
        "Extracting 1.0 of 1.0 GB",
    ]
    with pytest.raises(docker.errors.APIError, match="it broke"):
        engine.follow([*events, {"error": "it broke"}], print)


def test_heartbeat_prints_the_activity(monkeypatch):
    printed = queue.Queue()
    monkeypatch.setattr(engine, "QUIET_S", 0.001)
    monkeypatch.setattr(engine, "print", lambda text, **_: printed.put(text), raising=False)
    with engine.heartbeat() as say:
        assert printed.get(timeout=60).startswith("... ")
        say("Step 2/9\n")
        while not printed.get(timeout=60).endswith("Step 2/9"):
            pass
