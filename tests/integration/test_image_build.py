"""Test what containers/build.py builds with a real engine and a registry, and leaves behind.

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
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from containers import engine as engines
from containers import images, verify
from tests.integration.conftest import (
    BUILD,
    UID,
    Chunks,
    as_somebody,
    build,
    inside,
    lock_of,
    pushed,
    stanzas,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_is_left")]
PATIENCE_S = 120


def tree(engine, image: str) -> dict[str, tuple]:
    """Return path -> all but the times, of everything that a container of the image sees."""
    container = engine.containers.create(image, ["true"])
    found = {}
    try:
        with tarfile.open(
            fileobj=Chunks(container.export(chunk_size=1 << 20)), mode="r|"
        ) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                digest = hashlib.file_digest(content, "sha256").hexdigest() if content else ""
                found[member.name] = (
                    member.type,
                    oct(member.mode),
                    member.uid,
                    member.gid,
                    member.linkname,
                    member.size,
                    digest,
                )
    finally:
        container.remove()
    return found


@pytest.fixture(scope="module")
def kept(engine, base, tmp_path_factory) -> Iterator[str]:
    """Yield the image of `tiny()`, built once, under a name that the tests leave alone."""
    lock = lock_of(tmp_path_factory.mktemp("kept"), base)
    reference, name = (
        images.load.__wrapped__(lock)["tiny"].local_reference,
        "rocm-recipes-test/kept:1",
    )
    done = build("image=tiny", f"lock={lock}")
    assert done.returncode == 0, done.stdout + done.stderr
    engine.images.get(reference).tag(name)
    engine.images.remove(reference)
    yield name
    engine.images.remove(name)


@pytest.fixture
def have_tiny(engine, kept, base, tmp_path, remove):
    """Return `have_tiny()`, like a `tiny()` that builds: its image exists until the test ends."""

    def call() -> None:
        reference = images.load.__wrapped__(lock_of(tmp_path, base))["tiny"].local_reference
        repository, _, tag = reference.rpartition(":")
        assert engine.images.get(kept).tag(repository, tag)
        remove.append(reference)

    return call


# ---- The cpu image


def test_the_cpu_image_is_what_the_lock_says(engine, cpu_image, base):
    entry = images.load()["cpu"]
    found = json.loads(inside(engine, cpu_image, "python", "/opt/recipes/probe.py"))
    lies, _ = verify.compare(entry, found)
    # Python is the base's own, and this base is not the lock's.
    assert {lie.field for lie in lies} <= {"python"}
    assert (found["hip"], found["cuda"], found["gfx"], found["vllm"]) == (None, None, [], None)
    labels = engine.images.get(cpu_image).labels
    assert json.loads(labels["io.rocm-recipes.probe"]) == found
    assert labels["org.opencontainers.image.base.digest"] == base.partition("@")[2]
    assert re.fullmatch(
        r"[0-9a-f]{40}(-dirty)?|unknown", labels["org.opencontainers.image.revision"]
    )
    assert labels["io.rocm-recipes.tag"] == labels["org.opencontainers.image.version"] == entry.tag
    assert labels["io.rocm-recipes.torch"] == found["torch"]


def test_our_packages_come_first_and_the_base_stays_as_it_was(engine, cpu_image, base):
    ask = "import importlib.metadata as m; print(sorted(d.name for d in m.distributions()))"
    assert "'trl'" in inside(engine, cpu_image, "python", "-c", ask)
    own = inside(engine, base, "python3", "-c", ask)
    assert inside(engine, cpu_image, "/usr/bin/python3", "-c", ask) == own
    assert "reasoning_gym" in inside(
        engine,
        cpu_image,
        "python",
        "-W",
        "ignore",
        "-c",
        "import reasoning_gym; print(reasoning_gym)",
    )


def test_a_second_build_does_nothing(engine, cpu_image, base):
    before = {image.id for image in engine.images.list(all=True)}
    began = os.times()
    done = build("image=cpu", f"base={base}")
    ended = os.times()
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{cpu_image} is up to date")
    assert "..." not in done.stdout  # no phase
    assert {image.id for image in engine.images.list(all=True)} == before
    took_s = (
        ended.children_user + ended.children_system - began.children_user - began.children_system
    )
    assert took_s < 2  # of a core: the clock would measure what runs beside it too


def test_two_builds_from_scratch_have_the_same_files(engine, tiny, tmp_path):
    """Install wheels with and without machine code, and antlr4, which is built from source."""
    given = ["numpy", "hydra-core", "omegaconf", "packaging", "pyyaml", "antlr4-python3-runtime"]
    locks = [
        "cpu/tools.lock",
        str(stanzas(tmp_path / "some.lock", "cpu/requirements.lock", *given)),
    ]
    assert tiny(locks=locks).returncode == 0
    image = tiny.reference
    first_id, first = engine.images.get(image).id, tree(engine, image)
    done = tiny("no_cache=true", locks=locks)
    assert done.returncode == 0, done.stdout + done.stderr
    second_id, second = engine.images.get(image).id, tree(engine, image)
    differing = sorted(
        path for path in first.keys() | second.keys() if first.get(path) != second.get(path)
    )
    kinds = {
        kind: sum(entry[0] == kind for entry in first.values())
        for kind in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)
    }
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
    assert len(first) > 5000


# ---- Bases, registries, check


def test_a_pushed_image_is_written_into_the_lock_and_comes_back_by_its_digest(
    tiny, engine, registry, tmp_path, remove
):
    assert tiny(f"push={registry}/mine").returncode == 0
    lock = tmp_path / "images.lock.yaml"
    image = images.load.__wrapped__(lock)["tiny"]
    reference = image.reference
    assert re.fullmatch(rf"{registry}/mine/tiny@sha256:[0-9a-f]{{64}}", reference)
    assert lock.read_text().startswith("# A comment that stays.\n")
    written = lock.read_text()
    again = build("image=tiny", f"lock={lock}", f"push={registry}/mine")
    assert f"was already {image.pushed}" in again.stdout
    assert lock.read_text() == written
    pushed_id = engine.images.get(tiny.reference).id
    engine.images.remove(pushed_id, force=True)
    assert engines.find(engine, reference) is None
    remove.append(reference)
    said: list[str] = []
    assert engines.have(engine, reference, "unknown", said.append).id == pushed_id


def test_a_push_that_is_refused_says_so_and_leaves_the_lock(
    have_tiny, tiny, tmp_path, engine, kept
):
    have_tiny()
    done = tiny("push=127.0.0.1:1/mine")
    assert done.returncode == 3
    assert "127.0.0.1:1/mine/tiny:" in done.stderr
    assert "cannot be pushed:" in done.stderr
    assert "docker login" in done.stderr
    assert set(engine.images.get(tiny.reference).tags) == {tiny.reference, kept}
    assert images.load.__wrapped__(tmp_path / "images.lock.yaml")["tiny"].pushed == "unbuilt"


def test_check_builds_nothing_and_says_how_things_are(have_tiny, tiny, fake_rocm, engine):
    absent = tiny("check=true")
    assert absent.returncode == 3
    assert tiny.reference in absent.stderr
    assert "python containers/build.py image=tiny" in absent.stderr
    have_tiny()
    before = {image.id for image in engine.images.list(all=True)}
    good = tiny("check=true")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (
        0,
        f"{tiny.reference} is what the lock says",
    )
    lying = tiny("check=true", trl="1.16.0")
    assert lying.returncode == 4
    assert "trl: the lock says 1.16.0, the image holds none" in lying.stderr
    up_to_date = tiny(trl="1.16.0")  # nothing to build, and still a lie
    assert (up_to_date.returncode, up_to_date.stderr) == (4, lying.stderr)
    other = tiny("check=true", f"base={fake_rocm}", digest="unverified")
    assert {image.id for image in engine.images.list(all=True)} == before
    assert other.returncode == 3  # without a digest the tag is another
    assert tiny("check=true").returncode == 0


def test_check_finds_what_somebody_changed_in_an_image(have_tiny, tiny, engine, kept):
    have_tiny()
    assert tiny("check=true").returncode == 0
    dockerfile = (
        f"FROM {kept}\n"
        "RUN mkdir more-1.0.dist-info && echo 'Name: more' > more-1.0.dist-info/METADATA\n"
        "ENV PYTHONPATH=/\n"
    )
    engine.images.build(
        fileobj=io.BytesIO(dockerfile.encode()), tag=tiny.reference, rm=True, network_mode="none"
    )
    done = tiny("check=true")
    assert done.returncode == 4
    assert f"{tiny.reference}: its labels and contents differ in packages" in done.stderr
    assert "no_cache=true" in done.stderr
    assert tiny("no_cache=true").returncode == 0
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
    assert f": it was built on {base}" in second.stdout
    assert "note: torch is unknown to the lock, the image holds 2.13.0+rocm7.2" in second.stdout
    assert "is up to date" in tiny(f"base={fake_rocm}", **open_base).stdout


def test_a_base_by_another_name_is_the_same_base(have_tiny, tiny, engine, base, registry):
    have_tiny()
    mirrored = pushed(engine, base, f"{registry}/mirror/debian")
    assert mirrored.partition("@")[2] == base.partition("@")[2]
    assert "is up to date" in tiny(f"base={mirrored}").stdout


# ---- Whoever builds, and however it ends


def test_a_user_who_is_not_root_builds_and_owns_what_it_leaves(engine, base, home, remove):
    lock = lock_of(home, base)
    remove.append(images.load.__wrapped__(lock)["tiny"].local_reference)
    done = as_somebody(
        home, "image=tiny", f"lock={lock}", groups=[Path("/var/run/docker.sock").stat().st_gid]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = list((home / ".cache").rglob("*"))
    assert [path.name for path in left if path.suffix == ".whl"]
    assert {path.stat().st_uid for path in left} == {UID if os.getuid() == 0 else os.getuid()}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(engine, base, tmp_path, sent):
    lock = lock_of(tmp_path, base)
    process = subprocess.Popen(
        [*BUILD, "image=tiny", f"lock={lock}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not step_of_a_build(engine):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    process.send_signal(sent)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    assert said.startswith("\ninterrupted: run it again")
    assert not step_of_a_build(engine)
    assert engines.find(engine, images.load.__wrapped__(lock)["tiny"].local_reference) is None


def step_of_a_build(engine) -> list:
    """Return containers in which the builder runs a step; they have the stage's labels."""
    found = engine.api.containers(filters={"label": engines.BUILD})
    return [
        container for container in found if container["Labels"][engines.BUILD] != engines.COMPLETE
    ]


def test_what_killed_builds_have_left_is_removed_when_it_is_old(engine, base, monkeypatch):
    # Labels of this test's own: another build on this machine is none of its business.
    monkeypatch.setattr(engines, "BUILD", "rocm-recipes-test.build")
    monkeypatch.setattr(engines, "ROLE", "rocm-recipes-test.role")
    unfinished = made(engine, base, "1234")
    complete = made(engine, base, engines.COMPLETE)
    named = made(engine, base, engines.COMPLETE, tag="rocm-recipes-test/complete")
    ended = engine.containers.create(base, ["true"], labels={engines.ROLE: "build"})
    other = engine.containers.create(base, ["true"], labels={engines.ROLE: "something else"})
    try:
        engines.remove_forgotten(engine)
        assert {engines.find(engine, image).id for image in (unfinished, complete, named)} == {
            unfinished,
            complete,
            named,
        }
        ended.reload()
        monkeypatch.setattr(engines, "FORGOTTEN_S", -60)  # what is made now is old enough
        engines.remove_forgotten(engine)
        assert (engines.find(engine, unfinished), engines.find(engine, complete)) == (None, None)
        assert engines.find(engine, named) is not None
        with pytest.raises(docker.errors.NotFound):
            ended.reload()
        other.reload()
    finally:
        other.remove()
        engine.images.remove("rocm-recipes-test/complete")


def test_an_image_in_use_keeps_its_place_when_it_loses_its_name(engine, base):
    image = made(engine, base, "1234")
    container = engine.containers.create(image, ["true"])
    engines.remove_unnamed(engine, image)
    assert engines.find(engine, image) is not None
    container.remove()
    named = engine.images.get(base)
    engines.remove_unnamed(engine, named.id)  # it has a name
    engines.remove_unnamed(engine, image)
    engines.remove_unnamed(engine, image)  # already gone
    assert engines.find(engine, base).id == named.id
    assert engines.find(engine, image) is None


def made(engine, base: str, build_id: str, tag: str | None = None) -> str:
    """Make an image with the label of a build, unnamed unless `tag` is given."""
    dockerfile = io.BytesIO(f"FROM {base}\nLABEL {engines.BUILD}={build_id} made={tag}\n".encode())
    return engine.images.build(fileobj=dockerfile, tag=tag, rm=True)[0].id
