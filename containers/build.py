"""Build an image listed in containers/images.lock.yaml, check its contents, and push it.

    python containers/build.py image=<name> [key=value ...]

  base=<reference>             build on this image (a mirror, your own) instead of the lock's base
  builder=buildkit             build the image with the program docker and BuildKit, for an engine
                               without the builder that docker's SDK uses
  check=true                   compare the local image with the lock; build nothing
  push=<registry/repository>   push the image, and write its digest into the lock
  no_cache=true                rebuild an image that is up to date; downloads are reused
  lock=<file>                  read this file instead of containers/images.lock.yaml

Exit codes: 0 done or already up to date; 2 the command line or the lock file is wrong; 3 this host
has no docker engine, base image or image to check; 4 the build failed, or the image contradicts the
lock; 75 interrupted (run the command again; downloads are reused).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch.core.installed  # noqa: F401

# isort: split
import docker
from docker.types import Mount
from packaging.specifiers import SpecifierSet

from containers import engine, images
from containers.images import FOLDER, INSTALL, LABEL, NONE, OCI, UNKNOWN, VERSIONS, Image
from containers.install import FULL_DISK, PackagesError
from containers.pip_settings import for_container, local_folders, pip_options
from launch.core import docker_host, errors, json_files, key_values
from launch.core.errors import HostError, UserError

PREFIX = re.compile(r"[\w.-]+(:\d+)?(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*", re.ASCII)
FLAG = ("true", "false")
CHOICES = {"builder": ("sdk", "buildkit"), "check": FLAG, "no_cache": FLAG}
INSIDE = "opt/recipes-build"  # of the installing container; install.py removes it
PIP_CACHE = "/opt/recipes-cache"  # a volume, which keeps the files that pip has downloaded


def parse(arguments: list[str]) -> tuple[Image, dict[str, str]]:
    """Return the image and the options, with its base. Raises UserError, HostError."""
    defaults = {"image": "", "base": "", "push": "", "lock": str(images.LOCK)}
    defaults |= {"check": "false", "no_cache": "false", "builder": "sdk"}
    options = key_values.read(arguments, defaults, "image=cpu", CHOICES)
    if options["check"] == options["no_cache"] == "true":
        raise UserError("check=true builds nothing. Remove no_cache=true.")
    if options["push"] and not PREFIX.fullmatch(options["push"]):  # before a build of an hour
        raise UserError(f"push={options['push']}: use a registry and a repository in lower case.")
    if options["builder"] == "buildkit" and not shutil.which("docker"):
        raise HostError("builder=buildkit needs the program docker and its plugin buildx.")
    known, name = images.load(Path(options["lock"])), options["image"]
    if name not in known:
        raise UserError(f"image={name}: use {', '.join(known)}.{errors.near(name, known)}")
    return known[name], {**options, "base": base_of(known[name], options["base"])}


def base_of(image: Image, other: str) -> str:
    """Return the reference of the base, or of `other` with the lock's digest. Raises UserError."""
    name, _, digest = (other or image.base_reference).partition("@")
    if not image.verified:
        return other or image.base
    if digest not in ("", image.digest):
        problem = f"base={other}: the lock pins the base of {image.name} to {image.digest}."
        raise UserError(f"{problem} Use a mirror that has this digest, or another image.")
    return f"{name}@{image.digest}"


def probe(client: docker.DockerClient, image: str, python: str = "python") -> dict[str, Any]:
    """Return the versions and GPU targets in an image. Raises PackagesError."""
    argv = [python, "-B", "-c", (FOLDER / "probe.py").read_text(encoding="utf-8")]
    with engine.ran(client, image, argv) as (code, lines, _):
        if code:
            raise PackagesError("\n".join([f"{python} probe.py failed in the image:", *lines]))
    probed = dict(json.loads(lines[-1]))
    print(", ".join(f"{name} {value}" for name, value in probed.items() if value), flush=True)
    return probed


def matches(field: str, stated: str, actual: str) -> bool:
    """Return whether a version belongs to the release that the lock states (see its header)."""
    if NONE in (stated, actual):
        return stated == actual
    if field == "rocm":  # patch releases are compatible
        stated = ".".join(stated.split(".")[:2])
    form = "=={}" if "+" in stated else "=={}.*"
    return SpecifierSet(form.format(stated), prereleases=True).contains(actual)


def compare(image: Image, probed: Mapping[str, Any]) -> None:
    """Print what the lock does not state. Raises PackagesError if it contradicts the lock."""
    differences = []
    for field in VERSIONS:
        stated, actual = getattr(image, field), probed.get(field) or NONE
        line = f"{field}: the lock says {stated}, the image has {actual}"
        if stated != UNKNOWN and matches(field, stated, actual):
            continue
        # An unverified base may have another Python, since the locks support several versions.
        if stated == UNKNOWN or (field == "python" and not image.verified):
            print(f"note: {line}")
        else:
            differences.append(line)
    compiled = probed.get("gfx") or NONE
    if not {*image.gfx} <= {"cpu", *compiled.split()}:
        differences.append(f"gfx: the lock says {' '.join(image.gfx)}, the image has {compiled}")
    if differences:
        problem = f"images.lock.yaml contradicts the image {image.name}:"
        remedy = "Correct the lock, or use a base that matches it."
        raise PackagesError("\n  ".join([problem, *differences]) + f"\n{remedy}")


def outdated(client: docker.DockerClient, image: Image, base: str, existing: Any) -> str:
    """Return why the local image must be built, or '' if it matches the lock and the base."""
    if existing is None:
        return "it is not on this machine"
    name, digest = (existing.labels.get(f"{OCI}.base.{key}") for key in ("name", "digest"))
    local = engine.find(client, base)
    # Mirrors give the same base another name, so compare names only if it is not on this machine.
    is_same = digest in engine.digests(local) | {local.id} if local else name == base
    if image.verified or is_same:  # a verified base's digest is part of the tag
        return ""
    return f"it was built on {name} ({digest}), not on {base}"


def make(
    client: docker.DockerClient, image: Image, reference: str, builder: str, say: engine.Show
) -> None:
    """Pull the base, install and check the packages, and build. Raises HostError, PackagesError."""
    engine.sweep(client)  # before the pull, which may need the space
    if (base := engine.find(client, reference)) is None:
        folder = docker_host.folder(docker_host.address(os.environ))
        problem = folder and image.space_problem(folder, shutil.disk_usage(folder).free / 1e9)
        if problem:
            raise HostError(problem)
        base = engine.pull(client, reference, say)
    try:
        installed = install(client, image, base.id, say) if image.locks else base
        python = "/opt/recipes/bin/python" if image.locks else "python3"
        probed = probe(client, installed.id, python)
        compare(image, probed)
        say("building the image")
        # The base's digest in a registry, or its local id if it is not from a registry.
        digest = reference.partition("@")[2] or min(engine.digests(base), default=base.id)
        labels = {
            engine.BUILDER: "",  # the Dockerfile sets it for unfinished images
            f"{LABEL}.image": image.name,
            f"{LABEL}.tag": image.tag,
            f"{LABEL}.gfx": ",".join(image.gfx),
            f"{LABEL}.probe": json.dumps(probed),
            f"{OCI}.base.name": reference,
            f"{OCI}.base.digest": digest,
        }
        dockerfile, stages = FOLDER / image.dockerfile, {"BASE": base, "INSTALLED": installed}
        if builder == "buildkit":
            return with_buildkit(image, stages, labels)
        client.images.build(
            path=str(dockerfile.parent),
            dockerfile=dockerfile.name,
            buildargs={"BUILDER": engine.THIS_BUILD, **{key: s.id for key, s in stages.items()}},
            labels=labels,
            tag=image.local_reference,
            network_mode="none",
            nocache=True,
            rm=True,
            forcerm=True,
            use_config_proxy=False,  # or the image would contain the host's proxy password
        )
    finally:
        engine.sweep(client)


def with_buildkit(image: Image, stages: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Build the Dockerfile with the program docker and BuildKit. Raises BuildError."""
    argv = ["docker", "--host", docker_host.address(os.environ), "build", "--network=none"]
    dockerfile = FOLDER / image.dockerfile
    argv += ["--no-cache", "--progress=plain", f"--tag={image.local_reference}"]
    argv += [f"--label={name}={value}" for name, value in labels.items()]
    for key, stage in stages.items():  # by name, since BuildKit does not know images by id
        names = [*stage.tags, *stage.attrs["RepoDigests"], stage.id]
        argv.append(f"--build-arg={key}={names[0]}")
    env = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": ""}
    argv += [f"--file={dockerfile}", str(dockerfile.parent)]
    if code := subprocess.run(argv, env=env, check=False).returncode:
        raise docker.errors.BuildError(f"docker build returned {code}", [])


def install(client: docker.DockerClient, image: Image, base: str, say: engine.Show) -> Any:
    """Return an image of the base with the packages. Raises HostError, PackagesError."""
    settings = for_container(pip_options(), os.environ)
    mounts = [Mount(path, path, type="bind", read_only=True) for path in local_folders(settings)]
    with engine.ran(
        client,
        base,
        ["python3", "-B", f"/{INSIDE}/{INSTALL}", *(Path(lock).name for lock in image.locks)],
        files_for(image, settings),
        say,
        mounts=[Mount(PIP_CACHE, "rocm-recipes-pip"), *mounts],
        user="0:0",
        network_mode="host",  # because an index or a proxy may be on localhost
        security_opt=["label=disable"],  # SELinux may deny access to mounted folders
    ) as (code, lines, container):
        if code:
            reason = re.split("(?m)^error: ", "\n".join(lines), maxsplit=1)[-1]
            message = f"The build of {image.name} failed:\n{reason}"
            raise PackagesError(message, 4 if code == 4 else 3)
        return container.commit(engine.INSTALLED, container.short_id)  # a name for BuildKit


def files_for(image: Image, settings: Mapping[str, str]) -> dict[str, str]:
    """Return install.py, the locks and pip's settings, since `docker inspect` shows variables."""
    files = {Path(name).name: FOLDER / name for name in (INSTALL, *image.locks)}
    inside = {**settings, "PIP_CACHE_DIR": PIP_CACHE}
    for option in ("PIP_CERT", "PIP_CLIENT_CERT"):
        if (file := Path(settings.get(option, ""))).is_file():
            files[option], inside[option] = file, f"/{INSIDE}/{option}"
    # A certificate's comments may have any encoding.
    content = {f"{INSIDE}/{n}": file.read_text("utf-8", "replace") for n, file in files.items()}
    return {**content, f"{INSIDE}/settings.json": json.dumps(inside)}


def push(client: docker.DockerClient, image: Image, registry: str, say: engine.Show) -> str:
    """Push the image, and return its reference with the digest. Raises HostError, APIError."""
    repository = f"{registry}/{image.name}"
    name = f"{repository}:{image.tag}"
    is_new = engine.find(client, name) is None
    client.api.tag(image.local_reference, repository, image.tag)
    try:
        stream = client.api.push(repository, image.tag, stream=True, decode=True)
        if not (digest := engine.follow(stream, say)):  # without it, the lock would become invalid
            raise HostError(f"{name} is pushed, but the engine states no digest.")
    except BaseException:
        if is_new:
            with contextlib.suppress(docker.errors.DockerException, OSError):
                client.api.remove_image(name)
        raise
    return f"{name}@{digest}"


def write_pushed(lock: Path, name: str, reference: str) -> None:
    """Replace only the entry's `pushed` in the lock, atomically, since a run may be reading it."""
    field = rf"(?ms)(^  {re.escape(name)}:$.*?^    pushed: )\S+"
    text = lock.read_text(encoding="utf-8")
    json_files.write_text(lock, re.sub(field, rf"\g<1>{reference}", text, count=1))


def run(image: Image, options: Mapping[str, str], say: engine.Show) -> None:
    client, name = engine.connect(), image.local_reference
    existing: Any = engine.find(client, name)
    reason = outdated(client, image, options["base"], existing)
    reason = reason or "no_cache=true" * (options["no_cache"] == "true")
    if options["check"] == "true":
        if reason:
            raise HostError(f"{name}: {reason}. To build it, remove check=true.")
        compare(image, probe(client, existing.id))
        print(f"{name} matches the lock")
    elif reason:
        print(f"Building {name} on {options['base']}: {reason}", flush=True)
        make(client, image, options["base"], options["builder"], say)
        replaced = existing and client.images.get(existing.id)  # may have lost its name
        if replaced and not replaced.tags and not engine.digests(replaced):
            replaced.remove()
        print(f"{name} is built")
    else:
        compare(image, json.loads(existing.labels[f"{LABEL}.probe"]))
        print(f"{name} is up to date")
    if options["push"]:
        lock, reference = Path(options["lock"]), push(client, image, options["push"], say)
        write_pushed(lock, image.name, reference)
        print(f"{lock.name}: images.{image.name}.pushed is {reference}")


def main(arguments: list[str]) -> int:
    try:
        if not arguments or {"--help", "-h", "help"} & set(arguments):
            print(f"{__doc__}\nImages in containers/images.lock.yaml and their bases:")
            for name, image in images.load().items():
                print(f"  {name:<16} {image.base}{'' if image.verified else ' (unverified)'}")
        else:
            image, options = parse(arguments)
            with engine.heartbeat() as say:
                run(image, options, say)
        return errors.EXIT_DONE
    except KeyboardInterrupt:
        message, code = "\ninterrupted; run the same command again", errors.EXIT_INTERRUPTED
    except (UserError, HostError, PackagesError) as error:
        message, code = str(error), error.exit_code
    except docker.errors.BuildError as error:
        print("".join(event.get("stream", "") for event in error.build_log))
        message, code = f"The Dockerfile failed: {error}", errors.EXIT_FAILED
    except (docker.errors.DockerException, OSError) as error:  # OSError: also of the lock file
        message, code = f"Failed: {engine.explain(error)}", errors.EXIT_HOST
    if re.search(FULL_DISK, message, re.IGNORECASE):
        message, code = f"{message}\nFree space: {images.SPACE_REMEDY}", errors.EXIT_HOST
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    sys.exit(main(sys.argv[1:]))
