"""Build an image listed in containers/images.lock.yaml, check its contents, and push it.

    python containers/build.py image=cpu

Exit codes: 0 done or already up to date; 2 the command line or the lock file is wrong; 3 this host
has no docker engine, base image or image to check; 4 the build failed, or the image contradicts the
lock; 75 interrupted (run the command again; fetched files are reused).
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch.core.installed  # noqa: F401

# isort: split
import docker
import docker.errors
import requests

from containers import causes, engine, fetch, images, push, verify
from containers.fetch import LAST_LINES, BuildFailed
from containers.images import FOLDER, LABEL, OCI, Image
from containers.progress import Phase, Progress
from launch.core import errors, key_values
from launch.core.errors import HostError, UserError

CHUNK = 1 << 20
# Options of every build. use_config_proxy=True would put the host's proxy password into the image.
BUILDER: dict[str, Any] = {"rm": True, "forcerm": True, "decode": True, "use_config_proxy": False}
USAGE = """\
python containers/build.py image=<name> [key=value ...]

  base=<reference>             build on this image (a mirror, your own) instead of the lock's base
  check=true                   compare the local image with the lock; build nothing
  push=<registry/repository>   push the image, and write its digest into the lock
  no_cache=true                rebuild every layer; fetched files are reused
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


# ---- The command line


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


# ---- The build


def git_revision() -> str:
    """Return the commit of this file, or `unknown` outside a clone."""
    describe = "describe --always --exclude=* --abbrev=40 --dirty".split()
    argv = ["git", "-C", str(FOLDER), *describe]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return images.UNKNOWN


def base_digest(request: Request, base: Any) -> str:
    """Return the base's registry digest, or its local id if it is not from a registry."""
    pinned = {request.image.digest, request.base_reference.partition("@")[2]}
    digests = pinned & engine.digests(base)
    return min(digests or engine.digests(base), default=base.id)


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
        f"{LABEL}.lock": fetch.lock_hash(image),
        f"{LABEL}.gfx": ",".join(image.gfx),
        f"{LABEL}.probe": json.dumps(probed, sort_keys=True),
        **versions,
        engine.BUILD: engine.COMPLETE,
    }


def outdated(client: docker.DockerClient, request: Request, existing: Any) -> str:
    """Return the reason why the local image does not match the request, or '' if it matches."""
    labels = existing.labels
    if labels.get(f"{LABEL}.tag") != request.image.tag or engine.BUILD not in labels:
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


def context(image: Image, wheels: Path | None) -> Iterator[bytes]:
    """Yield the build context as a tar, in chunks.

    Wheels take gigabytes, so the tar is never complete in memory or on disk.
    """
    files = {"Dockerfile": FOLDER / image.dockerfile, **fetch.files_of(image)}
    for wheel in sorted(wheels.iterdir()) if wheels else []:
        files[f"wheels/{wheel.name}"] = wheel
    order = "".join(f"{name}\n" for name in fetch.lock_names(image)).encode()
    yield header("locks.txt", len(order)) + order + bytes(-len(order) % tarfile.BLOCKSIZE)
    for name, file in files.items():
        size = file.stat().st_size
        yield header(name, size)
        with file.open("rb") as source:
            while chunk := source.read(CHUNK):
                yield chunk
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def header(name: str, size: int) -> bytes:
    """Return a tar header whose owner, mode and time do not depend on the machine."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def run_build(
    client: docker.DockerClient,
    request: Request,
    base: str,
    wheels: Path | None,
    build: str,
    phase: Phase,
) -> str:
    """Build the image without naming it, write its output to a log, and return the image's id."""
    log = log_file(request.image)
    log.parent.mkdir(parents=True, exist_ok=True)
    lines, image_id = [], ""
    with log.open("w", encoding="utf-8") as file:
        # The SDK would read a file into memory, but it streams an iterator.
        stream = client.api.build(
            fileobj=context(request.image, wheels),
            custom_context=True,
            buildargs={"BASE": base, "BUILD": build},
            labels={engine.BUILD: build},
            network_mode="none",
            nocache=request.no_cache,
            **BUILDER,
        )
        try:
            for event in engine.raise_errors(stream):
                image_id = (event.get("aux") or {}).get("ID", image_id)
                for line in event.get("stream", "").splitlines():
                    file.write(f"{line}\n")
                    lines.append(line)
                    phase.say(line)
        except docker.errors.APIError as error:
            file.write(f"{error.explanation}\n")
            raise build_failure(request.image, lines, str(error.explanation), wheels) from error
    return image_id


def log_file(image: Image) -> Path:
    return fetch.cache() / "logs" / f"{image.name}-{image.tag}.log"


def build_failure(
    image: Image, lines: list[str], explanation: str, wheels: Path | None
) -> Exception:
    """Return a HostError if the disk is full, else a BuildFailed.

    The message contains install.py's error, or else the last lines of output and `explanation`.
    """
    removing = "Removing intermediate container"
    output = [line for line in lines if line.strip() and not line.startswith(removing)]
    reason = fetch.error_lines(output) or [*output[-LAST_LINES:], explanation]
    log = f"The complete output is in {log_file(image)}"
    message = "\n".join([f"The build of {image.name} failed:", *reason, log])
    if full := causes.full_disk("\n".join([*lines, explanation]), "Docker's disk", engine.FREE):
        return HostError(f"{message}\n{full}")
    if "hash differs" in message:
        message += f"\nTo fetch the files again, delete {wheels}."
    return BuildFailed(message)


def make(client: docker.DockerClient, request: Request, progress: Progress) -> None:
    """Pull the base, fetch the wheels, build, probe and name the image.

    Raises HostError, BuildFailed.
    """
    image, build = request.image, uuid.uuid4().hex
    with progress.phase("pull") as phase:
        base = pull_base(client, request, phase)
    wheels = None
    if image.locks:
        with progress.phase("fetch") as phase:
            reference = engine.without_tag(request.base_reference)
            facts = fetch.inspect(client, reference)
            wheels = fetch.wheels(client, image, reference, facts, phase.say)
            sizes = [wheel.stat().st_size for wheel in wheels.iterdir()]
            phase.result = (
                f"{len(sizes)} files, {sum(sizes) / 1e6:.0f} MB, for Python {facts['python']}"
            )
    try:
        with progress.phase("build") as phase:
            image_id = run_build(client, request, base.id, wheels, build, phase)
            phase.result = f"{client.images.get(image_id).attrs['Size'] / 1e9:.2f} GB with its base"
        with progress.phase("probe") as phase:
            probed = verify.probe(client, image_id)
            compare(request, client.images.get(image_id), probed, progress)
            phase.result = verify.summary(probed)
        # The labels contain the probe's results, so add them and the name after the probe.
        replaced = engine.find(client, image.local_reference)
        name(client, image_id, image.local_reference, labels_of(request, base, probed))
    finally:
        engine.remove_build(client, build)
    if replaced is not None:
        engine.remove_unnamed(client, replaced.id)


def name(
    client: docker.DockerClient, image_id: str, reference: str, labels: Mapping[str, str]
) -> None:
    """Label and name an image with a one-line Dockerfile.

    The SDK's `labels=` would add a layer for each label.
    """
    pairs = [
        f"{key}={json.dumps(value, ensure_ascii=False)}".replace("$", "\\$")
        for key, value in labels.items()
    ]
    dockerfile = io.BytesIO(f"FROM {image_id}\nLABEL {' '.join(pairs)}\n".encode())
    stream = client.api.build(fileobj=dockerfile, tag=reference, **BUILDER)
    for _ in engine.raise_errors(stream):
        pass


# ---- The command


def compare(request: Request, built: Any, probed: Mapping[str, Any], progress: Progress) -> None:
    env = verify.environment(built)
    for note in verify.check_entry(request.image, probed, bool(request.base), env):
        progress.say(note)


def check(client: docker.DockerClient, request: Request, progress: Progress) -> None:
    """Compare the local image with its labels and the lock, without building.

    Raises HostError if there is no such image, BuildFailed if they differ.
    """
    image = request.image
    existing = engine.find(client, image.local_reference)
    if existing is None:
        raise HostError(
            f"check=true: {image.local_reference} is not on this machine. "
            f"To build it: python containers/build.py image={image.name}"
        )
    reason = outdated(client, request, existing)
    if not reason:
        with progress.phase("probe") as phase:
            probed = verify.probe(client, existing.id)
            phase.result = verify.summary(probed)
        compare(request, existing, probed, progress)
        label = json.loads(existing.labels[f"{LABEL}.probe"])
        keys = sorted(k for k in label.keys() | probed.keys() if label.get(k) != probed.get(k))
        reason = f"its labels differ from its contents in {', '.join(keys)}" if keys else ""
    if reason:
        raise BuildFailed(
            f"{image.local_reference}: {reason}. To rebuild it: python containers/build.py "
            f"image={image.name} no_cache=true"
        )
    progress.say(f"{image.local_reference} matches the lock")


def run(request: Request, progress: Progress) -> None:
    client = engine.connect()
    image = request.image
    if request.check:
        return check(client, request, progress)
    existing = None if request.no_cache else engine.find(client, image.local_reference)
    reason = outdated(client, request, existing) if existing is not None else "it is missing"
    if existing is not None and not reason:
        compare(request, existing, json.loads(existing.labels[f"{LABEL}.probe"]), progress)
        progress.say(f"{image.local_reference} is up to date")
    else:
        if existing is not None:
            progress.say(f"Rebuilding {image.local_reference}: {reason}")
        make(client, request, progress)
        progress.say(f"{image.local_reference} is built")
    if request.push:
        with progress.phase("push") as phase:
            reference = phase.result = push.push(client, image, request.push, phase.say)
        changed = push.write_pushed(request.lock, image.name, reference)
        progress.say(
            f"{request.lock.name}: images.{image.name}.pushed "
            f"{'is now' if changed else 'was already'} {reference}"
        )
    return None


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
        message, code = f"The docker engine reported an error: {reason}", errors.EXIT_HOST
    except requests.RequestException as error:
        reason = f"{engine.root_cause(error)}. Run the same command again."
        message, code = f"The docker engine stopped answering: {reason}", errors.EXIT_HOST
    except OSError as error:  # the cache, the log or the lock file cannot be written
        message, code = errors.os_error_text(error, "This machine"), errors.EXIT_HOST
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    sys.exit(main(sys.argv[1:]))
