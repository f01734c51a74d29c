"""Compare an image's contents with its entry in containers/images.lock.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker

from containers import engine
from containers.fetch import BuildFailed
from containers.images import NONE, UNKNOWN, VERSIONS, Image

PROBE = ["python", "-B", "/opt/recipes/probe.py"]


@dataclass(frozen=True)
class Finding:
    """A field of the lock, with the lock's value and the image's."""

    field: str
    stated: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: the lock says {self.stated}, the image holds {self.found}"


def probe(client: docker.DockerClient, image: str) -> dict[str, Any]:
    """Return the versions and GPU targets that the image's probe prints. Raises BuildFailed."""
    config = client.api.create_host_config(network_mode="none")
    code, lines = engine.run(client, image, PROBE, lambda line: None, host_config=config)
    if code or not lines:
        raise BuildFailed(
            "The image cannot say what it holds: "
            + " ".join(PROBE)
            + f" ended with {code}\n"
            + "\n".join(lines[-15:])
        )
    versions: dict[str, Any] = json.loads(lines[-1])
    return versions


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.13.0+rocm7.2 -> (2, 13, 0).

    Any suffix is dropped, because vendors call 2.7.0a0+gitf717b2a their 2.7.0.
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_of(stated: str, found: str) -> bool:
    """Return whether the version `found` belongs to the release `stated`.

    2.13 includes every 2.13.x. 2.13.0 does not include 2.13.1, nor 2.13.0+cpu 2.13.0+rocm7.2.
    """
    if release(stated) != release(found)[: len(release(stated))]:
        return False
    return bool(re.fullmatch(r"[\d.]+", stated)) or found.startswith(stated)


def same(field: str, stated: str, found: str) -> bool:
    if field == "rocm":  # code compiled for one patch release runs on another
        return release(stated)[:2] == release(found)[:2]
    return is_of(stated, found)


def compare(image: Image, found: Mapping[str, Any]) -> tuple[list[Finding], list[Finding]]:
    """Return the lock's wrong fields, and its fields that are `unknown`."""
    lies, unstated = [], []
    for field in VERSIONS:
        stated, value = getattr(image, field), found.get(field)
        finding = Finding(field, stated, str(value or NONE))
        if stated == UNKNOWN:
            unstated.append(finding)
        elif stated == NONE:
            lies += [finding] * bool(value)
        elif not value or not same(field, stated, str(value)):
            lies.append(finding)
    compiled = found.get("gfx") or []
    missing = [gfx for gfx in image.gfx if gfx != "cpu" and gfx not in compiled]
    if missing:
        lies.append(Finding("gfx", ", ".join(image.gfx), ", ".join(compiled) or NONE))
    return lies, unstated


def summary(found: Mapping[str, Any]) -> str:
    """Return a readable line with the main versions and GPU targets."""
    parts = [
        f"{name} {found[name]}"
        for name in ("python", "torch", "hip", "vllm", "trl", "rccl")
        if found.get(name)
    ]
    return ", ".join(parts + [" ".join(found["gfx"])] * bool(found.get("gfx")))


def refuse_lies(image: Image, found: Mapping[str, Any], base_replaced: bool) -> list[str]:
    """Return notes for the user. Raises BuildFailed if the lock is wrong about the image.

    A replaced base may have another Python, since the locks support several versions.
    """
    lies, unstated = compare(image, found)
    notes = [
        f"note: {finding.field} is unknown to the lock, the image holds {finding.found}"
        for finding in unstated
    ]
    if base_replaced and not image.verified:
        notes += [
            f"note: {lie} (the base is not the lock's)" for lie in lies if lie.field == "python"
        ]
        lies = [lie for lie in lies if lie.field != "python"]
    if lies:
        raise BuildFailed(
            f"containers/images.lock.yaml is wrong about {image.name}:\n"
            + "\n".join(f"  {lie}" for lie in lies)
            + "\nCorrect the lock, or choose a base that is what it says."
        )
    return notes
