"""Test containers/build.py without a docker engine.

tests/integration/test_image_*.py use an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest
import requests

from containers import build, engine, images
from containers.images import Image
from containers.install import PackagesError
from launch.core.errors import HostError
from tests.helpers.build_examples import DIGEST, IMAGE, OPEN, OTHER

# ---- The command line


@pytest.mark.parametrize(("arguments", "message"), [
    (["imgae=cpu"], "Did you mean image?"),
    (["image=rocn"], "Did you mean rocm"),
    (["check=true"], "image=: use rocm, "),
    (["image=cpu", "check=yes"], "check=yes: use one of true, false."),
    (["image=cpu", "check=true", "no_cache=true"], "Remove no_cache=true"),
    (["image=cpu", "push=GHCR.io/Me"], "push=GHCR.io/Me: "),
    (["image=cpu", "builder=podman"], "builder=podman: use one of sdk, buildkit."),
    (["image=rocm", f"base=mirror/base@{OTHER}"], images.load()["rocm"].digest),
    (["image=cpu", "lock=absent.yaml"], "absent.yaml cannot be read"),
])  # fmt: skip
def test_reject_request(arguments, message, capsys):
    assert build.main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert (shown.out, "Traceback" in shown.err) == ("", False)


def test_other_base_gets_pinned_digest():
    cpu, options = build.parse(["image=cpu"])
    assert options["base"] == cpu.base_reference
    assert build.base_of(IMAGE, "mirror/base:1") == f"mirror/base:1@{DIGEST}"
    assert build.base_of(IMAGE, f"mirror/base:1@{DIGEST}") == f"mirror/base:1@{DIGEST}"
    assert build.base_of(OPEN, "mirror/base:1") == "mirror/base:1"
    assert build.base_of(OPEN, f"mirror/base@{OTHER}") == f"mirror/base@{OTHER}"


@pytest.mark.parametrize(("raised", "code", "message"), [
    (docker.errors.APIError("x", explanation="no such thing"), 3, "no such thing"),
    (docker.errors.APIError("x", explanation="no space left on device"), 3, images.SPACE_REMEDY),
    (docker.errors.BuildError("no space left on device", []), 3, images.SPACE_REMEDY),
    (docker.errors.BuildError("code: 1", [{"stream": "why"}]), 4, "code: 1"),
    (requests.ConnectionError("cut off"), 3, "cut off"),
    (PermissionError(13, "Permission denied", "/a/lock"), 3, "Permission denied: '/a/lock'"),
    (KeyboardInterrupt(), 75, "interrupted; run the same command again"),
    (PackagesError("it failed"), 4, "it failed"),
    (HostError("it cannot"), 3, "it cannot"),
])  # fmt: skip
def test_failures_have_message_and_exit_code(raised, code, message, monkeypatch, capsys):
    def fails() -> None:
        raise raised

    monkeypatch.setattr(engine, "connect", fails)
    assert build.main(["image=cpu"]) == code
    assert capsys.readouterr().err.strip().endswith(message)


def test_no_engine(monkeypatch, tmp_path, capsys):
    where = f"unix://{tmp_path}/absent.sock"
    monkeypatch.setenv("DOCKER_HOST", where)
    assert build.main(["image=cpu"]) == 3
    assert f"No docker engine answers at {where}" in capsys.readouterr().err


# ---- The base image


def image_of(
    digests: list[str] = (), image_id: str = "sha256:id", **labels: str
) -> SimpleNamespace:
    return SimpleNamespace(
        id=image_id,
        labels=labels,
        attrs={"RepoDigests": [f"example.com/base@{digest}" for digest in digests]},
    )


def known_images(**references):
    """Return an engine that has these images and cannot pull."""

    def get(reference: str):
        if reference not in references:
            raise docker.errors.ImageNotFound("missing")
        return references[reference]

    return SimpleNamespace(images=SimpleNamespace(get=get))


def built_on(name: str, digest: str, image: Image = IMAGE, **labels: str) -> SimpleNamespace:
    base = {
        "org.opencontainers.image.base.name": name,
        "org.opencontainers.image.base.digest": digest,
    }
    return image_of(**{"io.rocm-recipes.tag": image.tag, **base, **labels})


@pytest.mark.parametrize(("image", "base", "here", "built", "up_to_date"), [
    (IMAGE, "", {}, (IMAGE.base_reference, DIGEST), True),
    (IMAGE, "", {}, ("mirror/base:1", DIGEST), True),
    (OPEN, "", {}, (OPEN.base, OTHER), True),
    (OPEN, "", {OPEN.base: image_of([OTHER])}, (OPEN.base, OTHER), True),
    (OPEN, "", {OPEN.base: image_of([DIGEST])}, (OPEN.base, OTHER), False),
    (OPEN, "", {OPEN.base: image_of([], "sha256:id")}, (OPEN.base, "sha256:id"), True),
    (OPEN, "other:1", {}, (OPEN.base, OTHER), False),
    (OPEN, "other:1", {"other:1": image_of([DIGEST, OTHER])}, (OPEN.base, OTHER), True),
    (OPEN, f"other:1@{OTHER}", {}, (OPEN.base, DIGEST), False),
    (OPEN, f"other:1@{OTHER}", {f"other:1@{OTHER}": image_of([OTHER])}, (OPEN.base, OTHER), True),
])  # fmt: skip
def test_image_is_up_to_date_if_base_matches_request(image, base, here, built, up_to_date):
    known = known_images(**{engine.without_tag(name): known for name, known in here.items()})
    base = build.base_of(image, base)
    reason = build.outdated(known, image, base, built_on(*built, image=image))
    assert (reason == "") == up_to_date
    if reason:
        assert reason.startswith(f"it was built on {built[0]} ({built[1]}), not on ")


# ---- The installation


def test_settings_reach_the_container_as_files(tmp_path):
    bundle = tmp_path / "company.pem"
    bundle.write_text("certificate")
    settings = {"PIP_CERT": str(bundle), "PIP_CLIENT_CERT": "/absent", "HTTPS_PROXY": "http://p"}
    files = build.files_for(IMAGE, settings)
    names = {Path(name).name: text for name, text in files.items()}
    inside = json.loads(names["settings.json"])
    assert (inside["HTTPS_PROXY"], inside["PIP_CLIENT_CERT"]) == ("http://p", "/absent")
    assert files[inside["PIP_CERT"].lstrip("/")] == "certificate"
    assert {"install.py", "tools.lock", "requirements.lock"} <= names.keys()


# ---- The digest in the lock

LOCK = """# Reasons.
images:

  # About the first.
  first:
    base: a:1   # why
    pushed: unbuilt   # nobody has
  first_and_more:
    base: "pushed: no"
    pushed: unbuilt
"""


def test_write_pushed_changes_one_value(tmp_path):
    lock = tmp_path / "images.lock.yaml"
    lock.write_text(LOCK)
    for _ in range(2):
        build.write_pushed(lock, "first_and_more", "x/first@d")
    assert lock.read_text() == "x/first@d".join(LOCK.rsplit("unbuilt", 1))
