"""Push an image to a registry, and write its digest into the lock for other machines."""

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


def push(client: docker.DockerClient, image: Image, prefix: str, show: engine.Show) -> str:
    """Push the image and return <prefix>/<name>:<tag>@sha256:... Raises HostError."""
    repository = f"{prefix}/{image.name}"
    try:
        client.api.tag(image.local_reference, repository, image.tag)
        digest = ""
        stream = client.api.push(repository, image.tag, stream=True, decode=True)
        for event in engine.raise_errors(stream):
            digest = (event.get("aux") or {}).get("Digest", digest)
            words = (event.get(key) for key in ("id", "status", "progress"))
            show(" ".join(str(word) for word in words if word))
    except docker.errors.APIError as error:
        raise HostError(
            f"{repository}:{image.tag} cannot be pushed: {error.explanation or error}\n"
            "If the registry requires a login, run docker login <registry>. If it has no TLS, add "
            "it to insecure-registries in the engine's configuration."
        ) from error
    if not digest:  # without it, the lock would become invalid
        raise HostError(f"{repository}:{image.tag} is pushed, but the engine states no digest.")
    return f"{repository}:{image.tag}@{digest}"


def write_pushed(lock: Path, name: str, reference: str) -> bool:
    """Replace only the entry's `pushed` in the lock; return whether it changed."""
    old = lock.read_text(encoding="utf-8")
    node: Any = yaml.compose(old)
    for key in ("images", name, "pushed"):
        node = next(value for field, value in node.value if field.value == key)
    new = old[: node.start_mark.index] + reference + old[node.end_mark.index :]
    if new != old:
        json_files.write_text(lock, new)  # atomically, since a run may be reading it
    return new != old
