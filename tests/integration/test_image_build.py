"""Test containers/build.py with a real engine and a registry.

`base`, `cpu_image`, `engine`, `registry` and `tiny` are in conftest.py. The cpu image is built at
most once; all else is tiny.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import docker
import pytest

from containers import build as builder
from containers import engine as engines
from containers import images, install
from tests.integration.conftest import (
    BUILD,
    FAKE_ENTRY,
    FAKE_ROCM,
    Chunks,
    build,
    build_containers,
    inside,
    lock_of,
    stanzas,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_is_left")]
PATIENCE_S = 120


def tree(engine, image: str) -> dict[str, dict]:
    """Return path -> metadata and contents, without times, of all files in the image."""
    container = engine.containers.create(image, ["true"])
    entries = {}
    try:
        with tarfile.open(
            fileobj=Chunks(container.export(chunk_size=1 << 20)), mode="r|"
        ) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                digest = hashlib.file_digest(content, "sha256").hexdigest() if content else ""
                entries[member.name] = {**member.get_info(), "mtime": 0, "chksum": digest}
    finally:
        container.remove()
    return entries


# ---- The cpu image


def test_cpu_image_matches_lock_and_keeps_base(engine, cpu_image, base):
    entry = images.load()["cpu"]
    probed = builder.probe(engine, cpu_image)
    builder.compare(entry, probed)
    assert [probed.get(name) for name in ("hip", "gfx", "vllm")] == [None, "", None]
    labels = engine.images.get(cpu_image).labels
    assert json.loads(labels["io.rocm-recipes.probe"]) == probed
    assert labels["org.opencontainers.image.base.digest"] == base.partition("@")[2]
    assert labels["io.rocm-recipes.tag"] == entry.tag

    names = "import importlib.metadata as m; print(sorted(d.name for d in m.distributions()))"
    assert "'trl'" in inside(engine, cpu_image, "python", "-c", names)
    base_names = inside(engine, base, "python3", "-c", names)
    assert inside(engine, cpu_image, "/usr/bin/python3", "-c", names) == base_names
    code = "import reasoning_gym; print(reasoning_gym)"
    assert "reasoning_gym" in inside(engine, cpu_image, "python", "-W", "ignore", "-c", code)

    before = {image.id for image in engine.images.list(all=True)}
    done = build("image=cpu", f"base={base}")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{cpu_image} is up to date")
    assert len(done.stdout.splitlines()) == 2  # and a note about Python
    assert {image.id for image in engine.images.list(all=True)} == before


def test_builds_are_reproducible(engine, tiny, tmp_path):
    """Install a wheel with machine code, and antlr4, which is built from source."""
    names = ["psutil", "antlr4-python3-runtime"]
    some = stanzas(tmp_path / "some.lock", "cpu/requirements.lock", *names)
    locks = ["cpu/tools.lock", str(some)]
    assert tiny(locks=locks).returncode == 0
    first_id, first = engine.images.get(tiny.reference).id, tree(engine, tiny.reference)
    done = tiny("no_cache=true", locks=locks)
    assert done.returncode == 0, done.stdout + done.stderr
    second_id, second = engine.images.get(tiny.reference).id, tree(engine, tiny.reference)
    assert first_id != second_id
    assert len(first) > 5000
    paths = sorted(first.keys() | second.keys())
    assert [(p, first.get(p), second.get(p)) for p in paths if first.get(p) != second.get(p)] == []


def test_buildkit_builds_the_same_image(engine, tiny):
    built = []
    # A docker in another folder may lack the plugin buildx, which it needs for BuildKit.
    environ = {"PATH": f"/usr/bin:{os.environ['PATH']}"}
    for arguments in ([], ["builder=buildkit", "no_cache=true"]):
        done = tiny(*arguments, environ=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        image = engine.images.get(tiny.reference)
        settings = [image.attrs["Config"][key] for key in ("Env", "Cmd", "Entrypoint", "Labels")]
        built.append((settings, tree(engine, image.id)))
    assert "exporting to image" in done.stderr  # by BuildKit
    assert built[0] == built[1]
    assert image.tags == [tiny.reference]


# ---- Bases, registries, check


def test_push_writes_digest_for_later_pulls(tiny, engine, registry, tmp_path, remove):
    assert tiny(f"push={registry}/mine").returncode == 0
    lock = tmp_path / "images.lock.yaml"
    image = images.load.__wrapped__(lock)["tiny"]
    reference = image.reference
    assert re.fullmatch(rf"{registry}/mine/tiny@sha256:[0-9a-f]{{64}}", reference)
    assert lock.read_text().startswith("# A comment that stays.\n")
    written = lock.read_text()
    again = build("image=tiny", f"lock={lock}", f"push={registry}/mine")
    assert again.stdout.endswith(f"images.tiny.pushed is {image.pushed}\n")
    assert lock.read_text() == written
    pushed_id = engine.images.get(tiny.reference).id
    engine.images.remove(pushed_id, force=True)
    assert engines.find(engine, reference) is None
    remove.append(reference)
    assert engines.pull(engine, reference, print).id == pushed_id


@pytest.mark.parametrize("had_tag", [False, True])
def test_failed_push_leaves_no_tag(tiny, engine, remove, had_tag):
    assert tiny().returncode == 0
    repository, _, tag = tiny.reference.rpartition(":")
    name = f"127.0.0.1:1/mine/tiny:{tag}"
    remove.append(name)
    if had_tag:
        engine.images.get(tiny.reference).tag(name)
    done = tiny("push=127.0.0.1:1/mine")  # no registry
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr
    assert (engines.find(engine, name) is not None) == had_tag
    assert engines.find(engine, tiny.reference)


def test_check(tiny, fake_rocm, engine):
    absent = tiny("check=true")
    assert absent.returncode == 3
    assert "remove check=true" in absent.stderr
    assert tiny().returncode == 0
    before = {image.id for image in engine.images.list(all=True)}
    good = tiny("check=true")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (
        0,
        f"{tiny.reference} matches the lock",
    )
    contradiction = tiny("check=true", trl="1.16.0")
    assert contradiction.returncode == 4
    assert "trl: the lock says 1.16.0, the image has none" in contradiction.stderr
    up_to_date = tiny(trl="1.16.0")  # nothing to build, but the lock is still wrong
    assert (up_to_date.returncode, up_to_date.stderr) == (4, contradiction.stderr)
    other = tiny("check=true", f"base={fake_rocm}", digest="unverified")
    assert {image.id for image in engine.images.list(all=True)} == before
    assert other.returncode == 3  # without a digest, the image has another tag
    assert tiny("check=true").returncode == 0


def test_rebuild_on_a_local_base_that_changed(tiny, base, engine, remove):
    """The base is not from a registry, so only its local id tells that it changed."""
    name = "rocm-recipes-test/local:1"
    remove.append(name)
    ids = []
    for number in (1, 2):
        lines = f"FROM {base}\nLABEL number={number}\n"
        built = engine.images.build(fileobj=io.BytesIO(lines.encode()), tag=name, rm=True)[0]
        remove.append(built.id)
        done = tiny(f"base={name}", digest="unverified")
        assert done.returncode == 0, done.stdout + done.stderr
        ids.append(engine.images.get(tiny.reference).labels["org.opencontainers.image.base.digest"])
        assert ids[-1] == built.id
    assert f"it was built on {name} ({ids[0]}), not on {name}" in done.stdout
    assert "is up to date" in tiny(f"base={name}", digest="unverified").stdout


# ---- Interruptions and leftovers


def interrupted(engine, lock: Path, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a build that has a container; return its exit code and errors."""
    process = subprocess.Popen(
        [*BUILD, "image=tiny", f"lock={lock}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before, deadline = build_containers(engine), time.monotonic() + PATIENCE_S
    while build_containers(engine) <= before:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    process.send_signal(number)
    _, error = process.communicate(timeout=PATIENCE_S)
    return process.returncode, error


def test_interrupted_build_leaves_nothing(engine, base, tmp_path):
    lock = lock_of(tmp_path, base)
    code, error = interrupted(engine, lock, signal.SIGTERM)
    assert code == 75
    assert error.startswith("\ninterrupted; run the same command again")
    assert engines.find(engine, images.load.__wrapped__(lock)["tiny"].local_reference) is None


def test_next_build_removes_what_a_killed_build_left(engine, base, tiny, tmp_path):
    before = build_containers(engine)
    interrupted(engine, lock_of(tmp_path, base), signal.SIGKILL)
    (left,) = build_containers(engine) - before
    image = engine.containers.get(left).commit(engines.INSTALLED, "left").id
    assert tiny().returncode == 0
    assert build_containers(engine) == before
    assert engines.find(engine, image) is None


def test_next_build_removes_the_image_of_a_killed_build(engine, base, tiny, tmp_path):
    """The engine finishes a COPY after its client is gone. Here, the client ends after the COPY."""
    dockerfile = tmp_path / "slow/Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text((images.FOLDER / "Dockerfile").read_text() + "RUN sleep 600\n")
    lock = lock_of(dockerfile.parent, base, dockerfile=str(dockerfile))
    before = unnamed(engine)
    process = subprocess.Popen([*BUILD, "image=tiny", f"lock={lock}"], stdout=subprocess.DEVNULL)
    wait_until(lambda: unnamed(engine) - before, process)
    process.kill()
    process.wait()
    assert tiny().returncode == 0
    assert unnamed(engine) <= before


def unnamed(engine) -> set[str]:
    """Return the ids of builds' images that have no name."""
    filters = {"label": engines.BUILDER, "dangling": True}
    return {image.id for image in engine.images.list(filters=filters)}


def test_sweep_keeps_images_that_are_named_in_use_or_of_others(engine, base):
    pids = (os.getpid(), os.getpid(), os.getpid(), os.getppid())  # this process, and another
    named, used, left, running = made = [
        make_image(engine, base, f"{engines.INSTALLED}:{number}", f"{socket.gethostname()}/{pid}")
        for number, pid in enumerate(pids)
    ]
    engine.images.get(named).tag("rocm-recipes-test/named", "1")
    container = engine.containers.create(used, ["true"], labels={engines.BUILDER: "of/1"})
    engines.sweep(engine)
    assert [bool(engines.find(engine, image)) for image in made] == [True, True, False, True]
    container.remove()
    engine.images.remove("rocm-recipes-test/named:1")
    engines.sweep(engine)
    assert [bool(engines.find(engine, image)) for image in made] == [False, False, False, True]
    engine.images.remove(running)


def make_image(engine, base: str, name: str, builder: str) -> str:
    """Make an image with the name and the label of a build's."""
    lines = f"FROM {base}\nLABEL name={name} {engines.BUILDER}={builder}\n"
    return engine.images.build(fileobj=io.BytesIO(lines.encode()), tag=name, rm=True)[0].id


# ---- Failures


def test_failed_build_leaves_no_image(tiny, base, fake_rocm, engine, tmp_path):
    wrong_hash = stanzas(tmp_path / "wrong.lock", "cpu/tools.lock", "setuptools")
    zeros = "sha256:" + "0" * 64
    wrong_hash.write_text(re.sub(r"sha256:[0-9a-f]{64}", zeros, wrong_hash.read_text()))
    too_new = stanzas(tmp_path / "liger.lock", "cpu/liger.lock", "liger-kernel")
    for base_image, fields, reason in (
        (base, {"locks": [str(wrong_hash)]}, "PACKAGES DO NOT MATCH THE HASHES"),
        (
            fake_rocm,
            {**FAKE_ENTRY, "locks": ["cpu/tools.lock", str(too_new)]},
            "requires triton, which is not installed",
        ),
        (
            fake_rocm,
            {**FAKE_ENTRY, "rocm": "6.4.1"},
            "rocm: the lock says 6.4.1, the image has 7.2",
        ),
    ):
        done = tiny(on=base_image, **fields)
        assert done.returncode == 4
        assert reason in done.stderr
        assert engines.find(engine, tiny.reference) is None


@pytest.mark.parametrize("retries", ["0", "1"])
def test_build_behind_a_dead_proxy(tiny, retries):
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "", "PIP_RETRIES": retries}
    done = tiny("no_cache=true", environ=nowhere | {"https_proxy": "", "no_proxy": ""})
    assert done.returncode == 3
    assert "The proxy failed" in done.stderr


def test_image_keeps_torch_of_rocm_base(tiny, fake_rocm, engine):
    locks = ["cpu/tools.lock", "cpu/torch.lock"]  # our torch must not replace the base's
    done = tiny(on=fake_rocm, **FAKE_ENTRY, locks=locks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python 3." in done.stdout
    versions = ("torch 2.13.0+rocm7.2", "hip 7.2.53211", "vllm 0.31.0+rocm723", "rccl 2.27.9")
    assert [text for text in (*versions, "gfx90a gfx942 gfx950") if text not in done.stdout] == []
    assert inside(engine, tiny.reference, "cat", "/opt/recipes/constraints.txt").split() == [
        "torch==2.13.0+rocm7.2",
        "vllm==0.31.0+rocm723",
    ]
    assert engine.images.get(tiny.reference).labels["io.rocm-recipes.gfx"] == "gfx90a,gfx942"
    code = "import torch, setuptools; print(torch.__file__, setuptools.__file__)"
    torch, setuptools = inside(engine, tiny.reference, "python", "-c", code).split()
    assert torch == "/usr/lib/python3/dist-packages/torch.py"
    assert setuptools.startswith("/opt/recipes/")
    with pytest.raises(
        docker.errors.ContainerError, match=r"Cannot install torch==2\.14\.0 because .* conflicting"
    ):
        inside(
            engine, tiny.reference, "python3", "-m", "pip", "install", "--no-index", "torch==2.14.0"
        )


@pytest.mark.parametrize("size", ["1m", "8m"])  # fails in venv, and in ensurepip
def test_full_disk_while_the_environment_is_made(engine, base, size):
    program = (images.FOLDER / images.INSTALL).read_text()
    files = {f"{builder.INSIDE}/{images.INSTALL}": program, f"{builder.INSIDE}/settings.json": "{}"}
    argv = ["python3", "-B", f"/{builder.INSIDE}/{images.INSTALL}"]
    disk = {"/opt/recipes": f"size={size}"}
    with engines.ran(engine, base, argv, files, tmpfs=disk, user="0:0") as (code, lines, _):
        assert code == 3
    start = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    assert re.search(install.FULL_DISK, "\n".join(lines[start:]), re.IGNORECASE)
    assert "Traceback (most recent call last):" not in lines[start:]


def test_base_that_the_disk_cannot_hold(tiny, registry):
    done = tiny(f"base={registry}/nothing:1", digest="unverified", download_gb="1000000")
    assert done.returncode == 3
    assert "needs 5000000 GB" in done.stderr


def test_base_that_cannot_be_pulled(tiny, registry):
    for fields, reference in (
        ({"digest": "unverified"}, f"{registry}/nothing:1"),
        ({}, f"{registry}/{FAKE_ROCM}:1"),  # another digest than the lock's
    ):
        done = tiny(f"base={reference}", **fields)
        assert done.returncode == 3
        assert "cannot be pulled: " in done.stderr
        assert "docker login" in done.stderr
