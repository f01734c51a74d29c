"""Build an image listed in containers/images.lock.yaml, check its contents, and push it.

    python containers/build.py image=cpu

Exit codes: 0 done or already up to date; 2 the command line or the lock file is wrong; 3 this host
has no docker engine, base image or image to check; 4 the build failed, or the image contradicts the
lock; 75 interrupted (run the command again; downloads are reused).
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
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

from containers import causes, engine, images, packages, pip_settings, push, verify
from containers.images import FOLDER, LABEL, OCI, Image
from containers.progress import Phase, Progress
from containers.verify import BuildFailed
from launch.core import errors, key_values
from launch.core.errors import HostError, UserError

USAGE = """\
python containers/build.py image=<name> [key=value ...]

  base=<reference>             build on this image (a mirror, your own) instead of the lock's base
  check=true                   compare the local image with the lock; build nothing
  push=<registry/repository>   push the image, and write its digest into the lock
  no_cache=true                rebuild an image that is up to date; downloads are reused
  lock=<file>                  read this file instead of containers/images.lock.yaml

Images in containers/images.lock.yaml and their bases:"""


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
    lock, name = Path(values["lock"]), values["image"]
    known = images.load(lock)
    if name not in known:
        problem = f"image={name}: no such image" if name else "image=<name> is missing"
        raise UserError(f"{problem}. Images: {', '.join(known)}.{errors.near(name, known)}")
    return Request(known[name], lock, values["base"], values["push"], check, no_cache)


# ---- The base


def pull_base(client: docker.DockerClient, request: Request, phase: Phase) -> Any:
    """Return the base image; pull it if it is missing. Raises HostError if its digest is wrong."""
    image, reference = request.image, request.base_reference
    if image.verified and reference.partition("@")[2] != image.digest:
        raise HostError(
            f"base={reference}: containers/images.lock.yaml pins the base of {image.name} to "
            f"{image.digest}. Use a mirror that has this digest, or another image of the lock."
        )
    base = engine.find_or_pull(client, reference, phase.say)
    phase.result = reference if image.verified else f"{reference} (unverified)"
    return base


def base_digest(request: Request, base: Any) -> str:
    """Return the base's registry digest, or its local id if it is not from a registry."""
    pinned = {request.image.digest, request.base_reference.partition("@")[2]}
    digests = pinned & engine.digests(base)
    return min(digests or engine.digests(base), default=base.id)


def outdated(client: docker.DockerClient, request: Request, existing: Any) -> str:
    """Return the reason why the local image does not match the request, or '' if it matches."""
    labels = existing.labels
    if labels.get(f"{LABEL}.tag") != request.image.tag:
        return "containers/build.py did not build it"
    # Mirrors give the same base another name, so compare digests. Compare names only if the base
    # has no digest and is not on this machine.
    base = engine.find(client, engine.without_tag(request.base_reference))
    digests = {request.base_reference.partition("@")[2]} - {""}
    digests |= engine.digests(base) | {base.id} if base is not None else set()
    name, digest = labels.get(f"{OCI}.base.name"), labels.get(f"{OCI}.base.digest")
    if digest in digests or (not digests and name == request.base_reference):
        return ""
    return f"it was built on {name} ({digest}), not on {request.base_reference}"


# ---- The build


def make(client: docker.DockerClient, request: Request, progress: Progress) -> None:
    """Pull the base, install the packages, build, probe and name the image.

    Raises HostError, BuildFailed.
    """
    image = request.image
    with progress.phase("pull") as phase:
        base = pull_base(client, request, phase)
    packages.log_file(image).parent.mkdir(parents=True, exist_ok=True)
    replaced = engine.find(client, image.local_reference)
    unnamed = []
    try:
        with packages.log_file(image).open("w", encoding="utf-8") as log:
            arguments = {"BASE": base.id}
            if image.locks:
                with progress.phase("install", log) as phase:
                    settings = pip_settings.for_container(pip_settings.pip_config(), os.environ)
                    unnamed.append(packages.install(client, image, base.id, settings, phase))
                    arguments["INSTALLED"] = unnamed[0]
            with progress.phase("build", log) as phase:
                unnamed.append(image_id := build(client, image, arguments, phase))
                size = client.images.get(image_id).attrs["Size"]
                phase.result = f"{size / 1e9:.2f} GB with its base"
        with progress.phase("probe") as phase:
            probed = verify.probe(client, image_id)
            compare(request, client.images.get(image_id), probed, progress)
            phase.result = verify.summary(probed)
        # The labels contain the probe's results, so add them and the name after the probe. The
        # SDK's `labels=` would add a layer for each label.
        lines = f"FROM {image_id}\nLABEL {quoted(labels_of(request, base, probed))}\n"
        docker_build(client, {"Dockerfile": lines.encode()}, tag=image.local_reference)
    finally:
        for unnamed_id in unnamed:
            engine.remove_unnamed(client, unnamed_id)
    if replaced is not None:
        engine.remove_unnamed(client, replaced.id)


def build(
    client: docker.DockerClient, image: Image, arguments: dict[str, str], phase: Phase
) -> str:
    """Build the image without naming it, and return its id. Raises HostError, BuildFailed."""
    programs = {Path(name).name: FOLDER / name for name in (*images.SHARED, *image.programs)}
    files = {"Dockerfile": FOLDER / image.dockerfile, **programs}
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        phase.say(line)

    try:
        return docker_build(
            client,
            {name: file.read_bytes() for name, file in files.items()},
            show,
            buildargs=arguments,
            labels={f"{LABEL}.image": image.name},
            network_mode="none",
            nocache=True,
        )
    except docker.errors.APIError as error:
        raise packages.failure(image, 4, [*lines, str(error.explanation)]) from error


def docker_build(
    client: docker.DockerClient,
    files: Mapping[str, bytes],
    show: engine.Show = lambda line: None,
    **options: Any,
) -> str:
    """Build an image from a Dockerfile and files, and return its id."""
    image_id = ""
    # use_config_proxy=True would put the host's proxy password into the image.
    options |= {"rm": True, "forcerm": True, "decode": True, "use_config_proxy": False}
    stream = client.api.build(
        fileobj=io.BytesIO(packages.tar(files)), custom_context=True, **options
    )
    for event in engine.raise_errors(stream):
        image_id = (event.get("aux") or {}).get("ID", image_id)
        for line in event.get("stream", "").splitlines():
            show(line)
    return image_id


# ---- Labels


def git_revision() -> str:
    """Return the commit of this file, or `unknown` outside a clone."""
    describe = "describe --always --exclude=* --abbrev=40 --dirty".split()
    argv = ["git", "-C", str(FOLDER), *describe]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return images.UNKNOWN


def labels_of(request: Request, base: Any, probed: Mapping[str, Any]) -> dict[str, str]:
    image = request.image
    versions = {f"{LABEL}.{name}": str(probed.get(name) or images.NONE) for name in images.VERSIONS}
    return {
        f"{OCI}.title": f"{images.REPOSITORY}/{image.name}",
        f"{OCI}.revision": git_revision(),
        f"{OCI}.version": image.tag,
        f"{OCI}.base.name": request.base_reference,
        f"{OCI}.base.digest": base_digest(request, base),
        f"{LABEL}.image": image.name,
        f"{LABEL}.tag": image.tag,
        f"{LABEL}.gfx": ",".join(image.gfx),
        f"{LABEL}.probe": json.dumps(probed, sort_keys=True),
        **versions,
    }


def quoted(labels: Mapping[str, str]) -> str:
    """Return labels as arguments of a Dockerfile's LABEL."""
    return " ".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}".replace("$", "\\$")
        for key, value in labels.items()
    )


# ---- The command


def compare(request: Request, built: Any, probed: Mapping[str, Any], progress: Progress) -> None:
    env = verify.environment(built)
    for note in verify.check_entry(request.image, probed, bool(request.base), env):
        progress.say(note)


def check(
    client: docker.DockerClient, request: Request, existing: Any, reason: str, progress: Progress
) -> None:
    """Compare the local image with its labels and the lock. Raises HostError, BuildFailed."""
    image = request.image
    command = f"python containers/build.py image={image.name}"
    if existing is None:
        raise HostError(
            f"check=true: {image.local_reference} is not on this machine. To build it: {command}"
        )
    if not reason:
        with progress.phase("probe") as phase:
            probed = verify.probe(client, existing.id)
            phase.result = verify.summary(probed)
        compare(request, existing, probed, progress)
        label = json.loads(existing.labels[f"{LABEL}.probe"])
        keys = sorted(k for k in label.keys() | probed.keys() if label.get(k) != probed.get(k))
        reason = f"its labels differ from its contents in {', '.join(keys)}" if keys else ""
    if reason:
        rebuild = f"To rebuild it: {command} no_cache=true"
        raise BuildFailed(f"{image.local_reference}: {reason}. {rebuild}")
    progress.say(f"{image.local_reference} matches the lock")


def run(request: Request, progress: Progress) -> None:
    client, image = engine.connect(), request.image
    existing = engine.find(client, image.local_reference)
    reason = "" if existing is None else outdated(client, request, existing)
    if request.check:
        check(client, request, existing, reason, progress)
    elif existing is None or reason or request.no_cache:
        if reason:
            progress.say(f"Rebuilding {image.local_reference}: {reason}")
        make(client, request, progress)
        progress.say(f"{image.local_reference} is built")
    else:
        compare(request, existing, json.loads(existing.labels[f"{LABEL}.probe"]), progress)
        progress.say(f"{image.local_reference} is up to date")
    if request.push:
        with progress.phase("push") as phase:
            reference = phase.result = push.push(client, image, request.push, phase.say)
        changed = push.write_pushed(request.lock, image.name, reference)
        progress.say(
            f"{request.lock.name}: images.{image.name}.pushed "
            f"{'is now' if changed else 'was already'} {reference}"
        )


def main(arguments: list[str]) -> int:
    try:
        if not arguments or {"--help", "-h", "help"} & set(arguments):
            rows = [
                f"  {name:<16} {image.base}, "
                f"{'pinned by digest' if image.verified else 'unverified'}, "
                f"{'not ' * (image.pushed == images.UNBUILT)}pushed"
                for name, image in images.load().items()
            ]
            print(USAGE, *rows, sep="\n")
        else:
            run(parse(arguments), Progress())
        return errors.EXIT_DONE
    except KeyboardInterrupt:
        message, code = "\ninterrupted; run the same command again", errors.EXIT_INTERRUPTED
    except (UserError, HostError, BuildFailed) as error:
        message, code = str(error), error.exit_code
    except docker.errors.DockerException as error:
        reason = getattr(error, "explanation", None) or error
        message = f"The docker engine reported an error: {reason}"
        full = causes.full_disk(message, "Docker's disk", engine.FREE)
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
