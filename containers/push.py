"""Push a built image to a registry, and lock its digest, by which other machines start it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker
import docker.errors
import yaml

from containers import engine
from containers.images import Image
from launch.core import json_files
from launch.core.errors import HostError


def push(client: docker.DockerClient, image: Image, place: str, show: engine.Show) -> str:
    """Push the image and return <place>/<name>:<tag>@sha256:... as the registry stored it."""
    repository = f"{place}/{image.name}"
    try:
        client.api.tag(image.local_reference, repository, image.tag)
        digest = ""
        stream = client.api.push(repository, image.tag, stream=True, decode=True)
        for event in engine.failing(stream):
            digest = (event.get("aux") or {}).get("Digest", digest)
            words = (event.get(key) for key in ("id", "status", "progress"))
            show(" ".join(str(word) for word in words if word))
    except docker.errors.APIError as error:
        raise HostError(
            f"{repository}:{image.tag} cannot be pushed: {error.explanation or error}\n"
            "If the registry requires a login: docker login <registry>. The engine must know of "
            "one without TLS (insecure-registries)."
        ) from error
    return f"{repository}:{image.tag}@{digest}"


def write_pushed(lock: Path, name: str, reference: str) -> bool:
    """Replace the entry's `pushed` in the lock; return whether it changed. Comments stay."""
    old = lock.read_text(encoding="utf-8")
    node: Any = yaml.compose(old)
    for key in ("images", name, "pushed"):
        node = next(value for field, value in node.value if field.value == key)
    new = old[: node.start_mark.index] + reference + old[node.end_mark.index :]
    if new != old:
        json_files.write_text(lock, new)  # atomically, since a run that starts may read it
    return new != old
