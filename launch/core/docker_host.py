"""Judge the address of a docker engine without docker's SDK, whose import takes 0.25 s."""

import contextlib
import socket
import urllib.parse


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
