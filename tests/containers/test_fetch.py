"""Test containers/fetch.py, and parts of engine.py."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest

from containers import engine, fetch
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


# ---- The engine


def test_raise_error_in_response():
    events = engine.raise_errors(iter([{"stream": "fine"}, {"error": "it broke"}]))
    assert next(events) == {"stream": "fine"}
    with pytest.raises(docker.errors.APIError, match="it broke"):
        next(events)
