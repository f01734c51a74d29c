"""Test looking at a generation server from outside, by a small real one."""

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
    transfer: dict | None = None,
) -> dict[str, str]:
    """Of a vLLM with these settings."""
    info = {
        "model_config": {"dtype": dtype},
        "parallel_config": {"tensor_parallel_size": parallel, "data_parallel_size": replicas},
        "weight_transfer_config": {"backend": "nccl"} if transfer is None else transfer,
    }
    served = {"object": "list", "data": [{"id": model, "object": "model"}]}
    return {
        "/health": "",
        "/v1/models": json.dumps(served),
        "/server_info?config_format=json": json.dumps({"vllm_config": info}),
    }


@pytest.fixture
def serve():
    """serve(answers) -> what asks a server that gives them, and 404 to anything else."""
    servers = []

    def start(said: dict[str, str]) -> serving.Ask:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in said else 404)
                self.end_headers()
                self.wfile.write(said.get(self.path, "").encode())

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


def test_the_server_that_was_planned(serve):
    ask = serve(answers())
    assert serving.is_up(ask)
    serving.check(ask, SPLIT, MODEL)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": "other/model"}, "model other/model"),
        ({"dtype": "torch.float16"}, "dtype float16"),
        ({"parallel": 1}, "tensor-parallel GPUs 1"),
        ({"replicas": 4}, "replicas 4"),
        ({"transfer": {}}, "weight transfer None"),
    ],
)
def test_another_server_on_the_port(serve, wrong, told):
    with pytest.raises(HostError, match=told) as refused:
        serving.check(serve(answers(**wrong)), SPLIT, MODEL)
    assert "Another server listens on this port" in str(refused.value)


@pytest.mark.parametrize("other", ["<html>", "[]", "3", '{"data": []}', '{"data": [{}]}'])
def test_another_program_on_the_port(serve, other):
    with pytest.raises(HostError, match="is not a vLLM"):
        serving.check(serve(answers() | {"/v1/models": other}), SPLIT, MODEL)
    with pytest.raises(HostError, match="is not a vLLM"):
        serving.check(serve(answers() | {"/server_info?config_format=json": other}), SPLIT, MODEL)


def test_what_knows_no_such_path(serve):
    with pytest.raises(HostError, match=r"not a vLLM of this version: HTTP Error 404: Not Found"):
        serving.check(serve({"/health": ""}), SPLIT, MODEL)


def test_a_container_says_it_with_a_traceback():
    def ask(path: str) -> str:
        raise OSError(
            "Traceback (most recent call last):\n  ...\nurllib.error.HTTPError: HTTP Error "
            f"404: Not Found for {path}\n"
        )

    with pytest.raises(HostError, match=r"not a vLLM of this version: HTTP Error 404: Not Found"):
        serving.check(ask, SPLIT, MODEL)


def test_nobody_answers():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert not serving.is_up(lambda path: serving.get(port, path))  # bound, and not listening
        with pytest.raises(OSError, match="refused"):
            serving.check(lambda path: serving.get(port, path), SPLIT, MODEL)


def test_a_server_that_is_not_ready(serve):
    assert not serving.is_up(serve({}))


@pytest.mark.parametrize(
    "said",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"],
)
def test_what_speaks_something_else(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(said)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert not serving.is_up(lambda path: serving.get(listener.getsockname()[1], path))
        thread.join(20)


def test_a_proxy_of_the_shell_is_passed_by(serve, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert serving.is_up(serve(answers()))
