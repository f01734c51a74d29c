"""Compare an image's contents with its entry in containers/images.lock.yaml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import docker
from packaging.specifiers import SpecifierSet

from containers import engine
from containers.images import FOLDER, NONE, UNKNOWN, VERSIONS, Image

LAST_LINES = 15
PROBE = "probe.py"


class BuildFailed(Exception):
    """A lock, its hashes or an image is inconsistent. Exit code 4."""

    exit_code = 4


def probe(client: docker.DockerClient, image: str, python: str = "python") -> dict[str, Any]:
    """Return the versions and GPU targets that probe.py prints in an image. Raises BuildFailed."""
    files = {PROBE: (FOLDER / PROBE).read_bytes()}
    with engine.ran(client, image, [python, "-B", f"/{PROBE}"], files) as (code, lines, _):
        if code or not lines:
            output = "\n".join(lines[-LAST_LINES:])
            raise BuildFailed(f"{python} {PROBE} returned {code} in the image:\n{output}")
        return dict(json.loads(lines[-1]))


def summary(probed: Mapping[str, Any]) -> str:
    """Return the main versions and GPU targets as one line of text."""
    names = [name for name in (*VERSIONS, "hip") if name != "rocm" and probed.get(name)]
    return ", ".join(f"{name} {probed[name]}" for name in names) + " ".join(
        [",", *probed["gfx"]] if probed.get("gfx") else []
    )


def matches(field: str, stated: str, actual: str) -> bool:
    """Return whether a version belongs to the release that the lock states.

    2.13 matches every 2.13.x, but 2.13.0 does not match 2.13.1. 2.13.0+cpu does not match
    2.13.0+rocm7.2.
    """
    if field == "rocm":  # patch releases are compatible
        stated = ".".join(stated.split(".")[:2])
    form = "=={}" if "+" in stated else "=={}.*"
    return SpecifierSet(form.format(stated), prereleases=True).contains(actual)


def check_entry(
    image: Image, probed: Mapping[str, Any], base_replaced: bool, env: Mapping[str, str] = {}
) -> list[str]:
    """Return notes for the user. Raises BuildFailed if the image contradicts the lock.

    With base=, the image may have another Python, since the locks support several versions.
    """
    notes, differences = [], []
    for field in VERSIONS:
        stated, value = getattr(image, field), probed.get(field)
        line = f"{field}: the lock says {stated}, the image has {value or NONE}"
        if stated == UNKNOWN:
            notes.append(f"note: {line}")
        elif value if stated == NONE else not (value and matches(field, stated, str(value))):
            if field == "python" and base_replaced and not image.verified:
                notes.append(f"note: {line} (base= replaces the lock's base)")
            else:
                differences.append(line)
    compiled = probed.get("gfx") or []
    if any(gfx not in ("cpu", *compiled) for gfx in image.gfx):
        stated, actual = ", ".join(image.gfx), ", ".join(compiled) or NONE
        differences.append(f"gfx: the lock says {stated}, the image has {actual}")
    for name, stated in image.env.items():
        if env.get(name) != stated:
            # Runs set the lock's value themselves, so this is no reason to fail.
            line = f"env.{name}: the lock says {stated}, the image has {env.get(name, NONE)}"
            notes.append(f"note: {line}")
    if differences:
        fields = "\n".join(f"  {line}" for line in differences)
        raise BuildFailed(
            f"images.lock.yaml contradicts the image {image.name}:\n{fields}\nCorrect the "
            "lock, or use a base that matches it."
        )
    return notes
