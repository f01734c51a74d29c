"""Test the checks of a generation server against small real servers."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launch.core.errors import HostError
from launch.execution import serving
from tests.conftest import composed

MODEL = "Qwen/Qwen3-4B"
SPLIT = composed(
    "hardware=mi300x",
    "method=grpo",
    "model=qwen3_4b",
    "topology=split",
    "topology.server_tensor_parallel=2",
)


def answers(
    model: str = MODEL,
    dtype: str = "torch.bfloat16",
    parallel: int = 2,
    replicas: int = 1,
    transfer: str | None = "nccl",
) -> dict[str, str]:
    """Return the answers of a vLLM with these settings."""
    info = {
        "model_config": {"dtype": dtype},
        "parallel_config": {"tensor_parallel_size": parallel, "data_parallel_size": replicas},
        "weight_transfer_config": {"backend": transfer} if transfer else {},
    }
    return {
        "/health": "",
        "/v1/models": json.dumps({"data": [{"id": model}]}),
        serving.INFO: json.dumps({"vllm_config": info}),
    }


@pytest.fixture
def serve():
    """Return serve(answers): start a server that gives them and 404 to the rest; return an Ask."""
    servers = []

    def start(texts: dict[str, str]) -> serving.Ask:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in texts else 404)
                self.end_headers()
                self.wfile.write(texts.get(self.path, "").encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return lambda path: serving.get(server.server_port, path)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_planned_server_passes_though_the_shell_has_a_proxy(serve, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    ask = serve(answers())
    assert serving.is_up(ask)
    serving.check(ask, SPLIT, MODEL)
    assert not serving.is_up(serve({}))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model": "other/model"}, "model other/model"),
        ({"dtype": "torch.float16"}, "dtype float16"),
        ({"parallel": 1}, "tensor-parallel GPUs 1"),
        ({"replicas": 4}, "replicas 4"),
        ({"transfer": None}, "weight transfer None"),
    ],
)
def test_a_server_with_another_setting_is_rejected(serve, setting, message):
    with pytest.raises(HostError, match=message):
        serving.check(serve(answers(**setting)), SPLIT, MODEL)


@pytest.mark.parametrize("other", ["<html>", "[]", '{"data": [{}]}', None])
@pytest.mark.parametrize("path", ["/v1/models", serving.INFO])
def test_another_program_on_the_port_is_rejected(serve, path, other):
    texts = {key: text for key, text in answers().items() if key != path}
    with pytest.raises(HostError, match="not a vLLM"):
        serving.check(serve(texts if other is None else texts | {path: other}), SPLIT, MODEL)


def test_a_container_prints_a_refusal_as_a_traceback():
    def ask(path: str) -> str:
        raise OSError(f"Traceback ...\nurllib.error.HTTPError: HTTP Error 404: Not Found: {path}\n")

    with pytest.raises(HostError, match=r"not a vLLM.*HTTP Error 404: Not Found"):
        serving.check(ask, SPLIT, MODEL)


def test_a_port_on_which_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert not serving.is_up(lambda path: serving.get(port, path))
        with pytest.raises(OSError, match="refused"):
            serving.check(lambda path: serving.get(port, path), SPLIT, MODEL)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"]
)
def test_a_broken_answer_is_none(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply, daemon=True)
        thread.start()
        assert not serving.is_up(lambda path: serving.get(listener.getsockname()[1], path))
        thread.join(20)
