"""Share a docker engine, a registry, a Debian base image, the cpu image built on it, and Apptainer.

If no base can be pulled, make one with mmdebstrap. The base, the cpu image and Apptainer stay for
later test runs. Everything else is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import docker
import pytest
import yaml
from xdist.scheduler import LoadFileScheduling

from containers import engine as engines
from containers import images, install
from containers.images import LABEL
from tests.conftest import ROOT

BUILD = [sys.executable, str(ROOT / "containers/build.py")]
BASE = "rocm-recipes-test/debian-python"
FAKE_ROCM = "fake-rocm"
# Contents of the fake ROCm base.
FAKE_ENTRY = {
    "torch": "2.13",
    "rocm": "7.2.0",
    "rccl": "2.27.9",
    "vllm": "0.31.0",
    "gfx": ["gfx90a", "gfx942"],
    "download_gb": "0.1",
}
# python3-venv has ensurepip. ca-certificates has the certificates that Python uses.
PACKAGES = "python3,python3-venv,ca-certificates"
TESTS_CACHE = Path.home() / ".cache/rocm-recipes/tests"
SOURCES = ("sources.list", "sources.list.d/debian.sources", "sources.list.d/ubuntu.sources")
PATIENCE_S = 480  # timeout of operations that take a minute on two busy cores
# Files whose tests use the docker engine. They count images and containers, so they run in one
# process.
WITH_ENGINE = {
    "test_docker_runs.py",
    "test_docker_split.py",
    "test_image_build.py",
    "test_image_secrets.py",
    "test_podman.py",
    "test_sandbox.py",
    "test_slurm_images.py",
}
# Files that take minutes. They start first, so that all processes end at about the same time.
LONG = """
test_clean_clone.py test_split.py test_kernels.py test_tunings.py test_slurm.py test_compiled.py
test_hardware_report.py test_strategies.py test_public_data.py
""".split()


def skip_without(requirement: str) -> None:
    """Skip the test, or fail in CI, which installs all requirements."""
    if os.environ.get("CI") == "true":
        pytest.fail(requirement)
    pytest.skip(requirement)


def started(*arguments: str, cwd: Path) -> subprocess.Popen:
    """Start a launcher in the background, with its output in the file `output` of `cwd`."""
    argv = [sys.executable, str(ROOT / "launch/run.py"), *arguments]
    env = {**os.environ, "COLUMNS": "200"}
    with (cwd / "output").open("w") as log:
        return subprocess.Popen(
            argv, cwd=cwd, env=env, stdout=log, stderr=log, start_new_session=True
        )


def wait_until(condition: Callable[[], Any], launcher: subprocess.Popen | None = None) -> Any:
    """Wait until `condition()` is true, and return its value. Fail if `launcher` ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert launcher is None or launcher.poll() is None, "the launcher ended first"
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s"
        time.sleep(0.05)
    return value


class EngineScheduling(LoadFileScheduling):
    """Distribute files to processes, and all files that use the engine to the same process.

    xdist's loadgroup does not work, because it renames tests in a way that pytest 9 ignores.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "engine" if Path(file).name in WITH_ENGINE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> EngineScheduling:
    return EngineScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {
        **dict.fromkeys(WITH_ENGINE, 0),
        **{name: number for number, name in enumerate(LONG, 1)},
    }
    items.sort(key=lambda item: turns.get(item.path.name, len(turns)))
    for item in items:
        is_ours = item.path.is_relative_to(Path(__file__).parent)
        if is_ours and "engine" in item.fixturenames and item.path.name not in WITH_ENGINE:
            raise pytest.UsageError(
                f"{item.nodeid} uses the docker engine. Add its file to WITH_ENGINE "
                "(tests/integration/conftest.py)."
            )


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException as error:
        return skip_without(f"no docker engine: {error}")
    yield client
    client.close()
    return None


@pytest.fixture(scope="session")
def registry(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield host:port of a new registry."""
    program = shutil.which("docker-registry")
    if program is None:
        return skip_without("no docker-registry (Debian: apt-get install docker-registry)")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'storage'}}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(address), process)
        yield address
    finally:
        for image in engine.images.list():
            for name in [*image.tags, *image.attrs["RepoDigests"]]:
                if name.startswith(f"{address}/"):
                    # The digest is deleted together with its last tag.
                    with contextlib.suppress(docker.errors.ImageNotFound):
                        engine.images.remove(name)
        process.terminate()
        process.wait()
        shutil.rmtree(folder)
    return None


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/v2/", timeout=20).close()
    except URLError:
        return False
    return True


def pushed(engine: docker.DockerClient, image: str, repository: str) -> str:
    """Push an image, and return its repository@digest."""
    assert engine.images.get(image).tag(repository, "1")
    events = engine.api.push(repository, "1", stream=True, decode=True)
    return f"{repository}@{engines.follow(events, print)}"


@pytest.fixture(scope="session")
def base(engine: docker.DockerClient, registry: str) -> str:
    """Return a small Debian or Ubuntu image with Python, by its digest in the registry."""
    if shutil.which("mmdebstrap") is None:
        return skip_without("no mmdebstrap (Debian, Ubuntu: apt-get install mmdebstrap)")
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    sources = [file for name in SOURCES if (file := Path("/etc/apt") / name).is_file()]
    recipe = ["--quiet", "--variant=minbase", f"--include={PACKAGES}", suite]
    key = hashlib.sha256(
        "\n".join([*recipe, *(file.read_text() for file in sources)]).encode()
    ).hexdigest()[:12]
    if not engine.images.list(f"{BASE}:{key}"):
        tarball = TESTS_CACHE / f"{suite}-{key}.tar"
        if not tarball.exists():
            tarball.parent.mkdir(parents=True, exist_ok=True)
            unfinished = tarball.with_suffix(".unfinished.tar")
            subprocess.run(["mmdebstrap", *recipe, str(unfinished), *map(str, sources)], check=True)
            unfinished.rename(tarball)
        engine.api.import_image_from_file(str(tarball), BASE, key, changes=['CMD ["bash"]'])
    return pushed(engine, f"{BASE}:{key}", f"{registry}/debian-python")


# Debian's Apptainer, which only sid has, with the programs of APPTAINER_SCRIPT. mmdebstrap unpacks
# packages and runs nothing of theirs. The lists of a mirror or the clock may be out of date.
APPTAINER_RECIPE = [
    *["--quiet", "--variant=extract", "--include=apptainer,squashfuse,util-linux,dash,tzdata"],
    *['--aptopt=Acquire::Check-Valid-Until "false"', "sid"],
]
# sid's programs need sid's libraries. Only root mounts without a user namespace. Other users leave
# theirs for one with their own uid, because Apptainer would treat them as root.
# Weak compression makes the conversion of an image four times as fast.
APPTAINER_SCRIPT = """\
#!/bin/sh
# Run Apptainer with Debian sid's /usr and the other directories of this machine.
export APPTAINER_DISABLE_CACHE=true APPTAINER_MKSQUASHFS_ARGS="-comp zstd -Xcompression-level 1"
uid=$(id -u) gid=$(id -g)
if [ "$uid" = 0 ]; then enter="" leave=""; else
    enter=--map-root-user leave="unshare --user --map-user=$uid --map-group=$gid"
fi
exec unshare --mount $enter sh -c '
    mount -t overlay -o "lowerdir=/etc:$0/etc" overlay /etc &&
    mount --bind "$0/usr" /usr &&
    exec '"$leave"' /usr/bin/apptainer "$@"
' "${0%/bin/*}" "$@"
"""


@pytest.fixture(scope="session")
def apptainer() -> Iterator[None]:
    """Put Apptainer on the PATH: this machine's, or Debian sid's."""
    if shutil.which("apptainer"):
        yield
        return
    if shutil.which("mmdebstrap") is None:
        skip_without("no mmdebstrap (Debian, Ubuntu: apt-get install mmdebstrap)")
    recipe = "\n".join([*APPTAINER_RECIPE, APPTAINER_SCRIPT])
    root = TESTS_CACHE / f"apptainer-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not root.exists():
        TESTS_CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TESTS_CACHE) as folder:
            tarball, unfinished = Path(folder) / "sid.tar", Path(folder) / "sid"
            argv = ["mmdebstrap", *APPTAINER_RECIPE, str(tarball)]
            if (done := subprocess.run(argv, capture_output=True, text=True)).returncode:
                pytest.skip(f"Apptainer of Debian sid cannot be fetched: {done.stderr[-300:]}")
            script = unfinished / "bin/apptainer"
            script.parent.mkdir(parents=True)
            extract = ["tar", "--extract", f"--file={tarball}", f"--directory={unfinished}"]
            subprocess.run([*extract, "./usr", "./etc/apptainer"], check=True)
            # Apptainer looks for it here, because Debian's starter lies one directory deeper.
            (unfinished / "usr/lib/var/lib/apptainer/mnt/session").mkdir(parents=True)
            script.write_text(APPTAINER_SCRIPT)
            script.chmod(0o755)
            unfinished.rename(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
        yield


def build(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run `python containers/build.py ...` with additional environment variables."""
    env = {**os.environ, "COLUMNS": "200", **options.pop("environ", {})}
    return subprocess.run([*BUILD, *arguments], env=env, capture_output=True, text=True, **options)


@pytest.fixture(scope="session")
def cpu_image(base: str) -> str:
    """Return the cpu image's reference. Build it if it does not exist."""
    done = build("image=cpu", f"base={base}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return images.load()["cpu"].local_reference


# ---- Tiny images with their own lock file and one wheel


def stanzas(file: Path, lock: str, *names: str) -> Path:
    """Write a lock with some requirements of another lock, with their hashes."""
    pins = install.requirements(images.FOLDER / lock)
    file.write_text("".join(text for name, text in pins if name in names))
    return file


def lock_of(folder: Path, base: str, name: str = "tiny", **fields) -> Path:
    """Write an images.lock.yaml with one entry, by default with setuptools."""
    repository, _, digest = base.partition("@")
    entry = {
        "base": f"{repository}:1",
        "digest": digest,
        "python": "3",
        **dict.fromkeys(("torch", "rocm", "rccl", "vllm", "aiter", "flash_attn", "trl"), "none"),
        "tools": {},
        "env": {},
        "gfx": ["cpu"],
        "source": "this test",
        "dockerfile": "Dockerfile",
        "locks": ["cpu/tools.lock"],
        "pushed": "unbuilt",
        **fields,
    }
    file = folder / "images.lock.yaml"
    file.write_text(
        "# A comment that stays.\n" + yaml.safe_dump({"images": {name: entry}}, sort_keys=False)
    )
    return file


@pytest.fixture
def remove(engine) -> Iterator[list[str]]:
    """Yield a list. Images whose references a test appends are removed after the test."""
    references: list[str] = []
    yield references
    for reference in references:
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.remove(reference, force=True)


@pytest.fixture
def tiny(base, tmp_path, remove):
    """Return a function that builds a tiny image, for example `tiny("check=true", torch="2.0")`.

    Keywords are fields of its entry. `tiny.reference` is the reference of the last image.
    """

    def call(
        *arguments: str,
        environ: dict[str, str] | None = None,
        on: str = base,
        name: str = "tiny",
        **fields,
    ):
        lock = lock_of(tmp_path, on, name, **fields)
        call.reference = images.load.__wrapped__(lock)[name].local_reference
        remove.append(call.reference)
        return build(f"image={name}", f"lock={lock}", *arguments, environ=environ or {})

    return call


@pytest.fixture
def nothing_is_left(engine) -> Iterator[None]:
    """Check that no build of the test leaves a container or an image without a name of its own."""
    before = leftovers(engine), build_containers(engine)
    yield
    assert leftovers(engine) <= before[0]
    assert build_containers(engine) <= before[1]


def build_containers(engine) -> set[str]:
    """Return the ids of builds' containers in any state."""
    containers = engine.api.containers(all=True, filters={"label": engines.BUILDER})
    return {container["Id"] for container in containers}


def leftovers(engine) -> set[str]:
    """Return the ids of builds' unnamed or intermediate images that no container uses."""
    used = {container["ImageID"] for container in engine.api.containers(all=True)}
    ours = {f"{LABEL}.image", engines.BUILDER}
    dangling = engine.images.list(filters={"dangling": True})
    unnamed = [image for image in dangling if ours & image.labels.keys()]
    return {image.id for image in (*unnamed, *engine.images.list(engines.INSTALLED))} - used


def inside(engine, image: str, *argv: str, **options) -> str:
    """Return the output of a program in an image, without a network."""
    output = engine.containers.run(
        image, argv, remove=True, network_mode="none", stderr=True, **options
    )
    return output.decode()


# ---- A base like AMD's


@pytest.fixture(scope="session")
def fake_rocm(engine, base, registry, tmp_path_factory) -> Iterator[str]:
    """Yield a base like AMD's, with stubs of torch for AMD GPUs and vLLM, without ensurepip."""
    folder = tmp_path_factory.mktemp(FAKE_ROCM)
    (folder / "torch.py").write_text(
        textwrap.dedent("""
            class version: hip, cuda = "7.2.53211", None
            class _C:
                def _cuda_getArchFlags(): return "gfx90a:sramecc+:xnack- gfx942 gfx950"
                def _nccl_version(): return 22709
            class cuda:
                class nccl:
                    def version(): return (2, 27, 9)
            __version__ = "2.13.0+rocm7.2"
        """)
    )
    for package, version in (
        ("torch", "2.13.0+rocm7.2"),
        ("vllm", "0.31.0+rocm723"),
        ("broken", "1.0"),
    ):
        metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        # Real bases have packages like `broken`, with unmet requirements that do not affect ours.
        metadata.write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            "Requires-Dist: not-there==1\n"
        )
    (folder / "Dockerfile").write_text(
        textwrap.dedent(f"""
            FROM {base}
            RUN python3 -m venv /tmp/v \\
                && cp -r /tmp/v/lib/python3*/site-packages/pip /usr/lib/python3/dist-packages/ \\
                && rm -rf /tmp/v /usr/lib/python3*/ensurepip
            COPY . /usr/lib/python3/dist-packages/
            ENTRYPOINT ["vllm", "serve"]
            USER 1000:1000
        """)
    )
    image, _ = engine.images.build(
        path=str(folder), tag=FAKE_ROCM, rm=True, forcerm=True, network_mode="none"
    )
    yield pushed(engine, image.id, f"{registry}/{FAKE_ROCM}")
    engine.images.remove(FAKE_ROCM)


# ---- Responses of an engine as a file


class Chunks(io.RawIOBase):
    """Read an iterator of bytes as a file."""

    def __init__(self, chunks) -> None:
        self.chunks, self.rest = iter(chunks), b""

    def read(self, size: int = -1) -> bytes:
        while len(self.rest) < size and (chunk := next(self.chunks, b"")):
            self.rest += chunk
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken
