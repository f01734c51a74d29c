"""Judge the address of a docker engine without docker's SDK, whose import takes 0.25 s."""

import contextlib
import socket
import urllib.parse


def problem(address: str, is_build: bool = False) -> str | None:
    """Return why an engine at DOCKER_HOST cannot be used; None if it can.

    Another machine's engine has neither our files nor our GPUs. A build needs neither, but docker's
    SDK connects by ssh only with a package that we do not install.
    """
    url = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
    if not address or "unix" in url.scheme or (is_build and url.scheme != "ssh"):
        return None
    if url.scheme != "ssh":
        name = str(url.hostname)
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        # A socket can bind only to a name or address of this machine.
        with contextlib.suppress(OSError), socket.create_server((name, 0), family=family):
            return None
    return (
        f"DOCKER_HOST={address}: a container of another machine's engine has neither the files nor "
        "the GPUs of this machine. Run the command there. Use the engine here: unset DOCKER_HOST, "
        "or runtime=local."
    )
