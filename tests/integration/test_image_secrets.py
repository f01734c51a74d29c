"""Test that no image has secrets of the host."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.server
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.conftest import Chunks

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_is_left")]


PASSWORD, PROXY_PASSWORD = "sentinel-index-password", "sentinel-proxy-password"
BUNDLE = "sentinel-certificate-authority"


@contextlib.contextmanager
def index_with_a_password(files: Path) -> Iterator[str]:
    """Serve a folder of wheels as a package index that requires the password."""
    expected = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    names = [file.name for file in files.iterdir()]

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args) -> None:
            super().__init__(*args, directory=files)

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != expected:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic")
                self.end_headers()
            elif self.path.startswith("/simple/"):
                page = "".join(f'<a href="/{name}">{name}</a>' for name in names).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(page)
            else:
                super().do_GET()

        def log_message(self, *_) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_image_has_no_secrets_of_the_host(tiny, engine, tmp_path):
    wheels = tmp_path / "wheels"
    pip = [sys.executable, *"-m pip download -q --no-deps --require-hashes".split()]
    subprocess.run([*pip, "-d", wheels, "-r", ROOT / "containers/cpu/tools.lock"], check=True)
    bundle = tmp_path / "authority.pem"
    bundle.write_text(BUNDLE)
    cache = tmp_path / "cache"
    with index_with_a_password(wheels) as server:
        environ = {
            "PIP_INDEX_URL": f"http://me:{PASSWORD}@{server}/simple",
            "HTTPS_PROXY": f"http://me:{PROXY_PASSWORD}@127.0.0.1:1",
            "PIP_CERT": str(bundle),
            "PIP_CONFIG_FILE": os.devnull,  # no other source of the wheel
            "XDG_CACHE_HOME": str(cache),
            "TMPDIR": str(tmp_path),
        }
        stripped = {name: "" for name in os.environ if name.startswith("PIP_")}
        done = tiny(environ={**stripped, **environ})
    # The build succeeds only if pip used the password.
    assert done.returncode == 0, done.stdout + done.stderr
    image = engine.images.get(tiny.reference)
    container = engine.containers.create(image.id, ["true"])
    try:
        searched = {
            "output": (done.stdout + done.stderr).encode(),
            "docker history": json.dumps(image.history()).encode(),
            "docker inspect": json.dumps(image.attrs).encode(),
            "files of a container": b"".join(container.export()),
            "docker save": b"".join(layers(image)),
        }
    finally:
        container.remove()
    for file in [*cache.rglob("*"), *(tmp_path / "wheels").iterdir()]:
        if file.is_file():
            searched[str(file.relative_to(tmp_path))] = file.read_bytes()
    assert len(searched["docker save"]) > len(searched["files of a container"]) > 100_000_000
    for secret in (
        PASSWORD,
        PROXY_PASSWORD,
        BUNDLE,
        base64.b64encode(f"me:{PASSWORD}".encode()).decode(),
    ):
        assert [place for place, content in searched.items() if secret.encode() in content] == []
    assert list(tmp_path.glob("rocm-recipes-*")) == []  # the folder of secrets


def layers(image) -> Iterator[bytes]:
    """Yield the layers of `docker save`, decompressed."""
    with tarfile.open(fileobj=Chunks(image.save()), mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            data = content.read() if content else b""
            # Newer engines save compressed layers.
            yield gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
