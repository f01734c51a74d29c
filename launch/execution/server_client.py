"""Send requests to a generation server."""

TIMEOUT_S = 5.0


def get(port: int, path: str, address: str = "127.0.0.1") -> str:
    """Return the answer of a server. Raises OSError."""
    import http.client  # with urllib.request, takes 10 ms
    import urllib.request

    # Bypass a proxy from the user's shell, because it cannot reach the loopback.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{address}:{port}{path}", timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except http.client.HTTPException as error:  # an incomplete answer or another protocol
        raise OSError(f"invalid HTTP answer: {error!r}") from error
