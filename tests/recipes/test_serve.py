"""Serve with a stand-in for vLLM, which answers /health and records its command."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request

import pytest
from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.core import json_files
from launch.core.json_files import plain
from launch.plan.planning import prepare
from launch.schema.trainer_args import complete
from recipes import serve
from recipes.bench import vllm_programs
from recipes.rank import program
from tests.helpers.exports import write_model
from tests.helpers.supervised import HEALTH

SERVER = f"""{HEALTH}
import json, sys
from pathlib import Path

Path(__file__).with_name("argv.json").write_text(json.dumps(sys.argv[1:]))
if Path(__file__).with_name("exits").exists():
    sys.exit(3)
host, port = (sys.argv[sys.argv.index(option) + 1] for option in ("--host", "--port"))
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Return a function that runs method=serve; `meanwhile` is called in a thread."""
    (tmp_path / "server.py").write_text(SERVER)
    stand_in = [sys.executable, str(tmp_path / "server.py")]
    monkeypatch.setattr(vllm_programs, "program", lambda config: stand_in)
    monkeypatch.setattr(serve, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(serve, "POLL_S", 0.02)
    model = write_model(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call(*overrides: str, meanwhile=None):
        words = ["hardware=cpu", "method=serve", f"model.path={model}", f"method.args.port={port}"]
        config, _ = prepare(compose([*words, *overrides]))
        content = {"run_dir": str(tmp_path), "trainer_args": complete(config, tmp_path, (1, 2))}
        file = tmp_path / "config.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.create({**plain(config), **content})))
        thread = threading.Thread(target=meanwhile or (lambda: None), daemon=True)
        thread.start()
        code = program.run(serve.serve, ["--config", str(file)])
        thread.join()
        argv = json.loads((tmp_path / "argv.json").read_text())
        return code, json_files.read_json(tmp_path / "result.json"), argv

    call.port, call.folder = port, tmp_path
    return call


def option(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_runs_until_it_is_stopped(served, number):
    def stop_when_up():
        while not (served.folder / "heartbeat").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    words = ("smoke=true", "topology.server_args={max_num_seqs: 4}")
    code, result, argv = served(*words, meanwhile=stop_when_up)
    assert (code, result["status"]) == (0, "done")
    assert argv[:2] == ["serve", str(served.folder / "model")]
    options = {"--host": "127.0.0.1", "--port": str(served.port), "--max-num-seqs": "4"}
    options |= {"--data-parallel-size": "1", "--tensor-parallel-size": "1"}
    assert {name: option(argv, name) for name in options} == options
    assert "--default-chat-template-kwargs" not in argv
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{served.port}/health", timeout=5)


def test_a_server_does_not_think_if_told_so(served):
    (served.folder / "exits").touch()
    thinking = "method.args.chat_template_kwargs.enable_thinking=false"
    _, _, argv = served("smoke=true", thinking)
    assert option(argv, "--default-chat-template-kwargs") == '{"enable_thinking": false}'


def test_a_server_that_exits_fails_the_run(served):
    (served.folder / "exits").touch()
    code, result, _ = served("smoke=true")
    assert (code, result["status"]) == (1, "failed")
    assert "exited with code 3" in result["error"]


@pytest.mark.parametrize(
    ("mask", "width", "replicas"), [("0,1,2,3", 1, "4"), ("4,5,6,7", 2, "2"), ("0", 1, "1")]
)
def test_all_gpus_serve(served, monkeypatch, mask, width, replicas):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", mask)
    (served.folder / "exits").touch()
    gpus = len(mask.split(","))
    words = ["hardware=mi300x", "runtime=local", "topology=ddp", f"topology.num_gpus={gpus}"]
    _, _, argv = served(*words, f"topology.server_tensor_parallel={width}")
    assert option(argv, "--data-parallel-size") == replicas
    assert option(argv, "--tensor-parallel-size") == str(width)
