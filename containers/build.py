"""Builds an image of containers/images.lock.yaml, checks it against that file, pushes it.

    python containers/build.py image=cpu

Exit codes: 0 done (or nothing to do), 2 the request or the lock file is wrong, 3 this host cannot do it (no engine, no base, no image to
check), 4 the build failed or the lock says what is not so, 75 interrupted (run it again: what was fetched stays).
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

import launch  # noqa: F401 -- says what is missing before that is imported

# isort: split
import docker
import docker.errors
import requests

from containers import engine, fetch, images, push, verify
from containers.fetch import BuildFailed
from containers.images import FOLDER, LABEL, OCI, UNBUILT, Image, LockError
from containers.progress import Phase, Progress
from launch.command_line import key_values
from launch.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, EXIT_USER, HostError, UserError, near

LAST_LINES = 15
CHUNK = 1 << 20


@dataclass(frozen=True)
class Asked:
    """The command line, checked."""

    image: Image
    lock: Path
    base: str = ""  # another base than the lock's
    push: str = ""  # registry, or registry/repository
    check: bool = False
    no_cache: bool = False

    @property
    def base_reference(self) -> str:
        return self.base or self.image.base_reference


# ---- What was asked


def parse(arguments: list[str]) -> Asked:
    defaults = {"image": "", "base": "", "check": "false", "push": "", "no_cache": "false", "lock": str(images.LOCK)}
    values = key_values.read(arguments, defaults, "image=cpu")
    for key in ("check", "no_cache"):
        if values[key] not in ("true", "false"):
            raise UserError(f"{key}={values[key]}: true or false is expected.")
    check, no_cache = values["check"] == "true", values["no_cache"] == "true"
    if check and (values["push"] or no_cache):
        raise UserError("check=true builds and pushes nothing: leave push= and no_cache= out.")
    if values["push"] and not push.PLACE.fullmatch(values["push"]):
        raise UserError(
            f"push={values['push']}: <registry> or <registry>/<repository> is expected, in lower case, without https:// and without a tag, "
            "such as ghcr.io/me/recipes. The image's name and tag are put behind it."
        )
    lock = Path(values["lock"])
    if not lock.is_file():
        raise UserError(f"lock={lock}: there is no such file.")
    known = images.load(lock)
    if values["image"] not in known:
        what = f"There is no image `{values['image']}`" if values["image"] else "image=<name> is missing"
        raise UserError(f"{what}. Images: {', '.join(known)}.{near(values['image'], known)}")
    return Asked(known[values["image"]], lock, values["base"], values["push"], check, no_cache)


def usage() -> str:
    known = images.load()
    width = max(len(name) for name in known)
    rows = [
        f"  {name:<{width}}  {image.base}, {'pinned by digest' if image.verified else 'unverified'}, "
        f"{'not pushed' if image.pushed == UNBUILT else 'pushed'}"
        for name, image in known.items()
    ]
    return "\n".join(
        [
            "python containers/build.py image=<name> [key=value ...]",
            "",
            "  base=<reference>             another base than the lock's: a mirror, an image of your own",
            "  check=true                   build nothing: compare the image that is here with the lock",
            "  push=<registry/repository>   push it, and write its digest into the lock",
            "  no_cache=true                build anew; the files already fetched serve again",
            "  lock=<file>                  another images.lock.yaml",
            "",
            "Images of containers/images.lock.yaml, and their bases:",
            *rows,
        ]
    )


# ---- The build


def git_revision() -> str:
    """The commit that this file is of, or `unknown` outside of a clone."""
    git = ["git", "-C", str(FOLDER)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return images.UNKNOWN
    return commit + ("-dirty" if changed else "")


def base_digest(asked: Asked, base: Any) -> str:
    """As a registry knows it; the engine's own id for one that no registry has."""
    named = {asked.image.digest, asked.base_reference.partition("@")[2]} & engine.digests(base)
    return min(named or engine.digests(base), default=base.id)


def labels_of(asked: Asked, base: Any, found: Mapping[str, Any]) -> dict[str, str]:
    image = asked.image
    versions = {f"{LABEL}.{name}": str(found.get(name) or images.NONE) for name in images.VERSIONS}
    return {
        f"{OCI}.title": f"{images.REPOSITORY}/{image.name}",
        f"{OCI}.revision": git_revision(),
        f"{OCI}.version": image.tag,
        f"{OCI}.base.name": asked.base_reference,
        f"{OCI}.base.digest": base_digest(asked, base),
        f"{LABEL}.image": image.name,
        f"{LABEL}.tag": image.tag,
        f"{LABEL}.lock": fetch.lock_hash(image),
        f"{LABEL}.gfx": ",".join(image.gfx),
        f"{LABEL}.probe": json.dumps(found, sort_keys=True),
        **versions,
        engine.BUILD: engine.COMPLETE,
    }


def outdated(client: docker.DockerClient, asked: Asked, existing: Any) -> str:
    """Why the image that is here is not the one asked for; '' where it is."""
    labels = existing.labels
    if labels.get(f"{LABEL}.tag") != asked.image.tag or engine.BUILD not in labels:
        return "it was not made by this program"
    # One image has many names (a mirror's, a registry's that moved), so its digest decides, where that can be known without pulling.
    base = engine.find(client, engine.without_tag(asked.base_reference))
    digests = {asked.base_reference.partition("@")[2]} - {""}
    digests |= engine.digests(base) | {base.id} if base is not None else set()
    name, digest = labels.get(f"{OCI}.base.name"), labels.get(f"{OCI}.base.digest")
    if digest in digests or (not digests and name == asked.base_reference):
        return ""
    return f"it was built on {name} ({digest}), which is not {asked.base_reference}"


def have_base(client: docker.DockerClient, asked: Asked, phase: Phase) -> Any:
    image, reference = asked.image, asked.base_reference
    named = reference.partition("@")[2]
    refusal = (
        f"containers/images.lock.yaml pins the base of {image.name} to {image.digest}, and base={reference} "
        "{}. Name a copy of that very image (a mirror keeps its digest), or another entry of the lock."
    )
    if image.verified and named and named != image.digest:
        raise HostError(refusal.format("names another digest"))
    base = engine.have(client, reference, image.size_gb, phase.say)
    if image.verified and image.digest not in engine.digests(base):
        raise HostError(refusal.format(f"has {', '.join(sorted(engine.digests(base))) or 'none, since it was loaded, not pulled'}"))
    phase.result = reference if image.verified else f"{reference} (unverified)"
    return base


def context(image: Image, wheels: Path | None) -> Iterator[bytes]:
    """What the engine builds from, as a tar in pieces: gigabytes of wheels pass through neither memory nor a temporary file."""
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
    """Owner, mode and time are the same for everyone who builds."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def run_build(client: docker.DockerClient, asked: Asked, base: str, wheels: Path | None, build: str, phase: Phase) -> str:
    """The id of the built image, which has no name yet. Every line goes to the log as well."""
    log = log_file(asked.image)
    log.parent.mkdir(parents=True, exist_ok=True)
    lines, built = [], ""
    with log.open("w", encoding="utf-8") as file:
        # `context` as a file would be read into memory by the SDK; what has no length is sent in pieces.
        stream = client.api.build(
            fileobj=context(asked.image, wheels),
            custom_context=True,
            buildargs={"BASE": base, "BUILD": build},
            labels={engine.BUILD: build},
            network_mode="none",
            nocache=asked.no_cache,
            rm=True,
            forcerm=True,
            decode=True,
            use_config_proxy=False,
        )
        try:
            for event in engine.failing(stream):
                built = (event.get("aux") or {}).get("ID", built)
                for line in event.get("stream", "").splitlines():
                    file.write(f"{line}\n")
                    lines.append(line)
                    phase.say(line)
        except docker.errors.APIError as error:
            file.write(f"{error.explanation}\n")
            raise build_failure(asked.image, lines, str(error.explanation), wheels) from error
    return built


def log_file(image: Image) -> Path:
    return fetch.cache() / "logs" / f"{image.name}-{image.tag}.log"


def build_failure(image: Image, lines: list[str], explanation: str, wheels: Path | None) -> Exception:
    """install.py's own message where there is one, else the last lines and what the engine says."""
    said = [line for line in lines if line.strip() and not line.startswith("Removing intermediate container")]
    at = max((i for i, line in enumerate(said) if line.startswith("error: ")), default=None)
    reason = [*said[-LAST_LINES:], explanation] if at is None else [said[at].removeprefix("error: "), *said[at + 1 :]]
    message = "\n".join([f"The build of {image.name} failed:", *reason, f"All of its output: {log_file(image)}"])
    if "no space left on device" in message.lower():
        return HostError(f"{message}\nMake room where the engine keeps its images (docker system df; docker image prune).")
    if "another hash" in message:
        message += f"\nFetched files are kept in {wheels}: delete that folder to fetch them anew."
    return BuildFailed(message)


def make(client: docker.DockerClient, asked: Asked, progress: Progress) -> None:
    image, build = asked.image, uuid.uuid4().hex
    engine.remove_forgotten(client)
    with progress.phase("pull") as phase:
        base = have_base(client, asked, phase)
    wheels = None
    if image.locks:
        with progress.phase("fetch") as phase:
            reference = engine.without_tag(asked.base_reference)
            facts = fetch.inspect(client, reference)
            wheels = fetch.wheels(client, image, reference, facts, phase.say)
            sizes = [wheel.stat().st_size for wheel in wheels.iterdir()]
            phase.result = f"{len(sizes)} files, {sum(sizes) / 1e6:.0f} MB, for Python {facts['python']}"
    try:
        with progress.phase("build") as phase:
            built = run_build(client, asked, base.id, wheels, build, phase)
            phase.result = f"{client.images.get(built).attrs['Size'] / 1e9:.2f} GB with its base"
        with progress.phase("probe") as phase:
            found = verify.probe(client, built)
            notes = verify.refuse_lies(image, found, base_replaced=bool(asked.base))
            phase.result = verify.summary(found)
        # It gets its name only now, with what was found as labels, which the builder could not know.
        replaced = engine.find(client, image.local_reference)
        name(client, built, image.local_reference, labels_of(asked, base, found))
    finally:
        engine.remove_build(client, build)
    for note in notes:
        progress.say(note)
    if replaced is not None:
        engine.remove_unnamed(client, replaced.id)


def name(client: docker.DockerClient, built: str, reference: str, labels: Mapping[str, str]) -> None:
    """A build of its own that adds nothing but labels: the SDK's `labels=` would make a step of each."""
    pairs = [f"{key}={json.dumps(value, ensure_ascii=False)}".replace("$", "\\$") for key, value in labels.items()]
    dockerfile = io.BytesIO(f"FROM {built}\nLABEL {' '.join(pairs)}\n".encode())
    stream = client.api.build(fileobj=dockerfile, tag=reference, rm=True, forcerm=True, decode=True, use_config_proxy=False)
    for _ in engine.failing(stream):
        pass


# ---- The command


def check(client: docker.DockerClient, asked: Asked, progress: Progress) -> None:
    """The image that is here, asked anew, against its labels and the lock. Builds nothing."""
    image = asked.image
    existing = engine.find(client, image.local_reference)
    if existing is None:
        raise HostError(
            f"The lock's entry {image.name} is in order; the image {image.local_reference} is not on this machine, so nothing could be "
            f"compared. To build it: python containers/build.py image={image.name}"
        )
    reason = outdated(client, asked, existing)
    if reason:
        raise BuildFailed(f"{image.local_reference}: {reason}. To build it anew: python containers/build.py image={image.name}")
    with progress.phase("probe") as phase:
        found = verify.probe(client, existing.id)
        phase.result = verify.summary(found)
    for note in verify.refuse_lies(image, found, base_replaced=bool(asked.base)):
        progress.say(note)
    stated = json.loads(existing.labels[f"{LABEL}.probe"])
    if stated != found:
        changed = ", ".join(sorted(key for key in stated.keys() | found.keys() if stated.get(key) != found.get(key)))
        raise BuildFailed(f"{image.local_reference}: its labels and what it holds differ in {changed}. Build it anew with no_cache=true")
    progress.say(f"{image.local_reference} is what the lock says")


def run(asked: Asked, progress: Progress) -> None:
    client = engine.connect()
    image = asked.image
    if asked.check:
        return check(client, asked, progress)
    existing = None if asked.no_cache else engine.find(client, image.local_reference)
    reason = outdated(client, asked, existing) if existing is not None else "it is not here"
    if existing is not None and not reason:
        for note in verify.refuse_lies(image, json.loads(existing.labels[f"{LABEL}.probe"]), base_replaced=bool(asked.base)):
            progress.say(note)
        progress.say(f"{image.local_reference} is up to date")
    else:
        if existing is not None:
            progress.say(f"{image.local_reference} is built anew: {reason}")
        make(client, asked, progress)
        progress.say(f"{image.local_reference} is built")
    if asked.push:
        with progress.phase("push") as phase:
            reference = phase.result = push.push(client, image, asked.push, phase.say)
        changed = push.write_pushed(asked.lock, image.name, reference)
        progress.say(f"{asked.lock.name}: images.{image.name}.pushed {'is now' if changed else 'was already'} {reference}")
    return None


def main(arguments: list[str]) -> int:
    try:
        if not arguments or {"--help", "-h", "help"} & set(arguments):
            print(usage())
            return EXIT_DONE
        run(parse(arguments), Progress())
    except LockError as error:
        print(error, file=sys.stderr)
        return EXIT_USER
    except (UserError, HostError, BuildFailed) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except docker.errors.DockerException as error:
        print(f"The docker engine refused: {getattr(error, 'explanation', None) or error}", file=sys.stderr)
        return EXIT_HOST
    except requests.RequestException as error:
        print(f"The docker engine stopped answering: {engine.root(error)}. Run the same command again.", file=sys.stderr)
        return EXIT_HOST
    except OSError as error:  # a cache, a log or a lock file that cannot be written
        print(f"{error.filename or 'This machine'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_HOST
    except KeyboardInterrupt:
        print("\ninterrupted: run it again, what was fetched stays", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def terminated(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)  # so that it removes what it has begun, as for Ctrl-C
    sys.exit(main(sys.argv[1:]))
