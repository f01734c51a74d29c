"""Test containers/build.py and what it tells the engine, without an engine.

tests/integration/test_image_*.py have one.
"""

from __future__ import annotations

import dataclasses
import io
import re
import signal
import tarfile
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest
import requests

from containers import build, engine, fetch, images
from containers.fetch import BuildFailed
from containers.images import Image
from containers.progress import Progress
from launch.core.errors import HostError
from tests.helpers.build_examples import DIGEST, IMAGE, OPEN, OTHER

# ---- The command line


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"], ["image=cpu", "--help"]])
def test_usage_lists_every_image_with_its_base(arguments, capsys):
    assert build.main(arguments) == 0
    shown = capsys.readouterr().out
    for name, image in images.load().items():
        assert re.search(
            rf"^  {name} +{re.escape(image.base)}, (pinned by digest|unverified), (not )?pushed$",
            shown,
            re.MULTILINE,
        )
    for key in ("base=", "check=", "push=", "no_cache=", "lock="):
        assert f"  {key}" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["cpu"],
            "`cpu`: key=value is expected, once for each key, such as image=cpu. Keys: image",
        ),
        (["image="], "`image=`: key=value is expected"),
        (["image=cpu", "image=sandbox"], "`image=sandbox`: key=value is expected, once"),
        (["imgae=cpu"], "Did you mean image?"),
        (["image=rocn"], "There is no image `rocn`. Images: rocm, "),
        (["image=rocn"], "Did you mean rocm"),
        (["check=true"], "image=<name> is missing. Images: rocm, "),
        (["image=cpu", "check=yes"], "check=yes: true or false is expected."),
        (["image=cpu", "no_cache=1"], "no_cache=1: true or false is expected."),
        (["image=cpu", "check=true", "push=ghcr.io/me"], "check=true builds and pushes nothing"),
        (["image=cpu", "check=true", "no_cache=true"], "check=true builds and pushes nothing"),
        (
            ["image=cpu", "push=https://ghcr.io/me"],
            "push=https://ghcr.io/me: <registry> or <registry>/<repository> is expected",
        ),
        (["image=cpu", "push=ghcr.io/me:1"], "without a tag"),
        (["image=cpu", "push=ghcr.io/Me"], "in lower case"),
        (["image=cpu", "lock=absent.yaml"], "lock=absent.yaml: there is no such file."),
    ],
)
def test_a_wrong_request_is_refused_in_one_message(arguments, said, capsys):
    assert build.main(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, "Traceback" in shown.err) == ("", False)


def test_a_lock_file_that_is_wrong_is_refused(tmp_path, capsys):
    lock = tmp_path / "images.lock.yaml"
    lock.write_text("images: {mine: {base: x}}")
    assert build.main(["image=mine", f"lock={lock}"]) == 2
    assert "images.mine lacks digest, dockerfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place",
    [
        "ghcr.io/me",
        "ghcr.io/me/recipes",
        "127.0.0.1:5000",
        "localhost:5000/a-b/c_d",
        "registry.example.com",
    ],
)
def test_a_place_to_push_to(place):
    assert build.parse(["image=cpu", f"push={place}"]).push == place


def test_what_is_asked_by_default():
    asked = build.parse(["image=cpu"])
    assert (asked.base, asked.push, asked.check, asked.no_cache, asked.lock) == (
        "",
        "",
        False,
        False,
        images.LOCK,
    )
    assert asked.base_reference == images.load()["cpu"].base_reference
    assert build.parse(["image=cpu", "base=a/b:1", "no_cache=true"]).base_reference == "a/b:1"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            docker.errors.APIError("x", explanation="no such thing"),
            3,
            "The docker engine refused: no such thing",
        ),
        (docker.errors.DockerException("went away"), 3, "The docker engine refused: went away"),
        (
            requests.ConnectionError("cut off"),
            3,
            "The docker engine stopped answering: cut off. Run the same command again.",
        ),
        (PermissionError(13, "Permission denied", "/a/cache"), 3, "/a/cache: Permission denied"),
        (OSError("odd"), 3, "This machine: odd"),
        (KeyboardInterrupt(), 75, "interrupted: run it again; fetched files are reused"),
        (BuildFailed("it failed"), 4, "it failed"),
        (HostError("it cannot"), 3, "it cannot"),
    ],
)
def test_what_goes_wrong_ends_in_a_message_and_a_code(raised, code, said, monkeypatch, capsys):
    def fails() -> None:
        raise raised

    monkeypatch.setattr(engine, "connect", fails)
    assert build.main(["image=cpu"]) == code
    assert capsys.readouterr().err.strip() == said


def test_sigterm_is_an_interruption():
    with pytest.raises(KeyboardInterrupt):
        build.terminated(signal.SIGTERM, None)


# ---- What is sent to the engine


def test_the_context_holds_what_the_tag_is_a_hash_of_and_the_wheels(tmp_path):
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"x" * 1000)
    entry = images.load()["cpu"]
    with tarfile.open(fileobj=io.BytesIO(b"".join(build.context(entry, tmp_path)))) as archive:
        members = archive.getmembers()
        content = {member.name: archive.extractfile(member).read() for member in members}
    assert content.pop("wheels/a-1.0-py3-none-any.whl") == b"x" * 1000
    assert content.pop("locks.txt").decode().split() == list(entry.locks)
    assert content.pop("Dockerfile") == (images.FOLDER / entry.dockerfile).read_bytes()
    assert content == {
        **{name: (images.FOLDER / name).read_bytes() for name in images.SHARED},
        **{f"locks/{name}": (images.FOLDER / name).read_bytes() for name in entry.locks},
    }
    assert {
        (member.mode, member.uid, member.gid, member.mtime, member.uname) for member in members
    } == {(0o644, 0, 0, 0, "")}


def test_the_context_of_an_image_without_packages():
    with tarfile.open(
        fileobj=io.BytesIO(b"".join(build.context(images.load()["sandbox"], None)))
    ) as archive:
        names = archive.getnames()
    assert sorted(names) == ["Dockerfile", "install.py", "locks.txt", "probe.py", "server.py"]


def test_a_lock_from_elsewhere_travels_under_a_name_of_its_own():
    image = dataclasses.replace(IMAGE, locks=("cpu/tools.lock", "/some/where/tools.lock"))
    assert fetch.lock_names(image) == ["cpu/tools.lock", "1-tools.lock"]
    assert list(fetch.files_of(image)) == [
        "install.py",
        "probe.py",
        "locks/cpu/tools.lock",
        "locks/1-tools.lock",
    ]


def test_the_revision_outside_of_a_clone_is_unknown(tmp_path, monkeypatch):
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", build.git_revision())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.git_revision() == "unknown"


# ---- Which base, and whether the image that is here is built on it


def image_of(
    digests: list[str] = (), image_id: str = "sha256:id", **labels: str
) -> SimpleNamespace:
    return SimpleNamespace(
        id=image_id,
        labels=labels,
        attrs={"RepoDigests": [f"example.com/base@{digest}" for digest in digests]},
    )


def known_images(**references):
    """Make an engine that has these images and cannot pull."""

    def get(reference: str):
        if reference not in references:
            raise docker.errors.ImageNotFound("not here")
        return references[reference]

    return SimpleNamespace(images=SimpleNamespace(get=get))


def built_on(name: str, digest: str, image: Image = IMAGE, **labels: str) -> SimpleNamespace:
    base = {
        "org.opencontainers.image.base.name": name,
        "org.opencontainers.image.base.digest": digest,
    }
    return image_of(
        **{"io.rocm-recipes.tag": image.tag, engine.BUILD: "complete", **base, **labels}
    )


@pytest.mark.parametrize(
    ("image", "base", "here", "built", "up_to_date"),
    [
        (IMAGE, "", {}, (IMAGE.base_reference, DIGEST), True),
        (IMAGE, "", {}, ("mirror/base:1", DIGEST), True),
        (IMAGE, "", {}, (IMAGE.base_reference, OTHER), False),
        (OPEN, "", {}, (OPEN.base, OTHER), True),
        (OPEN, "", {OPEN.base: image_of([OTHER])}, (OPEN.base, OTHER), True),
        (OPEN, "", {OPEN.base: image_of([DIGEST])}, (OPEN.base, OTHER), False),
        (OPEN, "", {OPEN.base: image_of([], "sha256:id")}, (OPEN.base, "sha256:id"), True),
        (OPEN, "other:1", {}, (OPEN.base, OTHER), False),
        (OPEN, "other:1", {"other:1": image_of([DIGEST, OTHER])}, (OPEN.base, OTHER), True),
        (OPEN, f"other:1@{OTHER}", {}, (OPEN.base, OTHER), True),
        (OPEN, f"other:1@{OTHER}", {}, (OPEN.base, DIGEST), False),
    ],
)
def test_an_image_is_up_to_date_when_its_base_is_the_one_asked_for(
    image, base, here, built, up_to_date
):
    reason = build.outdated(
        known_images(**here), build.Asked(image, images.LOCK, base), built_on(*built, image=image)
    )
    assert (reason == "") == up_to_date
    if reason:
        assert reason.startswith(f"it was built on {built[0]} ({built[1]}), which is not ")


@pytest.mark.parametrize("labels", [{"io.rocm-recipes.tag": "another"}, {engine.BUILD: None}])
def test_an_image_that_somebody_named_like_ours_is_not_ours(labels):
    existing = built_on(IMAGE.base_reference, DIGEST, **labels)
    existing.labels = {key: value for key, value in existing.labels.items() if value}
    assert (
        build.outdated(known_images(), build.Asked(IMAGE, images.LOCK), existing)
        == "it was not made by this program"
    )


def test_a_base_that_was_loaded_has_no_digest_to_compare():
    asked = build.Asked(IMAGE, images.LOCK, "loaded:1")
    with (
        Progress().phase("pull") as phase,
        pytest.raises(
            HostError, match=r"base=loaded:1 has none, since it was loaded, not pulled\. Name a"
        ),
    ):
        build.have_base(known_images(**{"loaded:1": image_of()}), asked, phase)


def test_the_digest_of_a_base_is_the_one_that_was_asked_for():
    base = image_of([OTHER, DIGEST])
    assert build.base_digest(build.Asked(IMAGE, images.LOCK), base) == DIGEST
    assert build.base_digest(build.Asked(OPEN, images.LOCK, f"x@{OTHER}"), base) == OTHER
    assert build.base_digest(build.Asked(OPEN, images.LOCK), base) == DIGEST
    assert (
        build.base_digest(build.Asked(OPEN, images.LOCK), image_of([], "sha256:id")) == "sha256:id"
    )


@pytest.mark.parametrize(
    ("lines", "explanation", "kind", "said"),
    [
        (
            [
                "Step 1/2",
                "noise",
                "error: a pin conflicts",
                "take it out",
                "Removing intermediate container 1",
            ],
            "code 4",
            BuildFailed,
            "a pin",
        ),
        (["Step 1/2", "  "], "no such file", BuildFailed, "Step 1/2\nno such file"),
        (
            ["Step 1/2"],
            "write /x: no space left on device",
            HostError,
            "Make room where the engine keeps its images",
        ),
        (
            ["error: l: a file has another hash than the lock states"],
            "",
            BuildFailed,
            "kept in /wheels: delete that folder",
        ),
    ],
)
def test_a_failed_build_says_why_and_where_its_output_is(lines, explanation, kind, said):
    failure = build.build_failure(IMAGE, lines, explanation, Path("/wheels"))
    assert type(failure) is kind
    assert str(failure).startswith("The build of mine failed:\n")
    assert said in str(failure)
    assert f"All of its output: {build.log_file(IMAGE)}" in str(failure)
    assert ("noise" in str(failure), "Removing" in str(failure), "error: " in str(failure)) == (
        False,
        False,
        False,
    )


# ---- What a person sees


def test_phases_are_lines_with_seconds(capsys):
    progress = Progress()
    with progress.phase("fetch") as phase:
        phase.say("not shown without a terminal")
        phase.result = "3 files [all]"
    assert re.fullmatch(r"fetch \.\.\.\nfetch  3 files \[all\] +0\.0 s\n", capsys.readouterr().out)


def test_on_a_terminal_the_newest_line_is_shown(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress()
    assert progress.console.is_terminal
    with progress.console.capture() as captured, progress.phase("build") as phase:
        phase.say("  ")
        phase.say("Step 1/9 " + "x" * 100)
        assert phase.status.status == "build  Step 1/9 " + "x" * 19
        phase.result = "done"
    assert "..." not in captured.get()
    assert re.search(r"build  done +0\.0 s", captured.get())
