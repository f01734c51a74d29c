"""Name the cause of a failed download or build from the output of pip, uv or the docker engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
# pip names the proxy only in its warnings before a retry; its error is that it finds no version.
PROXY = re.compile(r"ProxyError|proxyconnect|proxy authentication required", re.IGNORECASE)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PIP_PROXY")
DOCKER = "Docker's disk is full. Free space on it, for example: docker image prune"


def full_disk(output: str, message: str) -> str:
    return message if FULL.search(output) else ""


def wrong_proxy(output: str, settings: Mapping[str, str]) -> str:
    """Return a message without passwords if the output shows a proxy's failure, else ''."""
    if not PROXY.search(output):
        return ""
    names = [name for upper in PROXIES for name in (upper, upper.lower()) if settings.get(name)]
    if not names:
        return "The proxy of pip's configuration failed. To see it: pip config list."
    # A proxy may lack a scheme.
    places = [urlsplit(f"//{settings[name].rpartition('//')[2]}").netloc for name in names]
    pairs = zip(names, places, strict=True)
    shown = ", ".join(f"{name} ({place.rpartition('@')[2]})" for name, place in pairs)
    return f"The proxy of {shown} failed. Correct it, or: unset {' '.join(names)}."
