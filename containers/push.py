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
from containers.images import DIGEST, Image
from launch.core.errors import HostError, UserError

# <registry>[/<repository>], without a prefix. The image's name and tag follow it.
PLACE = re.compile(r"[\w-]+(\.[\w-]+)*(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


def push(client: docker.DockerClient, image: Image, place: str, said: engine.Said) -> str:
    """Push the image and return <place>/<name>:<tag>@sha256:... as the registry stored it."""
    repository = f"{place}/{image.name}"
    named_before = engine.find(client, f"{repository}:{image.tag}") is not None
    try:
        client.api.tag(image.local_reference, repository, image.tag)
        digest = ""
        for event in engine.failing(
            client.api.push(repository, image.tag, stream=True, decode=True)
        ):
            digest = (event.get("aux") or {}).get("Digest", digest)
            said(
                " ".join(str(event[key]) for key in ("id", "status", "progress") if event.get(key))
            )
    except docker.errors.APIError as error:
        if not named_before and engine.find(client, f"{repository}:{image.tag}") is not None:
            client.images.remove(f"{repository}:{image.tag}")
        raise HostError(
            f"{repository}:{image.tag} cannot be pushed: {error.explanation or error}\n"
            "Where the registry asks for a login: docker login <registry>. The engine must know of "
            "one without TLS (insecure-registries)."
        ) from error
    if not DIGEST.fullmatch(digest):
        raise HostError(
            f"The registry took {repository}:{image.tag}, and stated no digest for it: {digest!r}"
        )
    return f"{repository}:{image.tag}@{digest}"


def write_pushed(lock: Path, name: str, reference: str) -> bool:
    """Replace the entry's one line in the lock; return whether it changed. Comments stay."""
    old = lock.read_text(encoding="utf-8")
    new = with_pushed(old, name, reference)
    expected = yaml.safe_load(old)
    expected["images"][name]["pushed"] = reference
    if new is None or yaml.safe_load(new) != expected:
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


def with_pushed(text: str, name: str, reference: str) -> str | None:
    """Return the text with the entry's line replaced; None if there is no such line."""
    lines = text.splitlines(keepends=True)
    inside = None  # indentation of the entry's own key while inside the entry
    for i, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        if inside is not None and indent <= inside:
            inside = None
        if re.match(rf"\s+{re.escape(name)}:\s*(#.*)?$", line):
            inside = indent
        elif inside is not None and (
            found := re.match(r"(\s+pushed:\s*)[^\s#]+(.*)", line, re.DOTALL)
        ):
            lines[i] = f"{found[1]}{reference}{found[2]}"
            return "".join(lines)
    return None
