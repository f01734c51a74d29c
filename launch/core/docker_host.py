"""Find and ask the docker engine without docker's SDK, whose import takes 0.25 s."""

import contextlib
import functools
import http.client
import json
import os
import socket
import struct
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

SOCKET = "unix:///var/run/docker.sock"
TIMEOUT_S = 1.0
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid (unix(7): struct ucred)


def address(environ: Mapping[str, str]) -> str:
    """Return the URL of the engine that docker's programs use."""
    return environ.get("DOCKER_HOST") or SOCKET


def problem(address: str, is_build: bool = False) -> str | None:
    """Return why an engine at DOCKER_HOST cannot be used; None if it can.

    Another machine's engine has neither our files nor our GPUs. A build needs neither, but docker's
    SDK connects by ssh only with a package that we do not install.
    """
    if not address or address.startswith(("unix:", "http+unix:")):
        return None
    name = None
    with contextlib.suppress(ValueError):  # an open bracket, or a wrong port
        url = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
        name = "localhost" if url.port and not url.hostname else url.hostname
    if name is None:
        use = f"DOCKER_HOST=unix://{address}" if address.startswith("/") else "unset DOCKER_HOST"
        return f"DOCKER_HOST={address}: not the address of an engine. Use: {use}."
    if is_build and url.scheme != "ssh":
        return None
    if is_build:
        return (
            f"DOCKER_HOST={address}: builds do not connect by ssh. Run the command there. Use the "
            "engine here: unset DOCKER_HOST."
        )
    if url.scheme != "ssh":
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        # A socket can bind only to a name or address of this machine. ValueError: an invalid name
        with contextlib.suppress(OSError, ValueError):
            socket.create_server((name, 0), family=family).close()
            return None
    return (
        f"DOCKER_HOST={address}: a container of another machine's engine has neither the files nor "
        "the GPUs of this machine. Run the command there. Use the engine here: unset DOCKER_HOST, "
        "or runtime=local."
    )


@dataclass(frozen=True)
class Answer:
    status: int
    content: bytes
    server: str  # such as Libpod/4.3.1 (linux)
    uid: int  # of the user who listens on the socket


def ask(address: str, path: str) -> Answer | None:
    """Return an engine's answer to a GET request; None if no engine answers at a unix socket."""
    scheme, _, file = address.partition(":")
    with contextlib.suppress(OSError, http.client.HTTPException):
        if scheme == "unix":
            connection = http.client.HTTPConnection("localhost")
            connection.sock = sock = socket.socket(socket.AF_UNIX)  # in place of connect()
            sock.settimeout(TIMEOUT_S)
            sock.connect(file.removeprefix("//"))
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            connection.request("GET", path)
            answer = connection.getresponse()
            server = answer.getheader("Server") or ""
            return Answer(answer.status, answer.read(), server, CREDENTIALS.unpack(peer)[1])
    return None


@functools.cache
def folder(address: str) -> str | None:
    """Return the folder of an engine's images; None if it is not on this machine."""
    answer = ask(address, "/info")
    with contextlib.suppress(ValueError):
        path = str(json.loads(answer.content).get("DockerRootDir")) if answer else ""
        return path if os.path.isdir(path) else None
    return None
