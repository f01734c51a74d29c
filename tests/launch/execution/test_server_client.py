"""Test queries of a generation server, with small real servers."""

from __future__ import annotations

import socket
import threading

import pytest

from launch.execution import server_client


@pytest.mark.parametrize(("answer", "text"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok"),
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", None),
    (b"SSH-2.0-OpenSSH_9.2\r\n", None),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", None),
])  # fmt: skip
def test_a_query_returns_an_answer_or_raises_os_error_despite_a_proxy(monkeypatch, answer, text):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        if text is None:
            with pytest.raises(OSError):
                server_client.get(port, "/health")
        else:
            assert server_client.get(port, "/health") == text
        thread.join(20)
    with pytest.raises(OSError, match="refused"):
        server_client.get(port, "/health")
