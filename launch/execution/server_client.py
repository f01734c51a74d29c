"""Ask a generation server of this machine."""

from __future__ import annotations

import http.client
import urllib.request

ANSWERS_WITHIN_S = 5.0
# A proxy of the user's shell cannot reach this machine's loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(port: int, path: str) -> str:
    """Return the answer of a server on this machine. Raises OSError."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=ANSWERS_WITHIN_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except http.client.HTTPException as error:  # it ended in mid-answer, or does not speak HTTP
        raise OSError(f"no answer in HTTP: {error!r}") from error
