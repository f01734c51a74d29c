"""Ask a container engine over its socket, without docker's SDK, so that plans stay quick."""

import functools
import http.client
import json
import re
import socket
import struct
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from launch.machine import inside
from launch.machine.detect import Host
from launch.machine.sysfs import text

SOCKET = "unix:///var/run/docker.sock"
TIMEOUT_S = 1.0
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid (unix(7): struct ucred)
NAMES = {"Docker": "docker", "Libpod": "podman"}  # by the name in the header `Server`
CONFIGURATION = "containers/containers.conf"  # in the user's ~/.config and in /etc
KEEP_GROUPS = "run.oci.keep_original_groups"


@dataclass(frozen=True)
class Answer:
    status: int
    content: bytes
    server: str  # such as Libpod/4.3.1 (linux)
    uid: int  # of the user who listens on the socket


def ask(address: str, path: str) -> Answer | None:
    """Return an engine's answer to a GET request; None if no engine answers at a unix socket."""
    scheme, _, file = address.partition("://")
    with suppress(OSError, http.client.HTTPException):
        if scheme == "unix":
            connection = http.client.HTTPConnection("localhost")
            connection.sock = sock = socket.socket(socket.AF_UNIX)  # in place of connect()
            sock.settimeout(TIMEOUT_S)
            sock.connect(file)
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            connection.request("GET", path)
            answer = connection.getresponse()
            server = answer.getheader("Server") or ""
            return Answer(answer.status, answer.read(), server, CREDENTIALS.unpack(peer)[1])
    return None


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
    answer = ask(address, f"/images/{urllib.parse.quote(reference, safe='/:@')}/json")
    with suppress(ValueError):
        if answer and answer.status in (200, 404):
            return float(json.loads(answer.content).get("Size", 0)) / 1e9
    return None


def address(environ: Mapping[str, str]) -> str:
    return environ.get(inside.DOCKER_HOST, SOCKET)


def engine(environ: Mapping[str, str]) -> Engine | None:
    """Return the engine at DOCKER_HOST; None if none answers there at a unix socket."""
    answer = ask(address(environ), "/_ping")
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
    folders = (f"{host.sysroot}/{host.home}/.config", f"{host.sysroot}/etc")
    is_set = any(KEEP_GROUPS in (text(f"{folder}/{CONFIGURATION}") or "") for folder in folders)
    major, minor = (int(part) for part in (engine.version.split(".") + ["0"])[:2])
    if is_set or (major, minor) >= (5, 1):
        return None
    return (
        f"under [containers] of ~/.config/containers/containers.conf, set "
        f'annotations=["{KEEP_GROUPS}=1"]; then systemctl --user restart podman'
    )
