"""containers/build.py with a real engine and a registry: what it builds, what it refuses, and that it leaves nothing behind.

`base`, `cpu_image`, `engine` and `registry` are in conftest.py. Most tests build a tiny image (one wheel); the cpu image is built twice.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
import yaml

from containers import engine as engines
from containers import fetch, images, install, verify
from launch.errors import HostError
from tests.conftest import ROOT
from tests.integration.conftest import BUILD, build, pushed

pytestmark = pytest.mark.integration
UID = 12345  # nobody's: a caller without a name, a home or a password
PATIENCE_S = 120
FAKE_ROCM = "fake-rocm"  # a base with what makes AMD's special, except for the kernels


# ---- Tiny images: a lock file of one's own


def stanzas(file: Path, lock: str, *names: str) -> Path:
    """A lock of a few requirements of another, hashes included."""
    pins = [pin for pin in install.read_lock(images.FOLDER / lock, lock) if pin.name in names]
    file.write_text("".join(f"{pin.text}\n" for pin in pins))
    return file


def lock_of(folder: Path, base: str, name: str = "tiny", **fields) -> Path:
    """An images.lock.yaml with one entry: by default what the base is, and setuptools on it."""
    repository, _, digest = base.partition("@")
    entry = {
        "base": repository,
        "digest": digest,
        "python": "3",
        "torch": "none",
        "rocm": "none",
        "vllm": "none",
        "trl": "none",
        "gfx": ["cpu"],
        "size_gb": "unknown",
        "source": "this test",
        "dockerfile": "Dockerfile",
        "locks": ["cpu/tools.lock"],
        "pushed": "unbuilt",
        **fields,
    }
    file = folder / "images.lock.yaml"
    file.write_text("# A comment that stays.\n" + yaml.safe_dump({"images": {name: entry}}, sort_keys=False))
    return file


@pytest.fixture
def remove(engine) -> Iterator[list[str]]:
    """References that are removed when the test is over."""
    references: list[str] = []
    yield references
    for reference in references:
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.remove(reference, force=True)


@pytest.fixture
def tiny(base, tmp_path, remove):
    """`tiny("check=true", torch="2.0")` builds from a lock whose one entry has these fields; it knows its reference."""

    def call(*arguments: str, environ: dict[str, str] | None = None, on: str = base, name: str = "tiny", **fields):
        lock = lock_of(tmp_path, on, name, **fields)
        call.reference = images.load.__wrapped__(lock)[name].local_reference
        remove.append(call.reference)
        return build(f"image={name}", f"lock={lock}", *arguments, environ=environ or {})

    return call


@pytest.fixture(autouse=True)
def nothing_is_left(engine) -> Iterator[None]:
    """No container of a build, and no image without a name that one has made."""
    before = unnamed(engine)
    yield
    assert unnamed(engine) <= before
    assert engine.containers.list(all=True, filters={"label": f"{engines.ROLE}=build"}) == []


def unnamed(engine) -> set[str]:
    return {image.id for image in engine.images.list(filters={"dangling": True, "label": engines.BUILD})}


def tree(engine, image: str) -> dict[str, tuple]:
    """Path -> everything about it but its times, of all that a container of the image sees."""
    container = engine.containers.create(image, ["true"])
    found = {}
    try:
        with tarfile.open(fileobj=Chunks(container.export(chunk_size=1 << 20)), mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                digest = hashlib.file_digest(content, "sha256").hexdigest() if content else ""
                found[member.name] = (member.type, oct(member.mode), member.uid, member.gid, member.linkname, member.size, digest)
    finally:
        container.remove()
    return found


class Chunks(io.RawIOBase):
    """An iterator of bytes, read as a file."""

    def __init__(self, chunks) -> None:
        self.chunks, self.rest = iter(chunks), b""

    def read(self, size: int = -1) -> bytes:
        while len(self.rest) < size and (chunk := next(self.chunks, b"")):
            self.rest += chunk
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken


def inside(engine, image: str, *argv: str, **options) -> str:
    """Output of a program in an image, without a network."""
    output = engine.containers.run(image, argv, remove=True, network_mode="none", stderr=True, **options)
    return output.decode()


# ---- The cpu image


def test_the_cpu_image_is_what_the_lock_says(engine, cpu_image, base):
    entry = images.load()["cpu"]
    found = json.loads(inside(engine, cpu_image, "python", "/opt/recipes/probe.py"))
    lies, _ = verify.compare(entry, found)
    assert {lie.field for lie in lies} <= {"python"}  # the base's own, and this base is not the lock's
    assert (found["hip"], found["cuda"], found["gfx"], found["vllm"]) == (None, None, [], None)
    labels = engine.images.get(cpu_image).labels
    assert json.loads(labels["io.rocm-recipes.probe"]) == found
    assert labels["org.opencontainers.image.base.digest"] == base.partition("@")[2]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", labels["org.opencontainers.image.revision"])
    assert labels["io.rocm-recipes.tag"] == labels["org.opencontainers.image.version"] == entry.tag
    assert labels["io.rocm-recipes.torch"] == found["torch"]


def test_our_packages_come_first_and_the_base_stays_as_it_was(engine, cpu_image, base):
    ask = "import importlib.metadata as m; print(sorted(d.name for d in m.distributions()))"
    assert "'trl'" in inside(engine, cpu_image, "python", "-c", ask)
    own = inside(engine, base, "python3", "-c", ask)
    assert inside(engine, cpu_image, "/usr/bin/python3", "-c", ask) == own
    assert "reasoning_gym" in inside(engine, cpu_image, "python", "-W", "ignore", "-c", "import reasoning_gym; print(reasoning_gym)")


def test_a_second_build_does_nothing(engine, cpu_image, base):
    before = {image.id for image in engine.images.list(all=True)}
    began = time.monotonic()
    done = build("image=cpu", f"base={base}")
    took = time.monotonic() - began
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{cpu_image} is up to date")
    assert "..." not in done.stdout  # no phase
    assert {image.id for image in engine.images.list(all=True)} == before
    assert took < 2, f"{took:.1f} s"


def test_two_builds_from_scratch_have_the_same_files(engine, cpu_image, base, tmp_path):
    first_id, first = engine.images.get(cpu_image).id, tree(engine, cpu_image)
    done = build("image=cpu", f"base={base}", "no_cache=true")
    assert done.returncode == 0, done.stdout + done.stderr
    second_id, second = engine.images.get(cpu_image).id, tree(engine, cpu_image)
    differing = sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))
    kinds = {kind: sum(entry[0] == kind for entry in first.values()) for kind in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)}
    report = {
        "compared": len(first),
        "files": kinds[tarfile.REGTYPE],
        "folders": kinds[tarfile.DIRTYPE],
        "links": kinds[tarfile.SYMTYPE],
        "bytes": sum(entry[5] for entry in first.values()),
        "differing": {path: [first.get(path), second.get(path)] for path in differing},
    }
    (tmp_path / "two_builds.json").write_text(json.dumps(report, indent=1, default=str))
    print(f"\ntwo builds: {len(first)} paths compared, {len(differing)} differ\n{done.stdout}")
    assert first_id != second_id
    assert not differing, f"{len(differing)} of {len(first)} paths differ:\n" + "\n".join(
        f"{p}: {first.get(p)} {second.get(p)}" for p in differing
    )
    assert len(first) > 20000


# ---- What a build refuses


def test_a_corrupted_hash_fails_before_there_is_an_image(tiny, engine, tmp_path):
    lock = stanzas(tmp_path / "wrong.lock", "cpu/tools.lock", "setuptools")
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, lock.read_text()))
    done = tiny(locks=[str(lock)])
    assert done.returncode == 4
    assert "0-wrong.lock: a file has another hash than the lock states, and is not used:\nsetuptools==" in done.stderr
    assert "Expected sha256 " + "0" * 64 in done.stderr
    assert re.search(r"Got +[0-9a-f]{64}", done.stderr)
    assert engines.find(engine, tiny.reference) is None


def test_a_file_that_cannot_be_had_is_named_with_the_remedy(tiny, tmp_path):
    lock = tmp_path / "missing.lock"
    lock.write_text(f"rocm-recipes-has-no-such-package==1.0 --hash=sha256:{'0' * 64}\n")
    done = tiny(locks=[str(lock)], environ={"PIP_NO_INDEX": "1"})
    assert done.returncode == 3
    assert "0-missing.lock: pip failed:" in done.stderr
    assert "rocm-recipes-has-no-such-package==1.0" in done.stderr
    assert "PIP_FIND_LINKS=<folder>" in done.stderr


def test_a_lock_that_lacks_a_requirement_fails_the_build(tiny, engine, tmp_path):
    lock = stanzas(tmp_path / "partial.lock", "cpu/requirements.lock", "markdown-it-py")
    done = tiny(locks=["cpu/tools.lock", str(lock)])
    assert done.returncode == 4
    assert re.search(r"\nmarkdown-it-py \S+ needs mdurl\S*, which is not in the image\nLock what is missing", done.stderr)
    assert Path(re.search(r"All of its output: (.+)", done.stderr)[1]).is_file()
    assert engines.find(engine, tiny.reference) is None


@pytest.fixture(scope="module")
def fake_rocm(engine, base, registry, tmp_path_factory) -> Iterator[str]:
    """A base as AMD's are: a torch of its own for AMD GPUs, a vLLM, a pip and no ensurepip. Only the kernels are missing."""
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
    for package, version in (("torch", "2.13.0+rocm7.2"), ("vllm", "0.31.0+rocm723"), ("broken", "1.0")):
        metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        # `broken` is what bases are like: nothing of ours needs it, so its own needs are none of ours.
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: not-there==1\n")
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
    image, _ = engine.images.build(path=str(folder), tag=FAKE_ROCM, rm=True, forcerm=True, network_mode="none")
    yield pushed(engine, image.id, f"{registry}/{FAKE_ROCM}")
    engine.images.remove(FAKE_ROCM)


TRUTH = {"torch": "2.13", "rocm": "7.2.0", "vllm": "0.31.0", "gfx": ["gfx90a", "gfx942"]}


def test_an_image_on_a_rocm_base_keeps_its_torch(tiny, fake_rocm, engine):
    done = tiny(on=fake_rocm, **TRUTH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python 3." in done.stdout
    assert "torch 2.13.0+rocm7.2, hip 7.2.53211, vllm 0.31.0+rocm723, rccl 2.27.9, gfx90a gfx942 gfx950" in done.stdout
    assert inside(engine, tiny.reference, "cat", "/opt/recipes/constraints.txt").split() == [
        "torch==2.13.0+rocm7.2",
        "vllm==0.31.0+rocm723",
    ]
    assert engine.images.get(tiny.reference).labels["io.rocm-recipes.gfx"] == "gfx90a,gfx942"
    shown = "import torch, setuptools; print(torch.__file__, setuptools.__file__)"
    torch, setuptools = inside(engine, tiny.reference, "python", "-c", shown).split()
    assert torch == "/usr/lib/python3/dist-packages/torch.py"
    assert setuptools.startswith("/opt/recipes/")
    with pytest.raises(docker.errors.ContainerError, match=r"Cannot install torch==2\.14\.0 because .* conflicting"):
        inside(engine, tiny.reference, "python3", "-m", "pip", "install", "--no-index", "torch==2.14.0")


@pytest.mark.parametrize("pinned", ["2.14.0", "2.13.0+cpu"])
def test_a_lock_that_would_replace_the_bases_torch_fails_the_build(tiny, fake_rocm, engine, tmp_path, pinned):
    lock = tmp_path / "torch.lock"
    lock.write_text(f"torch=={pinned} --hash=sha256:{'0' * 64}\n")
    done = tiny(on=fake_rocm, **TRUTH, locks=["cpu/tools.lock", str(lock)])
    assert done.returncode == 4
    assert f"1-torch.lock pins torch=={pinned}, and the image holds torch 2.13.0+rocm7.2" in done.stderr
    assert "The base's own build is never replaced" in done.stderr
    assert engines.find(engine, tiny.reference) is None


def test_the_build_itself_refuses_too(tiny, fake_rocm, engine, tmp_path, monkeypatch):
    """Files that were fetched for another base of the same Python are there already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = tmp_path / "torch.lock"
    lock.write_text(f"torch==2.14.0 --hash=sha256:{'0' * 64}\n")
    image = images.load.__wrapped__(lock_of(tmp_path, fake_rocm, locks=[str(lock)]))["tiny"]
    fetch.folder_for(image, fetch.inspect(engine, fake_rocm)).mkdir(parents=True)
    done = tiny(on=fake_rocm, **TRUTH, locks=[str(lock)])
    assert done.returncode == 4
    assert done.stderr.startswith("The build of tiny failed:\n0-torch.lock pins torch==2.14.0, and the image holds torch 2.13.0+rocm7.2\n")
    assert engines.find(engine, tiny.reference) is None


def test_a_lock_that_names_the_bases_own_torch_leaves_it_there(tiny, fake_rocm, engine, tmp_path):
    lock = tmp_path / "torch.lock"
    lock.write_text(f"torch==2.13.0 --hash=sha256:{'0' * 64}\n")
    done = tiny(on=fake_rocm, **TRUTH, locks=["cpu/tools.lock", str(lock)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2.13.0+rocm7.2" in inside(engine, tiny.reference, "python", "-c", "import torch; print(torch.__version__)")


def test_a_lock_that_lies_fails_and_leaves_no_image(tiny, fake_rocm, engine):
    done = tiny(on=fake_rocm, torch="2.12.0", rocm="6.4.1", vllm="none", trl="1.16.0", gfx=["gfx942", "gfx1100"])
    assert done.returncode == 4
    for line in (
        "torch: the lock says 2.12.0, the image holds 2.13.0+rocm7.2",
        "rocm: the lock says 6.4.1, the image holds 7.2",
        "vllm: the lock says none, the image holds 0.31.0+rocm723",
        "trl: the lock says 1.16.0, the image holds none",
        "gfx: the lock says gfx942, gfx1100, the image holds gfx90a, gfx942, gfx950",
    ):
        assert f"  {line}\n" in done.stderr
    assert "python:" not in done.stderr
    assert engines.find(engine, tiny.reference) is None


def test_what_the_lock_does_not_know_is_said(tiny, fake_rocm):
    done = tiny(on=fake_rocm, **{**TRUTH, "vllm": "unknown"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: vllm is unknown to the lock, the image holds 0.31.0+rocm723" in done.stdout


def test_an_image_of_ours_is_no_base(tiny, cpu_image):
    done = tiny(f"base={cpu_image}", digest="unverified")
    assert done.returncode == 4
    assert "the base has a /opt/recipes already: it is an image built by this program" in done.stderr


# ---- Bases, registries, check


def test_a_pushed_image_is_written_into_the_lock_and_comes_back_by_its_digest(tiny, engine, registry, tmp_path, remove):
    assert tiny(f"push={registry}/mine").returncode == 0
    lock = tmp_path / "images.lock.yaml"
    reference = images.load.__wrapped__(lock)["tiny"].pushed
    assert re.fullmatch(rf"{registry}/mine/tiny@sha256:[0-9a-f]{{64}}", reference)
    assert lock.read_text().startswith("# A comment that stays.\n")
    written = lock.read_text()
    again = build("image=tiny", f"lock={lock}", f"push={registry}/mine")
    assert f"was already {reference}" in again.stdout
    assert lock.read_text() == written
    pushed_id = engine.images.get(tiny.reference).id
    engine.images.remove(pushed_id, force=True)
    assert engines.find(engine, reference) is None
    remove.append(reference)
    said: list[str] = []
    assert engines.have(engine, reference, "unknown", said.append).id == pushed_id


def test_a_push_that_is_refused_says_so_and_leaves_the_lock(tiny, tmp_path):
    done = tiny("push=127.0.0.1:1/mine")
    assert done.returncode == 3
    assert "127.0.0.1:1/mine/tiny:" in done.stderr
    assert "cannot be pushed:" in done.stderr
    assert "docker login" in done.stderr
    assert images.load.__wrapped__(tmp_path / "images.lock.yaml")["tiny"].pushed == "unbuilt"


def test_check_builds_nothing_and_says_how_things_are(tiny, fake_rocm, engine):
    absent = tiny("check=true")
    assert absent.returncode == 3
    assert "entry tiny is in order; the image rocm-recipes/tiny:" in absent.stderr
    assert "python containers/build.py image=tiny" in absent.stderr
    assert tiny().returncode == 0
    before = {image.id for image in engine.images.list(all=True)}
    good = tiny("check=true")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, f"{tiny.reference} is what the lock says")
    lying = tiny("check=true", trl="1.16.0")
    assert lying.returncode == 4
    assert "trl: the lock says 1.16.0, the image holds none" in lying.stderr
    up_to_date = tiny(trl="1.16.0")  # nothing to build, and still a lie
    assert (up_to_date.returncode, up_to_date.stderr) == (4, lying.stderr)
    other = tiny("check=true", f"base={fake_rocm}", digest="unverified")
    assert {image.id for image in engine.images.list(all=True)} == before
    assert other.returncode == 3  # without a digest the tag is another
    assert tiny("check=true").returncode == 0


def test_another_base_is_another_image(tiny, base, fake_rocm):
    open_base = {"digest": "unverified", "torch": "unknown", "rocm": "unknown", "vllm": "unknown"}
    first = tiny(f"base={base}", **open_base)
    assert f"pull   {base} (unverified)" in first.stdout
    check = tiny(f"base={fake_rocm}", "check=true", **open_base)
    assert check.returncode == 4
    assert f"it was built on {base}" in check.stderr
    second = tiny(f"base={fake_rocm}", **open_base)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"is built anew: it was built on {base}" in second.stdout
    assert "note: torch is unknown to the lock, the image holds 2.13.0+rocm7.2" in second.stdout
    assert "is up to date" in tiny(f"base={fake_rocm}", **open_base).stdout


def test_a_base_by_another_name_is_the_same_base(tiny, engine, base, registry):
    assert tiny().returncode == 0
    mirrored = pushed(engine, base, f"{registry}/mirror/debian")
    assert mirrored.partition("@")[2] == base.partition("@")[2]
    assert "is up to date" in tiny(f"base={mirrored}").stdout


ZEROS = "sha256:" + "0" * 64


def test_a_base_that_is_not_there(tiny, registry):
    done = tiny(f"base={registry}/nothing:1", digest="unverified")
    assert done.returncode == 3
    assert f"The image {registry}/nothing:1 is not here and cannot be pulled: " in done.stderr
    assert "docker login" in done.stderr
    assert "base=<reference>" in done.stderr


def test_a_registry_that_does_not_answer(tiny):
    done = tiny("base=127.0.0.1:1/debian:1", digest="unverified")
    assert done.returncode == 3
    assert "The image 127.0.0.1:1/debian:1 is not here and cannot be pulled: " in done.stderr
    assert "refused" in done.stderr


def test_a_base_with_another_digest(tiny, base, fake_rocm, registry):
    by_digest = tiny(f"base={fake_rocm}")
    assert by_digest.returncode == 3
    assert f"pins the base of tiny to {base.partition('@')[2]}, and base={fake_rocm} names another digest." in by_digest.stderr
    by_tag = tiny(f"base={registry}/{FAKE_ROCM}:1")
    assert by_tag.returncode == 3
    assert f"base={registry}/{FAKE_ROCM}:1 has {fake_rocm.partition('@')[2]}." in by_tag.stderr


def test_a_base_larger_than_the_disk(tiny, registry):
    done = tiny(f"base={registry}/nothing:1", digest="unverified", size_gb=1_000_000)
    assert done.returncode == 3
    assert re.search(r"takes at least 1e\+06 GB, and .+, where the engine keeps images, has [\d.]+ GB free", done.stderr)


def test_a_base_without_python(tiny, engine, registry, remove):
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"))
    engine.api.import_image_from_data(empty.getvalue(), f"{registry}/empty", "1", changes=['CMD ["bash"]'])
    done = tiny(f"base={registry}/empty:1", digest="unverified")
    assert done.returncode == 3
    assert f"The base {registry}/empty:1 does not start: " in done.stderr
    assert "It needs a python3 in its PATH." in done.stderr


# ---- The engine


def test_no_engine(tiny, tmp_path):
    done = tiny(environ={"DOCKER_HOST": f"unix://{tmp_path}/absent.sock"})
    assert done.returncode == 3
    assert f"No docker engine answers at unix://{tmp_path}/absent.sock. Install or start one" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_socket_that_is_not_for_this_user_names_the_group(base, tmp_path):
    lock = lock_of(tmp_path, base)
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0)
        done = as_somebody(f"image=tiny lock={lock}".split(), tmp_path, groups=[], DOCKER_HOST=f"unix://{path}")
    assert done.returncode == 3
    assert f"The docker engine's socket (unix://{path}) is not open to this user." in done.stderr
    assert "sudo usermod -aG docker $USER" in done.stderr


def test_an_engine_that_does_not_see_the_files_of_this_machine(engine, base, tmp_path):
    config = engine.api.create_host_config(mounts=[fetch.bind(tmp_path / "absent", "/mnt")])
    with pytest.raises(HostError, match="does not see this machine's files .* unset DOCKER_HOST"):
        engines.run(engine, base, ["true"], print, host_config=config)


def as_somebody(arguments: list[str], home: Path, groups: list[int], **environ: str) -> subprocess.CompletedProcess:
    """build.py as a user who is not root, with a home of its own."""
    identity, python = {}, sys.executable
    if os.getuid() == 0:
        identity = {"user": UID, "group": UID, "extra_groups": groups}
        for folder in (home, *home.iterdir()):
            os.chown(folder, UID, UID)
        for parent in home.parents:  # pytest's own folders are the user's alone
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & stat.S_IXOTH:
                parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
        # The environment's own python may stand in root's home.
        version = "python{}.{}".format(*sys.version_info[:2])
        python = next(p for p in (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin")) if p and runs(p, identity))
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    env = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
    env |= {"HOME": str(home), "COLUMNS": "200", "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", **environ}
    return subprocess.run([python, BUILD[1], *arguments], env=env, cwd=home, capture_output=True, text=True, **identity)


def runs(python: str, identity: dict) -> bool:
    try:
        return subprocess.run([python, "-c", f"open({str(ROOT / 'README.md')!r})"], capture_output=True, **identity).returncode == 0
    except OSError:
        return False


def test_a_user_who_is_not_root_builds_and_owns_what_it_leaves(engine, base, tmp_path, remove):
    lock = lock_of(tmp_path, base)
    remove.append(images.load.__wrapped__(lock)["tiny"].local_reference)
    done = as_somebody(f"image=tiny lock={lock}".split(), tmp_path, groups=[Path("/var/run/docker.sock").stat().st_gid])
    assert done.returncode == 0, done.stdout + done.stderr
    left = list((tmp_path / ".cache").rglob("*"))
    assert [path.name for path in left if path.suffix == ".whl"]
    assert {path.stat().st_uid for path in left} == {UID if os.getuid() == 0 else os.getuid()}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(engine, base, tmp_path, sent):
    lock = lock_of(tmp_path, base)
    process = subprocess.Popen([*BUILD, "image=tiny", f"lock={lock}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not step_of_a_build(engine):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    process.send_signal(sent)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    assert said == "\ninterrupted: run it again, what was fetched stays\n"
    assert not step_of_a_build(engine)
    assert engines.find(engine, images.load.__wrapped__(lock)["tiny"].local_reference) is None


def step_of_a_build(engine) -> list:
    """A container in which the builder runs a step: it has the labels of the stage."""
    found = engine.api.containers(filters={"label": engines.BUILD})
    return [container for container in found if container["Labels"][engines.BUILD] != engines.COMPLETE]


# ---- Secrets

PASSWORD, PROXY_PASSWORD = "sentinel-index-password", "sentinel-proxy-password"
BUNDLE = "sentinel-certificate-authority"


@contextlib.contextmanager
def index_with_a_password(files: Path) -> Iterator[str]:
    """A package index on this machine that serves a folder of wheels to who knows the password."""
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


def test_secrets_of_the_host_end_nowhere(tiny, engine, tmp_path):
    wheels = tmp_path / "wheels"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--require-hashes",
            "-d",
            wheels,
            "-r",
            ROOT / "containers/cpu/tools.lock",
        ],
        check=True,
    )
    bundle = tmp_path / "authority.pem"
    bundle.write_text(BUNDLE)
    cache = tmp_path / "cache"
    with index_with_a_password(wheels) as server:
        environ = {
            "PIP_INDEX_URL": f"http://me:{PASSWORD}@{server}/simple",
            "HTTPS_PROXY": f"http://me:{PROXY_PASSWORD}@127.0.0.1:1",
            "PIP_CERT": str(bundle),
            "PIP_CONFIG_FILE": os.devnull,  # nothing else that could have the wheel
            "XDG_CACHE_HOME": str(cache),
            "TMPDIR": str(tmp_path),
        }
        stripped = {name: "" for name in os.environ if name.startswith("PIP_")}
        done = tiny(environ={**stripped, **environ})
    assert done.returncode == 0, done.stdout + done.stderr  # the index was used: without the password it gives nothing
    image = engine.images.get(tiny.reference)
    container = engine.containers.create(image.id, ["true"])
    try:
        searched = {
            "what a person sees": (done.stdout + done.stderr).encode(),
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
    print("\n" + "\n".join(f"searched: {place}, {len(content)} bytes" for place, content in searched.items()))
    assert len(searched["docker save"]) > len(searched["files of a container"]) > 100_000_000
    assert any(place.startswith("cache/rocm-recipes/logs/") for place in searched)
    for secret in (PASSWORD, PROXY_PASSWORD, BUNDLE, base64.b64encode(f"me:{PASSWORD}".encode()).decode()):
        assert [place for place, content in searched.items() if secret.encode() in content] == []
    assert list(tmp_path.glob("rocm-recipes-*")) == []  # the folder that held them


def layers(image) -> Iterator[bytes]:
    """`docker save`, every layer of it unpacked."""
    with tarfile.open(fileobj=Chunks(image.save()), mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            data = content.read() if content else b""
            yield gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data  # newer engines save compressed layers


# ---- The sandbox


@pytest.fixture(scope="module")
def sandbox(engine, base) -> Iterator[str]:
    done = build("image=sandbox", f"base={base}")
    assert done.returncode == 0, done.stdout + done.stderr
    reference = images.load()["sandbox"].local_reference
    yield reference
    engine.images.remove(reference)


def test_the_sandbox_runs_python_as_nobody(engine, sandbox):
    shown = "import os, sys; print(os.getuid(), os.getgid(), os.getgroups(), sum(range(5)), sys.version_info[0])"
    assert inside(engine, sandbox, "python", "-c", shown) == "65534 65534 [65534] 10 3\n"


def test_the_sandbox_cannot_install_anything(engine, sandbox):
    modules = "import importlib.util as u; print([m for m in ('pip', 'ensurepip', 'setuptools', 'wheel', 'torch') if u.find_spec(m)])"
    assert inside(engine, sandbox, "python", "-c", modules) == "[]\n"
    assert inside(engine, sandbox, "sh", "-c", "command -v pip pip3 sudo || echo none") == "none\n"
    assert inside(engine, sandbox, "sh", "-c", "find / -xdev -perm /6000 -type f 2>/dev/null; echo end") == "end\n"


def test_the_sandbox_has_no_network(engine, sandbox):
    code = "import os, socket; print(os.listdir('/sys/class/net')); socket.create_connection(('1.1.1.1', 53), 5)"
    with pytest.raises(docker.errors.ContainerError, match="Network is unreachable") as failure:
        inside(engine, sandbox, "python", "-c", code)
    assert failure.value.exit_status == 1
    assert inside(engine, sandbox, "python", "-c", "import os; print(os.listdir('/sys/class/net'))") == "['lo']\n"


def test_the_sandbox_holds_python_alone(engine, sandbox, base):
    found = json.loads(inside(engine, sandbox, "python", "/opt/recipes/probe.py"))
    assert verify.compare(images.load()["sandbox"], {**found, "python": images.load()["sandbox"].python})[0] == []
    assert found["packages"] == 0
    assert "is up to date" in build("image=sandbox", f"base={base}").stdout
