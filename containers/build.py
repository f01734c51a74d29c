"""Build an image listed in containers/images.lock.yaml, check its contents, and push it.

    python containers/build.py image=cpu

Exit codes: 0 done or already up to date; 2 the command line or the lock file is wrong; 3 this host
has no docker engine, base image or image to check; 4 the build failed, or the image contradicts the
lock; 75 interrupted (run the command again; downloads are reused).
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch.core.installed  # noqa: F401

# isort: split
import docker
import docker.errors
import requests

from containers import causes, engine, images, packages, verify
from containers.images import FOLDER, LABEL, OCI, Image
from containers.progress import phase
from containers.verify import BuildFailed
from launch.core import errors, json_files, key_values
from launch.core.errors import HostError, UserError

USAGE = """\
python containers/build.py image=<name> [key=value ...]

  base=<reference>             build on this image (a mirror, your own) instead of the lock's base
  check=true                   compare the local image with the lock; build nothing
  push=<registry/repository>   push the image, and write its digest into the lock
  no_cache=true                rebuild an image that is up to date; downloads are reused
  lock=<file>                  read this file instead of containers/images.lock.yaml

Images in containers/images.lock.yaml and their bases:"""

# distribution/reference: a host with an optional port, and path components.
PREFIX = re.compile(r"[\w.-]+(:\d+)?(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*", re.ASCII)


@dataclass(frozen=True)
class Request:
    """The checked command line."""

    image: Image
    lock: Path
    base: str = ""  # a base other than the lock's
    push: str = ""  # a registry, or registry/repository
    check: bool = False
    no_cache: bool = False

    @property
    def base_reference(self) -> str:
        """Return the reference of the base image, with the lock's digest if it has one."""
        if self.base and self.image.verified and "@" not in self.base:
            return f"{self.base}@{self.image.digest}"
        return self.base or self.image.base_reference


def parse(arguments: list[str]) -> Request:
    defaults = {"image": "", "base": "", "push": "", "lock": str(images.LOCK)}
    defaults |= {"check": "false", "no_cache": "false"}
    values = key_values.read(arguments, defaults, "image=cpu")
    for key in ("check", "no_cache"):
        if values[key] not in ("true", "false"):
            raise UserError(f"{key}={values[key]}: use {key}=true or {key}=false.")
    check, no_cache = values["check"] == "true", values["no_cache"] == "true"
    if check and (values["push"] or no_cache):
        raise UserError("check=true builds and pushes nothing. Remove push= and no_cache=.")
    if values["push"] and not PREFIX.fullmatch(values["push"]):  # a build may take an hour
        raise UserError(
            f"push={values['push']}: not a registry, or a registry and a repository in lower case. "
            "Use for example: push=ghcr.io/owner/rocm-recipes"
        )
    lock, name = Path(values["lock"]), values["image"]
    known = images.load(lock)
    if name not in known:
        problem = f"image={name}: no such image" if name else "image=<name> is missing"
        raise UserError(f"{problem}. Images: {', '.join(known)}.{errors.near(name, known)}")
    return Request(known[name], lock, values["base"], values["push"], check, no_cache)


# ---- The build


def pull_base(client: docker.DockerClient, request: Request) -> Any:
    """Return the base image; pull it if it is missing. Raises HostError if its digest is wrong."""
    image, reference = request.image, request.base_reference
    if image.verified and reference.partition("@")[2] != image.digest:
        raise HostError(
            f"base={reference}: containers/images.lock.yaml pins the base of {image.name} to "
            f"{image.digest}. Use a mirror that has this digest, or another image of the lock."
        )
    if engine.find(client, reference) is None:
        engine.check_space(client, image)
    with phase("pull") as step:
        base = engine.find_or_pull(client, reference, step.say)
        step.result = reference if image.verified else f"{reference} (unverified)"
    return base


def outdated(client: docker.DockerClient, request: Request, existing: Any) -> str:
    """Return the reason why the local image does not match the request, or '' if it matches."""
    labels = existing.labels
    if labels.get(f"{LABEL}.tag") != request.image.tag:
        return "containers/build.py did not build it"
    # Mirrors give the same base another name, so compare digests. Compare names only if the base
    # has no digest and is not on this machine.
    base = engine.find(client, request.base_reference)
    digests = {request.base_reference.partition("@")[2]} - {""}
    digests |= engine.digests(base) | {base.id} if base else set()
    name, digest = labels.get(f"{OCI}.base.name"), labels.get(f"{OCI}.base.digest")
    if digest in digests or (not digests and name == request.base_reference):
        return ""
    return f"it was built on {name} ({digest}), not on {request.base_reference}"


def make(client: docker.DockerClient, request: Request) -> None:
    """Pull the base, install the packages, compare them with the lock, and build the image.

    Raises HostError, BuildFailed.
    """
    image, reference = request.image, request.image.local_reference
    engine.sweep(client)  # before the pull, which may need the space
    base, replaced = pull_base(client, request), engine.find(client, reference)
    log_file, installed, python = packages.log_file(image), base.id, "python3"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log_file.open("w", encoding="utf-8") as log:
            if image.locks:
                with phase("install", log) as step:
                    installed = packages.install(client, image, base.id, step)
                python = "/opt/recipes/bin/python"
            probed = probe(client, request, installed, python, base)
            with phase("build", log) as step:
                labels = labels_of(request, base, probed)
                built = build(client, image, {"BASE": base.id, "INSTALLED": installed}, labels)
                step.result = f"{built.attrs['Size'] / 1e9:.2f} GB with its base"
    finally:
        engine.sweep(client)
    replaced = replaced and client.images.get(replaced.id)  # may have lost its name
    if replaced and not replaced.tags and not engine.digests(replaced):
        replaced.remove()


def build(
    client: docker.DockerClient, image: Image, arguments: dict[str, str], labels: dict[str, str]
) -> Any:
    """Build the Dockerfile and name the result. Raises HostError, BuildFailed."""
    dockerfile = FOLDER / image.dockerfile
    try:
        return client.images.build(
            path=str(dockerfile.parent),
            dockerfile=dockerfile.name,
            buildargs=arguments,
            labels=labels,
            tag=image.local_reference,
            network_mode="none",
            nocache=True,
            rm=True,
            forcerm=True,
            use_config_proxy=False,  # or the image would contain the host's proxy password
        )[0]
    except docker.errors.BuildError as error:
        lines = [str(event.get("stream") or event.get("error") or "") for event in error.build_log]
        raise packages.failure(image, 4, "".join(lines).splitlines()) from error


def probe(
    client: docker.DockerClient, request: Request, image: str, python: str, base: Any
) -> dict[str, Any]:
    """Return what the image contains. Raises BuildFailed if that contradicts the lock."""
    with phase("probe") as step:
        probed = verify.probe(client, image, python)
        step.result = verify.summary(probed)
    compare(request, base, probed)
    return probed


def compare(request: Request, image: Any, probed: Mapping[str, Any]) -> None:
    env = dict(pair.split("=", 1) for pair in image.attrs["Config"].get("Env") or [])
    for note in verify.check_entry(request.image, probed, bool(request.base), env):
        print(note)


def probed_before(image: Any) -> dict[str, Any]:
    """Return the probe's results in an image's labels."""
    return dict(json.loads(image.labels[f"{LABEL}.probe"]))


def labels_of(request: Request, base: Any, probed: Mapping[str, Any]) -> dict[str, str]:
    image = request.image
    # The base's digest in a registry, or its local id if it is not from a registry.
    pinned = {image.digest, request.base_reference.partition("@")[2]} & engine.digests(base)
    labels = {
        "image": image.name,
        "tag": image.tag,
        "gfx": ",".join(image.gfx),
        "probe": json.dumps(probed, sort_keys=True),
        **{name: str(probed.get(name) or images.NONE) for name in images.VERSIONS},
    }
    return {f"{LABEL}.{key}": value for key, value in labels.items()} | {
        f"{OCI}.title": f"{images.REPOSITORY}/{image.name}",
        f"{OCI}.version": image.tag,
        f"{OCI}.base.name": request.base_reference,
        f"{OCI}.base.digest": min(pinned or engine.digests(base), default=base.id),
    }


# ---- The command


def check(client: docker.DockerClient, request: Request, existing: Any, reason: str) -> None:
    """Compare the local image with the lock. Raises HostError, BuildFailed."""
    image, name = request.image, request.image.local_reference
    command = f"python containers/build.py image={image.name}"
    if existing is None:
        raise HostError(f"check=true: {name} is not on this machine. To build it: {command}")
    if not reason:
        probed = probe(client, request, existing.id, "python", existing)
        reason = "" if probed == probed_before(existing) else "it was changed after its build"
    if reason:
        raise BuildFailed(f"{name}: {reason}. To rebuild it: {command} no_cache=true")
    print(f"{name} matches the lock")


def push(client: docker.DockerClient, request: Request) -> None:
    """Push the image, and write its digest into the lock for other machines. Raises HostError."""
    image, lock, digest = request.image, request.lock, ""
    repository = f"{request.push}/{image.name}"
    with phase("push") as step:
        try:
            client.api.tag(image.local_reference, repository, image.tag)
            stream = client.api.push(repository, image.tag, stream=True, decode=True)
            for event in engine.raise_errors(stream):
                digest = (event.get("aux") or {}).get("Digest", digest)
                words = (event.get(key) for key in ("id", "status", "progress"))
                step.say(" ".join(str(word) for word in words if word))
        except docker.errors.APIError as error:
            raise HostError(
                f"{repository}:{image.tag} cannot be pushed: {error.explanation or error}\n"
                "If the registry requires a login, run docker login <registry>. If it has no TLS, "
                "add it to insecure-registries in the engine's configuration."
            ) from error
        if not digest:  # without it, the lock would become invalid
            raise HostError(f"{repository}:{image.tag} is pushed, but the engine states no digest.")
        reference = step.result = f"{repository}:{image.tag}@{digest}"
    is_new = write_pushed(lock, image.name, reference)
    state = "is now" if is_new else "was already"
    print(f"{lock.name}: images.{image.name}.pushed {state} {reference}")


def write_pushed(lock: Path, name: str, reference: str) -> bool:
    """Replace only the entry's `pushed` in the lock; return whether it changed."""
    old = lock.read_text(encoding="utf-8")
    field = rf"(?ms)(^  {re.escape(name)}:$.*?^    pushed: )\S+"
    new = re.sub(field, rf"\g<1>{reference}", old, count=1)
    if new != old:
        json_files.write_text(lock, new)  # atomically, since a run may be reading it
    return new != old


def run(request: Request) -> None:
    client, image = engine.connect(), request.image
    existing = engine.find(client, image.local_reference)
    reason = outdated(client, request, existing) if existing else ""
    if request.check:
        check(client, request, existing, reason)
    elif existing and not reason and not request.no_cache:
        compare(request, existing, probed_before(existing))
        print(f"{image.local_reference} is up to date")
    else:
        if reason:
            print(f"Rebuilding {image.local_reference}: {reason}")
        make(client, request)
        print(f"{image.local_reference} is built")
    if request.push:
        push(client, request)


def usage() -> str:
    rows = [
        f"  {name:<16} {image.base}, {'pinned by digest' if image.verified else 'unverified'}, "
        f"{'not ' * (image.pushed == images.UNBUILT)}pushed"
        for name, image in images.load().items()
    ]
    return "\n".join([USAGE, *rows])


def main(arguments: list[str]) -> int:
    try:
        if not arguments or {"--help", "-h", "help"} & set(arguments):
            print(usage())
        else:
            run(parse(arguments))
        return errors.EXIT_DONE
    except KeyboardInterrupt:
        message, code = "\ninterrupted; run the same command again", errors.EXIT_INTERRUPTED
    except (UserError, HostError, BuildFailed) as error:
        message, code = str(error), error.exit_code
    except docker.errors.DockerException as error:
        message = f"The docker engine reported an error: {getattr(error, 'explanation', error)}"
        full = causes.full_disk(message, causes.DOCKER)
        message, code = f"{message}\n{full}".strip(), errors.EXIT_HOST
    except requests.RequestException as error:
        reason = f"{engine.root_cause(error)}. Run the same command again."
        message, code = f"The docker engine stopped answering: {reason}", errors.EXIT_HOST
    except OSError as error:  # the log or the lock file cannot be written
        message, code = errors.os_error_text(error, "This machine"), errors.EXIT_HOST
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    sys.exit(main(sys.argv[1:]))
