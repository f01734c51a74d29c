"""What tests with a real engine share: the engine, a registry, a base made from Debian's packages, the cpu image built on it.

Where nothing can be pulled, a base is made with mmdebstrap and imported. The base and the cpu image stay for the next run, which
finds both up to date; everything else that a test makes is removed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import docker
import pytest

from containers import fetch, images
from containers.engine import failing
from tests.conftest import ROOT

BUILD = [sys.executable, str(ROOT / "containers/build.py")]
BASE = "rocm-recipes-test/debian-python"
# python3-venv: Debian keeps ensurepip there. ca-certificates: Python has no list of its own.
PACKAGES = "python3,python3-venv,ca-certificates"
SOURCES = ("sources.list", "sources.list.d/debian.sources", "sources.list.d/ubuntu.sources")
STARTS_WITHIN_S = 20


def lacking(what: str) -> None:
    """A machine of one's own may lack it; CI installs it, and would pass for nothing without it."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException as error:
        return lacking(f"no docker engine: {error}")
    yield client
    client.close()
    return None


@pytest.fixture(scope="session")
def registry(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a registry of its own, empty at first."""
    program = shutil.which("docker-registry")
    if program is None:
        return lacking("no docker-registry (Debian: apt-get install docker-registry)")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'storage'}}}}}\nhttp: {{addr: '{address}'}}\n")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        wait_for(address, process)
        yield address
    finally:
        for image in engine.images.list():
            for tag in image.tags:
                if tag.startswith(f"{address}/"):
                    engine.images.remove(tag)
        process.terminate()
        process.wait()
        shutil.rmtree(folder)
    return None


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            urllib.request.urlopen(f"http://{address}/v2/", timeout=STARTS_WITHIN_S).close()
            return
        except URLError:
            assert process.poll() is None, "the registry ended"
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)


def pushed(engine: docker.DockerClient, image: str, repository: str) -> str:
    """repository@digest of an image, now that it is there."""
    assert engine.images.get(image).tag(repository, "1")
    events = failing(engine.api.push(repository, "1", stream=True, decode=True))
    (digest,) = {event["aux"]["Digest"] for event in events if "aux" in event}
    return f"{repository}@{digest}"


@pytest.fixture(scope="session")
def base(engine: docker.DockerClient, registry: str) -> str:
    """A small Debian (or Ubuntu: the host's own) with Python, by its digest in the registry."""
    if shutil.which("mmdebstrap") is None:
        return lacking("no mmdebstrap (Debian, Ubuntu: apt-get install mmdebstrap)")
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    sources = [file for name in SOURCES if (file := Path("/etc/apt") / name).is_file()]
    recipe = ["--quiet", "--variant=minbase", f"--include={PACKAGES}", suite]
    key = hashlib.sha256("\n".join([*recipe, *(file.read_text() for file in sources)]).encode()).hexdigest()[:12]
    if not engine.images.list(f"{BASE}:{key}"):
        tarball = fetch.cache() / "tests" / f"{suite}-{key}.tar"
        if not tarball.exists():
            tarball.parent.mkdir(parents=True, exist_ok=True)
            unfinished = tarball.with_suffix(".unfinished.tar")
            subprocess.run(["mmdebstrap", *recipe, str(unfinished), *map(str, sources)], check=True)
            unfinished.rename(tarball)
        engine.api.import_image_from_file(str(tarball), BASE, key, changes=['CMD ["bash"]'])
    return pushed(engine, f"{BASE}:{key}", f"{registry}/debian-python")


def build(*arguments: str, **options) -> subprocess.CompletedProcess:
    """`python containers/build.py ...`; `environ` adds to the environment."""
    env = {**os.environ, "COLUMNS": "200", **options.pop("environ", {})}
    return subprocess.run([*BUILD, *arguments], env=env, capture_output=True, text=True, **options)


@pytest.fixture(scope="session")
def cpu_image(base: str) -> str:
    """The reference of the cpu image, built on the base unless it has been before."""
    done = build("image=cpu", f"base={base}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return images.load()["cpu"].local_reference
