"""Test containers/pip_settings.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from containers import pip_settings

LISTED = """:env:.default-timeout='180'
:env:.find-links='/env/wheels'
download.no-index='true'
global.cert='/no/such.pem'
global.extra-index-url='https://a.example.com/simple\\nhttps://b.example.com/simple'
global.find-links='/global/wheels'
global.index-url='https://me:password@pypi.example.com/simple'
global.target='/somewhere'
install.user='true'
wheel.find-links='/wheel'
"""


def test_pip_settings_from_files_and_variables():
    assert pip_settings.for_container(
        pip_settings.parse(LISTED), {"https_proxy": "http://proxy", "NO_PROXY": "localhost"}
    ) == {
        "PIP_INDEX_URL": "https://me:password@pypi.example.com/simple",
        "PIP_EXTRA_INDEX_URL": "https://a.example.com/simple https://b.example.com/simple",
        "PIP_FIND_LINKS": "/env/wheels",
        "PIP_CERT": "/no/such.pem",
        "PIP_TIMEOUT": "180",
        "HTTPS_PROXY": "http://proxy",
        "NO_PROXY": "localhost",
    }


@pytest.mark.parametrize("variable", pip_settings.BUNDLES)
def test_certificates_from_environment_or_system(variable, monkeypatch):
    assert pip_settings.for_container({}, {variable: "/company.pem"}) == {
        "PIP_CERT": "/company.pem"
    }
    monkeypatch.setattr(
        pip_settings.ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile="/system.pem")
    )
    assert pip_settings.for_container({}, {}) == {"PIP_CERT": "/system.pem"}
    monkeypatch.setattr(
        pip_settings.ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None)
    )
    assert pip_settings.for_container({}, {}) == {}


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
    assert pip_settings.local_folders(settings) == [
        str(tmp_path / "mirror"),
        str(tmp_path / "page"),
        str(tmp_path / "wheels"),
    ]
    assert pip_settings.local_folders({"PIP_INDEX_URL": "file:///", "PIP_FIND_LINKS": "/"}) == []


def test_relative_folders_reach_a_container_as_absolute_ones(tmp_path, monkeypatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = pip_settings.for_container({"find-links": ["./wheels"]}, {})
    assert settings["PIP_FIND_LINKS"] == str(tmp_path / "wheels")
    assert pip_settings.local_folders(settings) == [str(tmp_path / "wheels")]


def test_uv_settings_from_pip() -> None:
    listed = """:env:.cert='/etc/company.pem'
global.extra-index-url='\\nhttps://one/simple\\nhttps://two/simple'
global.find-links='/wheels /more'
global.index-url='https://user:word=1@mirror/simple'
install.no-compile='true'
"""
    assert pip_settings.uv_settings(pip_settings.parse(listed)) == {
        "UV_DEFAULT_INDEX": "https://user:word=1@mirror/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/company.pem",
    }
    assert pip_settings.uv_settings({}) == {}
