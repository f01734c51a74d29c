"""Test containers/packages.py, and parts of engine.py and progress.py."""

from __future__ import annotations

import http.server
import io
import json
import os
import queue
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from containers import engine, install, packages
from containers.progress import Progress
from containers.verify import BuildFailed
from launch.core.errors import HostError
from tests.helpers.build_examples import IMAGE


class Engine:
    """Stand in for an engine: record a container, and run its program here or fail."""

    def __init__(self, code: int) -> None:
        self.api, self.code, self.shown, self.files, self.commits = self, code, {}, {}, []
        self.create_host_config = docker.APIClient(version="1.41").create_host_config

    def create_container(self, image: str, **options) -> dict[str, str]:
        self.shown = options
        return {"Id": "new"}

    def put_archive(self, container: str, path: str, data: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                self.files[path + member.name] = archive.extractfile(member).read()
                assert (member.mode, member.uid, member.mtime) == (0o644, 0, 0)

    def start(self, container: str) -> None: ...

    def logs(self, container: str, **_) -> Iterator[bytes]:
        yield b"a line\nerror: the last\n"

    def wait(self, container: str) -> dict[str, int]:
        return {"StatusCode": self.code}

    def commit(self, container: str, **_) -> dict[str, str]:
        self.commits.append(container)
        return {"Id": "image"}

    def remove_container(self, container: str, **_) -> None:
        self.shown["removed"] = True


@pytest.mark.parametrize(("code", "raised"), [(0, None), (3, HostError), (4, BuildFailed)])
def test_container_has_settings_in_files_and_not_in_its_configuration(tmp_path, code, raised):
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificate")
    settings = {
        "PIP_CERT": str(bundle),
        "PIP_CLIENT_CERT": "/absent",
        "PIP_FIND_LINKS": str(tmp_path),
        "HTTPS_PROXY": "http://me:sentinel@proxy.example.com",
    }
    client = Engine(code)
    with Progress().phase("install") as phase:
        if raised:
            with pytest.raises(raised, match="the last"):
                packages.install(client, IMAGE, "base", settings, phase)
        else:
            assert packages.install(client, IMAGE, "base", settings, phase) == "image"
    assert (len(client.commits), client.shown.pop("removed")) == (not raised, True)
    files = {Path(name).name: data for name, data in client.files.items()}
    inside = json.loads(files["settings.json"])
    assert inside["HTTPS_PROXY"] == settings["HTTPS_PROXY"]
    assert inside["PIP_CLIENT_CERT"] == "/absent"
    assert client.files[inside["PIP_CERT"]] == b"certificate"
    locks = [name for name in files if name.endswith(".lock")]
    assert locks == ["0-tools.lock", "1-requirements.lock"]
    assert {"install.py", "probe.py"} < files.keys()
    assert "sentinel" not in json.dumps(client.shown)
    cache, folder = client.shown["host_config"]["Mounts"]
    assert (cache["Target"], cache["Type"]) == (inside["PIP_CACHE_DIR"], "volume")
    assert (folder["Source"], folder["ReadOnly"]) == (str(tmp_path), True)


# ---- Causes of a failure

# pip 23.2's output through a dead proxy, and with a full disk
DEAD_PROXY = """WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, \
status=None)) after connection broken by 'ProxyError('Cannot connect to proxy.', \
NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f80>: \
Failed to establish a new connection: \
[Errno 111] Connection refused'))': /simple/six/
error: tools.lock: pip failed:
ERROR: Could not find a version that satisfies the requirement six==1.16.0 (from versions: none)
ERROR: No matching distribution found for six==1.16.0"""
FULL = "error: a.lock: pip failed:\nOSError: [Errno 28] No space left on device: '/opt/recipes/a'"
MISSING = "error: a.lock: pip failed:\nERROR: No matching distribution found for a==1"
MISMATCH = DEAD_PROXY + "\nerror: a.lock: a file's hash differs from the lock's:"
LOGIN = {"HTTPS_PROXY": "http://me:sentinel@proxy.example.com:3128"}


@pytest.mark.parametrize(("output", "code", "settings", "exit_code", "named"), [
    (DEAD_PROXY, 3, LOGIN, 3, "HTTPS_PROXY (proxy.example.com:3128)"),
    (DEAD_PROXY, 3, {"PIP_PROXY": "me:sentinel@p:1"}, 3, "unset PIP_PROXY"),
    (DEAD_PROXY, 3, {}, 3, "pip config list"),
    (FULL, 3, LOGIN, 3, "docker image prune"),
    (f"Step 1/2\n{FULL}", 4, {}, 3, "docker image prune"),
    (MISSING, 3, LOGIN, 3, "PIP_FIND_LINKS"),
    (MISMATCH, 4, LOGIN, 4, "The complete output is in "),
    ("Step 1/2\n \nno such file", 4, {}, 4, "The complete output is in "),
])  # fmt: skip
def test_remedy_of_a_failed_fetch(output, code, settings, exit_code, named):
    failure = packages.failure(IMAGE, code, output.splitlines(), settings)
    assert failure.exit_code == exit_code
    assert named in str(failure).splitlines()[-1]
    assert output.splitlines()[-1].removeprefix("error: ") in str(failure)
    assert "sentinel" not in str(failure)


def test_pip_through_a_proxy_that_rejects_the_login():
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self):
            self.send_error(407)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        settings = {"HTTPS_PROXY": f"http://me:sentinel@{address}", "NO_PROXY": ""}
        index = ["--index-url=https://index.invalid/simple", "--retries=1"]
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", *index, "six==1.16.0"]
        status, output = install.run(argv, {**os.environ, **settings})
        server.shutdown()
    failure = packages.failure(IMAGE, 3, output.splitlines(), settings)
    assert status
    assert f"HTTPS_PROXY ({address})" in str(failure).splitlines()[-1]
    assert "sentinel" not in str(failure)


@pytest.mark.parametrize(("explanation", "named"), [
    ('Get "https://r.example.com/v2/": proxyconnect tcp: dial tcp 127.0.0.1:9: connect: refused',
     "The engine's proxy failed"),
    ("write /var/lib/docker/tmp/x: no space left on device", "docker image prune"),
    ("pull access denied for x", "docker login"),
])  # fmt: skip
def test_remedy_of_a_failed_pull(explanation, named, monkeypatch):
    def pull(*_) -> None:
        raise docker.errors.APIError("x", explanation=explanation)

    monkeypatch.setattr(engine, "find", lambda *_: None)
    monkeypatch.setattr(engine, "pull", pull)
    with pytest.raises(HostError) as error:
        engine.find_or_pull(None, "x:1", print)
    first, remedy = str(error.value).splitlines()
    assert first.endswith(explanation)
    assert named in remedy


def test_a_log_shows_the_activity_at_intervals(monkeypatch):
    said = queue.Queue()
    progress = Progress()
    monkeypatch.setattr("containers.progress.QUIET_S", 0.001)
    monkeypatch.setattr(progress, "say", said.put)
    with progress.phase("build") as phase:
        assert "started" in said.get(timeout=60)
        phase.say("Step 2/9")
        phase.result = "done"
        while "Step 2/9" not in said.get(timeout=60):
            pass
    lines = list(said.queue)
    assert "done" in lines[-1]


# ---- The engine


def test_raise_error_in_response():
    events = engine.raise_errors(iter([{"stream": "fine"}, {"error": "it broke"}]))
    assert next(events) == {"stream": "fine"}
    with pytest.raises(docker.errors.APIError, match="it broke"):
        next(events)
