"""Test containers/packages.py, and parts of engine.py and progress.py."""

from __future__ import annotations

import http.server
import json
import os
import queue
import sys
import tarfile
import threading
from pathlib import Path

import docker
import pytest

from containers import engine, install, packages, progress
from launch.core.errors import HostError
from tests.helpers.build_examples import IMAGE


def test_settings_reach_the_container_as_files(tmp_path):
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificate")
    settings = {"PIP_CERT": str(bundle), "PIP_CLIENT_CERT": "/absent", "HTTPS_PROXY": "http://p"}
    files = packages.files_for(IMAGE, settings)
    with tarfile.open(fileobj=engine.tar(files)) as archive:
        assert {(m.mode, m.uid, m.mtime) for m in archive} == {(0o644, 0, 0)}
        assert archive.getnames() == list(files)
    names = {Path(name).name: data for name, data in files.items()}
    inside = json.loads(names["settings.json"])
    assert (inside["HTTPS_PROXY"], inside["PIP_CLIENT_CERT"]) == ("http://p", "/absent")
    assert files[inside["PIP_CERT"].lstrip("/")] == b"certificate"
    locks = [name for name in names if name.endswith(".lock")]
    assert locks == ["0-tools.lock", "1-requirements.lock"]
    assert "install.py" in names


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
    monkeypatch.setattr(progress, "QUIET_S", 0.001)
    monkeypatch.setattr(progress, "print", lambda text, **_: said.put(text), raising=False)
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
