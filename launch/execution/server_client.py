"""Send requests to a generation server on this machine."""

from __future__ import annotations

import http.client
import urllib.request

TIMEOUT_S = 5.0
# Bypass a proxy from the user's shell, because it cannot reach the loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(port: int, path: str) -> str:
    """Return the answer of a server on this machine. Raises OSError."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except http.client.HTTPException as error:  # an incomplete answer or another protocol
        raise OSError(f"invalid HTTP answer: {error!r}") from error
