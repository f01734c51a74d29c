"""Test containers/fetch.py, and parts of engine.py."""

from __future__ import annotations

import http.server
import json
import queue
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest

from containers import engine, fetch, install
from containers.progress import Progress
from launch.core.errors import HostError
from tests.helpers.build_examples import IMAGE

# ---- The host's settings for pip

LISTED = """:env:.default-timeout='180'
:env:.find-links='/env/wheels'
download.no-index='false'
global.cert='/no/such.pem'
global.extra-index-url='https://a.example.com/simple\\nhttps://b.example.com/simple'
global.find-links='/global/wheels'
global.index-url='https://me:password@pypi.example.com/simple'
global.target='/somewhere'
install.user='true'
wheel.find-links='/wheel'
"""


def test_pip_settings_from_files_and_variables():
    assert fetch.pip_settings(LISTED, {"https_proxy": "http://proxy", "NO_PROXY": "localhost"}) == {
        "PIP_INDEX_URL": "https://me:password@pypi.example.com/simple",
        "PIP_EXTRA_INDEX_URL": "https://a.example.com/simple https://b.example.com/simple",
        "PIP_FIND_LINKS": "/env/wheels",
        "PIP_NO_INDEX": "false",
        "PIP_CERT": "/no/such.pem",
        "PIP_TIMEOUT": "180",
        "HTTPS_PROXY": "http://proxy",
        "NO_PROXY": "localhost",
    }


@pytest.mark.parametrize("variable", fetch.BUNDLES)
def test_certificates_from_environment_or_system(variable, monkeypatch):
    assert fetch.pip_settings("", {variable: "/company.pem"}) == {"PIP_CERT": "/company.pem"}
    monkeypatch.setattr(
        fetch.ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile="/system.pem")
    )
    assert fetch.pip_settings("", {}) == {"PIP_CERT": "/system.pem"}
    monkeypatch.setattr(fetch.ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None))
    assert fetch.pip_settings("", {}) == {}


def test_mount_local_folders_and_index_with_its_files(tmp_path):
    for name in ("wheels", "mirror/simple", "page"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "page/index.html").write_text("")
    settings = {
        "PIP_FIND_LINKS": (
            f"{tmp_path}/wheels file://{tmp_path}/page/index.html /absent "
            "https://x.example.com/wheels"
        ),
        "PIP_EXTRA_INDEX_URL": f"file://{tmp_path}/mirror/simple https://pypi.example.com/simple",
    }
    assert fetch.folders_of(settings) == [
        tmp_path / "mirror",
        tmp_path / "page",
        tmp_path / "wheels",
    ]
    assert fetch.folders_of({"PIP_INDEX_URL": "file:///", "PIP_FIND_LINKS": "/"}) == []


def test_private_folder(tmp_path):
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificate")
    with fetch.private_folder(
        IMAGE, {"PIP_CERT": str(bundle), "PIP_CLIENT_CERT": "/absent", "PIP_PROXY": "http://p"}
    ) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "settings.json").stat().st_mode) == 0o400
        inside = {
            "PIP_CERT": f"{fetch.INSIDE}/pip_cert",
            "PIP_CLIENT_CERT": "/absent",
            "PIP_PROXY": "http://p",
        }
        assert json.loads((folder / "settings.json").read_text()) == inside
        assert (folder / "pip_cert").read_text() == "certificate"
        assert (folder / "locks.txt").read_text().split() == list(IMAGE.locks)
        assert (folder / "locks/cpu/tools.lock").is_file()
    assert not folder.exists()


def test_container_configuration_has_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(
        fetch,
        "listed_by_pip",
        lambda: "global.index-url='https://me:sentinel@pypi.example.com/simple'\n",
    )
    monkeypatch.setenv("HTTPS_PROXY", "http://me:sentinel@proxy.example.com")
    shown: list[str] = []

    def run(client, image, argv, show, **options) -> tuple[int, list[str]]:
        (private,) = [
            mount["Source"]
            for mount in options["host_config"]["Mounts"]
            if mount["Target"] == fetch.INSIDE
        ]
        assert (Path(private) / "settings.json").read_text().count("sentinel") == 2
        shown.append(json.dumps([image, argv, options]))
        return 0, []

    monkeypatch.setattr(engine, "run", run)
    client = docker.DockerClient(version="1.41")  # only for create_host_config, which sends nothing
    monkeypatch.setattr(client.api, "info", dict)
    fetch.download(client, IMAGE, "base", tmp_path, print)
    assert len(shown) == 1
    assert "sentinel" not in shown[0]
    assert json.loads(shown[0])[2]["host_config"]["NetworkMode"] == "host"


def test_resume_download_and_reuse_complete_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = {"python": "3.12.3", "machine": "x86_64"}
    seen: list[list[str]] = []

    def download(client, image, base, folder, show) -> None:
        seen.append(sorted(file.name for file in folder.iterdir()))
        (folder / f"file{len(seen)}").write_text("")
        if len(seen) == 1:
            raise HostError("the network is down")

    monkeypatch.setattr(fetch, "download", download)
    with pytest.raises(HostError):
        fetch.wheels(None, IMAGE, "base", facts, print)
    folder = fetch.wheels(None, IMAGE, "base", facts, print)
    assert seen == [[], ["file1"]]
    assert sorted(file.name for file in folder.iterdir()) == ["file1", "file2"]
    assert fetch.wheels(None, IMAGE, "base", facts, print) == folder
    assert len(seen) == 2


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
FULL = (
    "error: a.lock: pip failed:\nOSError: [Errno 28] No space left on device: '/mnt/wheels/a.whl'"
)
MISSING = "error: a.lock: pip failed:\nERROR: No matching distribution found for a==1"
MISMATCH = DEAD_PROXY + "\nerror: a.lock: a file's hash differs from the lock's:"
LOGIN = {"HTTPS_PROXY": "http://me:sentinel@proxy.example.com:3128"}


@pytest.mark.parametrize(("output", "code", "settings", "exit_code", "named"), [
    (DEAD_PROXY, 3, LOGIN, 3, "HTTPS_PROXY (proxy.example.com:3128)"),
    (DEAD_PROXY, 3, {"PIP_PROXY": "me:sentinel@p:1"}, 3, "unset PIP_PROXY"),
    (DEAD_PROXY, 3, {}, 3, "pip config list"),
    (FULL, 3, LOGIN, 3, "XDG_CACHE_HOME"),
    (FULL, 4, {}, 3, "docker image prune"),
    (MISSING, 3, LOGIN, 3, "another network"),
    (MISMATCH, 4, LOGIN, 4, "hash differs"),
])  # fmt: skip
def test_remedy_of_a_failed_fetch(output, code, settings, exit_code, named):
    failure = fetch.failed(code, output.splitlines(), "another network", settings)
    assert failure.exit_code == exit_code
    assert named in str(failure).splitlines()[-1]
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
        status, output = install.run(argv, settings)
        server.shutdown()
    failure = fetch.failed(3, output.splitlines(), "another network", settings)
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
