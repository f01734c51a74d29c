"""Name the cause of a failed download or build from the output of pip, uv or the docker engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
# pip names the proxy only in its warnings before a retry; its error is that it finds no version.
PROXY = re.compile(r"ProxyError|proxyconnect|proxy authentication required", re.IGNORECASE)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PIP_PROXY")


def full_disk(output: str, disk: str, remedy: str) -> str:
    """Return a message if the output shows a full disk, else ''."""
    return f"{disk} is full. {remedy}" if FULL.search(output) else ""


def wrong_proxy(output: str, settings: Mapping[str, str]) -> str:
    """Return a message without passwords if the output shows a proxy's failure, else ''."""
    if not PROXY.search(output):
        return ""
    names = [name for upper in PROXIES for name in (upper, upper.lower()) if settings.get(name)]
    if not names:
        return "The proxy of pip's configuration failed. To see it: pip config list."
    shown = ", ".join(f"{name} ({address(settings[name])})" for name in names)
    return f"The proxy of {shown} failed. Correct it, or: unset {' '.join(names)}."


def address(proxy: str) -> str:
    """Return the host and port of a proxy, which may lack a scheme."""
    return urlsplit(proxy if "://" in proxy else f"//{proxy}").netloc.rpartition("@")[2]
