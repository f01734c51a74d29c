"""Test containers/install.py with real environments and a stand-in for a base's packages."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from importlib.metadata import distribution
from pathlib import Path

import pytest

from containers import images, install
from tests.helpers.build_examples import HASH

# ---- Locks


@pytest.mark.parametrize("lock", sorted(images.FOLDER.rglob("*.lock")), ids=str)
def test_locks_have_only_pins_with_hashes_and_no_urls(lock):
    pins, text = install.requirements(lock), lock.read_text()
    form = r"([\w.-]+)(\[[^\]]*\])?==[^\s;]+( ; [^\\]*)?( \\\n    --hash=sha256:[0-9a-f]{64})+"
    parts = [re.sub(r"(?m)^\s*#.*$", "", text).strip() for _, text in pins]
    assert [part for part in parts if not re.fullmatch(form, part)] == []
    assert len(pins) == text.count("==") - text.count(" == ") - text.count("python_full_version ==")
    assert not any("://" in part for part in parts)


def test_requirements_of_a_lock(tmp_path):
    lock = tmp_path / "a.lock"
    second = f"b>=1 {HASH}\n"
    first = f"Foo_Bar.baz[extra]==1.0+cpu ; python_version < '3.12' \\\n    {HASH}\n    # via x\n"
    lock.write_text(f"# comment\n{first}{second}")
    assert install.requirements(lock) == [("foo-bar-baz", first), ("b", second)]


def test_guarded_packages():
    names = "torch torchvision triton pytorch-triton-rocm triton-kernels vllm flash-attn amd-aiter"
    packages = dict.fromkeys([*names.split(), "rocm-sdk-core"], "1.0")
    packages |= {"for-amd": "1.0+rocm7.2", "by-hand": "1.0+gitabc"}
    others = {"for-a-cpu": "1.0+cpu", "torchmetrics": "1.0", "numpy": "2.4"}
    assert install.guarded({**packages, **others}) == packages


MISMATCH = """Collecting a==1
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. \
If you have updated the package versions, please ...
    a==1 from https://example.com/a-1.whl:
        Expected sha256 00
             Got        11
"""


# pip 23.2's output through a dead proxy, and with a full disk
DEAD_PROXY = """WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, \
status=None)) after connection broken by 'ProxyError('Cannot connect to proxy.', \
NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f80>: \
Failed to establish a new connection: \
[Errno 111] Connection refused'))': /simple/six/
ERROR: Could not find a version that satisfies the requirement six==1.16.0 (from versions: none)
ERROR: No matching distribution found for six==1.16.0"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(("output", "code", "message", "remedy"), [
    (MISMATCH, 4, "\nExpected sha256 00\nGot        11", "Got        11"),
    (DEAD_PROXY + MISMATCH, 4, "\nExpected sha256 00\nGot        11", "Got        11"),
    ("Looking\nERROR: No match for a==1\n", 3, "ERROR: No match for a==1", "PIP_FIND_LINKS"),
    ("one\ntwo\nthree\nfour\n", 3, "l: pip failed:\ntwo\nthree\nfour", "PIP_FIND_LINKS"),
    (DEAD_PROXY, 3, "six==1.16.0", "proxy failed"),
    (FULL, 3, "No space left on device", "disk is full"),
])  # fmt: skip
def test_failure_of_pip(output, code, message, remedy):
    error = install.failure("l", output)
    assert error.exit_code == code
    assert message in str(error)
    assert remedy in str(error).splitlines()[-1]


def test_dead_proxy_without_retries(tmp_path):
    lock = tmp_path / "a.lock"
    lock.write_text(f"six==1.16.0 \\\n    {HASH}\n")
    settings = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "", "PIP_RETRIES": "0"}
    settings["PIP_INDEX_URL"] = "https://index.invalid/simple"
    pip_install = (sys.executable, "-m", "pip", "install", "--target", str(tmp_path))
    with pytest.raises(install.PackagesError, match="proxy failed") as error:
        install.install_lock([pip_install], lock, {}, {**os.environ, **settings})
    assert error.value.exit_code == 3


def test_pip_through_a_proxy_that_rejects_the_login():
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self):
            self.send_error(407)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {"HTTPS_PROXY": f"http://me:sentinel@127.0.0.1:{server.server_port}"}
        index = ["--index-url=https://index.invalid/simple", "--retries=1"]
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", *index, "six==1.16.0"]
        status, output = install.run(argv, {**os.environ, **settings, "NO_PROXY": ""})
        server.shutdown()
    failure = install.failure("l", output)
    assert status
    assert "HTTPS_PROXY" in str(failure).splitlines()[-1]
    assert "sentinel" not in str(failure)


# ---- An environment on top of a base


def package(site: Path, name: str, version: str, *requires: str) -> None:
    """Write a module that only has a version, and its metadata."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (site / f"{name}.py").write_text(f"__version__ = {version!r}\n")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder of torch, vLLM, an older NumPy, and a package with an unmet requirement."""
    site = tmp_path / "image" / "site-packages"
    package(site, "torch", "2.13.0+rocm7.2")
    package(site, "vllm", "0.31.0+rocm723", "not-there-at-all")
    package(site, "numpy", "1.0")
    return site


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    folder = tmp_path / ".venv"
    # A link to pip takes a hundredth of the time that venv needs to install it. An import of pip
    # would keep setuptools, which vLLM needs, from being imported in this process.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (install.site_of(folder) / "pip").symlink_to(distribution("pip").locate_file("pip"))
    return folder


def test_the_base_s_packages_are_importable_and_unchanged(base: Path, venv: Path) -> None:
    package(install.site_of(venv), "numpy", "2.3")
    # pycosat has a substitute, and the base has no Triton of that name.
    package(install.site_of(venv), "trl", "1.16.0", "torch>=2", "numpy>=2", "pycosat", "triton")
    package(base, "triton_rocm", "3.8")
    before = sorted(base.rglob("*"))
    install.join(venv, [str(base)])
    show = "import torch, vllm, numpy; print(torch.__file__, vllm.__version__, numpy.__version__)"
    argv = [str(venv / "bin/python"), "-B", "-c", show]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert shown == [str(base / "torch.py"), "0.31.0+rocm723", "2.3"]
    assert sorted(base.rglob("*")) == before
    constraints = (venv / "constraints.txt").read_text().split()
    assert constraints == ["torch==2.13.0+rocm7.2", "triton-rocm==3.8", "vllm==0.31.0+rocm723"]


@pytest.mark.parametrize(("need", "named"), [
    ("torch>=2.14", "torch 2.13.0+rocm7.2"),
    ("also-not-there", "also-not-there"),
])  # fmt: skip
def test_packages_that_do_not_fit(base, venv, need, named):
    package(install.site_of(venv), "trl", "1.16.0", need)
    with pytest.raises(install.PackagesError) as error:
        install.join(venv, [str(base)])
    assert error.value.exit_code == 4
    assert named in str(error.value)
    assert "not-there-at-all" not in str(error.value).replace("also-not-there", "")


def test_a_lock_replaces_no_package_of_the_base(venv, tmp_path):
    """Without an index, pip finds no package."""
    lock = tmp_path / "a.lock"
    lock.write_text(f"torch==2.13.0+cpu \\\n    {HASH}\nVLLM==0.1 \\\n    {HASH}\n")
    pip_install = (str(venv / "bin/python"), "-m", "pip", "install", "--no-index")
    assert install.install_lock([pip_install], lock, {"torch", "vllm"}, {})
    optional = tmp_path / "compiled.lock"
    optional.write_text(f"pycosat==1 \\\n    {HASH}\n")
    assert not install.install_lock([pip_install], optional, {}, {})
    with pytest.raises(install.PackagesError, match=r"pycosat==1") as error:
        install.install_lock([pip_install], optional.rename(tmp_path / "b.lock"), {}, {})
    assert error.value.exit_code == 3
