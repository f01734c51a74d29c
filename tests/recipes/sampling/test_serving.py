"""Test recipes/sampling/serving.py with simulated servers."""

from __future__ import annotations

import contextlib
import copy
import http.server
import itertools
import json
import multiprocessing
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.generation.vllm_client import VLLMClient

from launch.core import json_files
from launch.core.errors import UserError
from launch.machine import placement
from recipes import grpo
from recipes.models.model_build import train_tokenizer
from recipes.rank import program
from recipes.sampling import serving
from recipes.training import checkpoint, train_loop
from tests.conftest import composed
from tests.helpers import engines
from tests.helpers.trainers import configured

TEMPERATURE = 1.5


class LoadingServer(http.server.BaseHTTPRequestHandler):
    """Return the statuses in `answers`, and then always 200."""

    answers = iter(())

    def do_GET(self):
        self.send_response(next(self.answers, 200))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def loading_server(monkeypatch):
    monkeypatch.setattr(serving, "POLL_S", 0.01)
    for name in ("no_proxy", "NO_PROXY"):  # do not use a proxy
        monkeypatch.setenv(name, "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), LoadingServer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(20)


def test_wait_for_server(loading_server):
    LoadingServer.answers = iter([503, 503, 200])
    serving.wait_until_up(loading_server)
    assert list(LoadingServer.answers) == []


def test_signal_ends_wait_for_server(loading_server, monkeypatch):
    def answers():
        monkeypatch.setattr(program, "_stop_requested", True)
        while True:
            yield 503

    LoadingServer.answers = answers()
    with pytest.raises(program.Interrupted):
        serving.wait_until_up(loading_server)


def log_probs(model, ids: list[int], count: int) -> torch.Tensor:
    """Return the log-probabilities of the last `count` tokens, with shape (count,)."""
    logits = model(torch.tensor([ids])).logits[0, -count - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0]


class Server:
    """Generate with copies of the model. A transfer changes those for which `updates` is True."""

    def __init__(self, model, updates: list[bool]) -> None:
        self.trained, self.updates, self.transfers = model, updates, 0
        self.models = [copy.deepcopy(model) for _ in updates]
        self.vllm_client = self
        self.session = requests.Session()

    def sync_weights(self) -> None:
        self.transfers += 1
        pairs = zip(self.models, self.updates, strict=True)
        for model in (model for model, is_updated in pairs if is_updated):
            model.load_state_dict(self.trained.state_dict())

    def reset_prefix_cache(self) -> None:
        self.resets = True

    def generate(self, prompts, temperature, max_tokens, generation_kwargs):
        assert (temperature, generation_kwargs["ignore_eos"]) == (TEMPERATURE, True)
        model = self.models[int(self.session.headers.get("X-data-parallel-rank", 0))]
        completion = []
        for _ in range(max_tokens):
            ids = torch.tensor([[*prompts[0], *completion]])
            completion.append(int(model(ids).logits[0, -1].argmax()))
        scored = log_probs(model, [*prompts[0], *completion], max_tokens)
        logprobs = [[[number] for number in scored.tolist()]]
        return {"completion_ids": [completion], "logprobs": logprobs}


def tiny_model(**kwargs) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **layers, **kwargs)).eval()


def trainer_with(*updates: bool):
    model = tiny_model()
    accelerator = SimpleNamespace(device="cpu", is_main_process=True)
    accelerator.autocast, accelerator.unwrap_model = contextlib.nullcontext, lambda wrapped: wrapped

    def compute(model, ids, mask, count):
        return torch.stack([log_probs(model, row, count) for row in ids.tolist()]), None, None

    return SimpleNamespace(
        model=model,
        accelerator=accelerator,
        temperature=TEMPERATURE,
        processing_class=train_tokenizer(["The quick brown fox"], 300),
        vllm_generation=Server(model, updates),
        _get_per_token_logps_and_entropies=compute,
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_check_transfers_and_restore_weights(capsys, replicas):
    trainer = trainer_with(*[True] * replicas)
    before = copy.deepcopy(trainer.model.state_dict())
    serving.check_weights_arrive(trainer, replicas=replicas)
    assert "weights reach " in capsys.readouterr().out
    for model in (trainer.model, *trainer.vllm_generation.models):
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert serving.REPLICA not in trainer.vllm_generation.session.headers


def test_detect_stale_replica():
    with pytest.raises(RuntimeError, match="weights do not reach replica 2 of"):
        serving.check_weights_arrive(trainer_with(True, True, False), replicas=3)


def test_the_check_accepts_a_confident_policy_served_in_16_bits():
    trainer = trainer_with(True)
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(200)
    trainer.vllm_generation.models = [copy.deepcopy(trainer.model).bfloat16()]
    serving.check_weights_arrive(trainer)


@pytest.mark.parametrize(("hardware", "gpus", "topology"), [
    ("mi300x", 1, "split"),
    ("mi300x", 2, "split"),
    ("rx9070xt", "null", "split"),
    ("mi300x", 1, "ddp"),
])  # fmt: skip
def test_trainer_and_launcher_use_same_backend(hardware, gpus, topology):
    groups = [f"hardware={hardware}", "method=grpo", f"topology={topology}"]
    config = composed(*groups, f"topology.num_gpus={gpus}")
    uses_gloo = train_loop.sends_over_gloo(OmegaConf.structured(config))
    assert uses_gloo == (placement.backend(config) == "gloo")


class RejectingServer(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b"no such parameter")

    def log_message(self, *_: object) -> None:
        pass


def sending(folder: Path, port: int) -> None:
    """Act as a rank that waits for a transfer that the server has rejected."""
    sys.stdout = sys.stderr = (folder / "log").open("w", buffering=1)
    serving.check_requests(OmegaConf.create({"run_dir": str(folder)}))
    client = VLLMClient.__new__(VLLMClient)
    client.session = requests.Session()
    client.session.trust_env = False  # no proxy

    def post(path: str) -> None:
        try:
            client._post(f"http://127.0.0.1:{port}/{path}", json={})
        except Exception as error:
            print(path, error)

    post("reset_prefix_cache")
    threading.Thread(target=post, args=["update_weights"]).start()
    threading.Event().wait()


def test_rejected_transfer_ends_rank(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RejectingServer) as server:
        # Other start methods are slow, because they repeat the imports.
        rank = multiprocessing.get_context("fork").Process(
            target=sending, args=(tmp_path, server.server_address[1])
        )
        rank.start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rank.join(240)
        server.shutdown()
    log = (tmp_path / "log").read_text()
    assert rank.exitcode == 1, log
    # Errors of other requests are raised unchanged.
    assert "reset_prefix_cache Request failed: 400, no such parameter" in log
    reason = "the generation server rejects a weight transfer (update_weights): Request failed: 400"
    assert f"error: {reason}" in log
    failure = json.loads((tmp_path / "failures/rank0.json").read_text())
    assert failure["error"].startswith(reason)
    assert (failure["rank"], failure["exit_code"]) == (0, 1)


def test_transfer_over_gloo_to_a_lost_server_raises(monkeypatch):
    """Later requests fail even if a server answers again, because it may lack weights."""
    monkeypatch.setattr(VLLMClient, "_post", VLLMClient._post)  # restore it after the test
    monkeypatch.setattr(serving, "RETRIES", 0)
    serving.check_requests(OmegaConf.create())
    client = VLLMClient.__new__(VLLMClient)
    client.session, client.over_gloo = requests.Session(), True
    client.session.trust_env = False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RejectingServer) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(requests.ConnectionError):
        client._post(f"{url}/update_weights")
    again = http.server.ThreadingHTTPServer(server.server_address, RejectingServer)
    with again, pytest.raises(requests.ConnectionError):
        client._post(f"{url}/inference/v1/generate")


@pytest.mark.parametrize("overlap", ["false", "true", "stream"])
def test_steps_before_the_loss_of_the_server_are_saved(tmp_path, monkeypatch, overlap):
    """The server ends after two generations, before a regular checkpoint."""
    generations = itertools.count(1)

    class Client(engines.client(engines.Clock())):
        def update_named_params(self, metadata, params):
            if next(generations) > 4:
                raise requests.ConnectionError("refused")

        def generate(self, *args, **kwargs):
            if next(generations) > 4:
                raise requests.ConnectionError("refused")
            return super().generate(*args, **kwargs)

    engines.without_server(monkeypatch, Client, engines.Sends)
    split = ["topology=split", "hardware.vllm=true", "hardware.gpus_per_node=2"]
    steps = ["topology.num_gpus=2", f"topology.overlap={overlap}", "method.args.max_steps=9"]
    with pytest.raises(program.ServerLost, match="refused"):
        grpo.grpo(configured(tmp_path, "grpo", *split, *steps))
    rows = json_files.read_metrics(tmp_path / "metrics.jsonl")
    saved = checkpoint.newest(tmp_path / "checkpoints")
    assert checkpoint.step_of(saved) == rows[-1]["step"] > 0


@pytest.mark.parametrize(("arguments", "expected"), [
    ({}, {"stop_token_ids": [2]}),
    ({"stop_token_ids": [1, 2], "min_tokens": 4}, {"stop_token_ids": [1, 2], "min_tokens": 4}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
])  # fmt: skip
def test_requests_contain_end_tokens(arguments, expected):
    generation = SimpleNamespace(generation_kwargs=arguments)
    before = dict(arguments)
    serving.send_end_tokens(SimpleNamespace(vllm_generation=generation, eos_token_ids=[2]))
    assert generation.generation_kwargs == expected
    assert arguments == before  # the dictionary is not changed in place


@pytest.mark.parametrize(("hip", "vllm", "sleeps"), [
    ("7.2.53211", "0.23.1rc1.dev282", False),
    ("7.2.53211", "0.31.0+rocm723", True),
    (None, "0.22.0", True),
])  # fmt: skip
def test_vllm_that_keeps_its_memory_on_rocm(monkeypatch, hip, vllm, sleeps):
    monkeypatch.setattr(torch.version, "hip", hip)
    expected = contextlib.nullcontext() if sleeps else pytest.raises(UserError, match="sleep_mode")
    with expected:
        serving.check_sleep(vllm)


@pytest.fixture
def process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
def test_gathered_weights_are_whole_and_sharded_again(process_group, tied):
    """Before the first pass, after one without a backward pass, and after a step."""
    model = tiny_model(tie_word_embeddings=tied)
    expected = {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def check():
        pairs = list(serving.gathered_weights(model))
        weights = dict(pairs)
        assert len(pairs) == len(expected)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())

    check()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        model(input_ids=ids)
    assert not all(isinstance(weight, DTensor) for weight in model.parameters())
    check()
    model(input_ids=ids).logits.sum().backward()
    check()
