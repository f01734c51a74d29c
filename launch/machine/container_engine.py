"""Ask a container engine what it is and has, without docker's SDK, so that plans stay quick."""

import functools
import json
import re
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.core import docker_host
from launch.machine import inside
from launch.machine.detect import Host
from launch.machine.sysfs import status_of, text

NAMES = {"Docker": "docker", "Libpod": "podman"}  # by the name in the header `Server`
CONFIGURATION = "containers/containers.conf"  # in the user's ~/.config and in /etc
# Where podman looks for its init (containers.conf(5): helper_binaries_dir), and the package's own.
INIT_FOLDERS = ("local/libexec/podman", "local/lib/podman", "libexec/podman", "lib/podman", "bin")
INIT_KEYS = re.compile(r"^\s*(init_path|helper_binaries_dir)\s*=", re.MULTILINE)
KEEP_GROUPS = "run.oci.keep_original_groups"


@dataclass(frozen=True)
class Engine:
    name: str
    version: str
    rootless: bool

    def __str__(self) -> str:
        return f"{self.name} {self.version}" + ", rootless" * self.rootless


@functools.cache  # a pipeline asks for each phase
def image_gb(reference: str, address: str) -> float | None:
    """Return an image's size, 0 if the engine does not have it, and None if no engine answers."""
    answer = docker_host.ask(address, f"/images/{urllib.parse.quote(reference, safe='/:@')}/json")
    with suppress(ValueError):
        if answer and answer.status in (200, 404):
            return float(json.loads(answer.content).get("Size", 0)) / 1e9
    return None


def engine(environ: Mapping[str, str]) -> Engine | None:
    """Return the engine at DOCKER_HOST; None if none answers there at a unix socket."""
    answer = docker_host.ask(docker_host.address(environ), "/_ping")
    match = re.match(r"(\w+)/(\d[\w.]*)", answer.server) if answer else None
    if not answer or not match or match[1] not in NAMES:
        return None
    return Engine(NAMES[match[1]], match[2], answer.uid != 0)


def groups_remedy(engine: Engine, host: Host) -> str | None:
    """Return how a rootless engine lets containers open the GPUs of the caller's groups.

    None if it already does, or if anybody may open them. crun keeps the groups if an annotation
    requests it. podman takes annotations from its clients since 5.1 (containers/podman
    83fe867c14); docker uses runc, which cannot.
    """
    if not engine.rootless or host.device_nodes.get("/dev/kfd") is None:
        return None
    if engine.name == "docker":
        return "sudo setfacl -m u:$USER:rw /dev/kfd /dev/dri/renderD*"
    is_set = any(KEEP_GROUPS in content for content in _configurations(host))
    major, minor = (int(part) for part in (engine.version.split(".") + ["0"])[:2])
    if is_set or (major, minor) >= (5, 1):
        return None
    return (
        f"under [containers] of ~/.config/containers/containers.conf, set "
        f'annotations=["{KEEP_GROUPS}=1"]; then systemctl --user restart podman'
    )


def init_remedy(engine: Engine, host: Host) -> str | None:
    """Return how podman gets the init of our containers, a package that it only recommends.

    None if it has an init, or if its files are not those of this container. A file of podman's that
    we do not read may set another path, so this is only a hint.
    """
    root = Path(host.sysroot)
    if engine.name != "podman" or inside.container(host.environ, root):
        return None
    files = (root / "usr" / folder / "catatonit" for folder in INIT_FOLDERS)
    if any(map(status_of, files)) or any(map(INIT_KEYS.search, _configurations(host))):
        return None
    return "install the package catatonit (Debian: sudo apt-get install catatonit)"


def _configurations(host: Host) -> list[str]:
    """Return the contents of podman's files of the user and of this machine."""
    folders = (f"{host.sysroot}/{host.home}/.config", f"{host.sysroot}/etc")
    return [text(f"{folder}/{CONFIGURATION}") or "" for folder in folders]
