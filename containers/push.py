"""Push a built image to a registry, and lock its digest, by which other machines start it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import docker
import docker.errors
import yaml

from containers import engine
from containers.images import Image
from launch.core.errors import HostError, UserError


def push(client: docker.DockerClient, image: Image, place: str, show: engine.Show) -> str:
    """Push the image and return <place>/<name>:<tag>@sha256:... as the registry stored it."""
    repository = f"{place}/{image.name}"
    named_before = engine.find(client, f"{repository}:{image.tag}") is not None
    try:
        client.api.tag(image.local_reference, repository, image.tag)
        digest = ""
        stream = client.api.push(repository, image.tag, stream=True, decode=True)
        for event in engine.failing(stream):
            digest = (event.get("aux") or {}).get("Digest", digest)
            words = (event.get(key) for key in ("id", "status", "progress"))
            show(" ".join(str(word) for word in words if word))
    except docker.errors.APIError as error:
        if not named_before and engine.find(client, f"{repository}:{image.tag}") is not None:
            client.images.remove(f"{repository}:{image.tag}")
        raise HostError(
            f"{repository}:{image.tag} cannot be pushed: {error.explanation or error}\n"
            "Where the registry asks for a login: docker login <registry>. The engine must know of "
            "one without TLS (insecure-registries)."
        ) from error
    return f"{repository}:{image.tag}@{digest}"


def write_pushed(lock: Path, name: str, reference: str) -> bool:
    """Replace the entry's one line in the lock; return whether it changed. Comments stay."""
    old = lock.read_text(encoding="utf-8")
    comment = r"[ \t]*(?:#.*)?\n"
    body = rf"(?:\2[ \t]+.*\n|{comment})*?\2[ \t]+pushed:[ \t]*"
    head = rf"^(([ \t]+){re.escape(name)}:{comment}{body})"
    new = re.sub(rf"{head}[^\s#]+", rf"\g<1>{reference}", old, count=1, flags=re.MULTILINE)
    expected = yaml.safe_load(old)
    expected["images"][name]["pushed"] = reference
    if yaml.safe_load(new) != expected:
        raise UserError(
            f"{lock}: images.{name} has no line of its own `pushed: ...`. Write there: pushed: "
            f"{reference}"
        )
    if new == old:
        return False
    # Write it whole or not at all, because a run that starts meanwhile reads it.
    handle, temporary = tempfile.mkstemp(dir=lock.parent, prefix=f".{lock.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(new)
    os.chmod(temporary, lock.stat().st_mode & 0o777)
    os.replace(temporary, lock)
    return True
