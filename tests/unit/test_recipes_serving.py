"""A trainer and its server: versions that do not fit, and weights that do not arrive."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import requests
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import import_utils

from launch.supervision import serving as launch_serving
from recipes.common import serving, training
from recipes.common.errors import UserError
from recipes.common.model import train_tokenizer
from tests.conftest import ROOT, composed

TEMPERATURE = 1.5


def put_vllm(folder, monkeypatch, version: str) -> None:
    """A package of this name and version, as pip leaves one, before whatever is installed here."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(import_utils.PACKAGE_DISTRIBUTION_MAPPING, "vllm", ["vllm"])
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text("")
    (folder / f"vllm-{version}.dist-info").mkdir()
    (folder / f"vllm-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def test_a_vllm_that_trl_does_not_take_is_refused(tmp_path, monkeypatch):
    put_vllm(tmp_path, monkeypatch, "0.99.0")
    with pytest.raises(UserError, match=r"TRL currently supports vLLM versions from .*0\.99\.0.*topology=ddp"):
        serving.check_vllm()


def test_a_vllm_that_fits_is_taken(tmp_path, monkeypatch):
    put_vllm(tmp_path, monkeypatch, "0.31.0")
    assert serving.check_vllm() is None


def log_probs(model, ids: list[int], count: int) -> torch.Tensor:
    """Of the last `count` tokens. Shape (count,)."""
    logits = model(torch.tensor([ids])).logits[0, -count - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0]


class Server:
    """Replicas that generate with copies of the model; `takes` says of each whether a transfer changes it."""

    def __init__(self, model, takes: list[bool]) -> None:
        self.trained, self.takes, self.transfers = model, takes, 0
        self.models = [copy.deepcopy(model) for _ in takes]
        self.vllm_client = self
        self.session = requests.Session()

    def sync_weights(self) -> None:
        self.transfers += 1
        for model in (model for model, takes in zip(self.models, self.takes, strict=True) if takes):
            model.load_state_dict(self.trained.state_dict())

    def reset_prefix_cache(self) -> None:
        self.resets = True

    def generate(self, prompts, temperature, max_tokens, generation_kwargs):
        assert (temperature, generation_kwargs["ignore_eos"]) == (TEMPERATURE, True)
        completion = list(range(5, 5 + max_tokens))
        model = self.models[int(self.session.headers.get("X-data-parallel-rank", 0))]
        scored = log_probs(model, [*prompts[0], *completion], max_tokens)
        return {"completion_ids": [completion], "logprobs": [[[number] for number in scored.tolist()]]}


def trainer_with(*takes: bool):
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    model = Qwen3ForCausalLM(shape).eval()
    accelerator = SimpleNamespace(device="cpu", autocast=contextlib.nullcontext, unwrap_model=lambda wrapped: wrapped, is_main_process=True)
    return SimpleNamespace(
        model=model,
        accelerator=accelerator,
        temperature=TEMPERATURE,
        processing_class=train_tokenizer(["The quick brown fox"], 300),
        vllm_generation=Server(model, takes),
        _get_per_token_logps_and_entropies=lambda model, ids, mask, count: (
            torch.stack([log_probs(model, row, count) for row in ids.tolist()]),
            None,
            None,
        ),
    )


@pytest.mark.parametrize(("replicas", "told"), [(1, "weights reach the server: "), (3, "weights reach all 3 replicas of the server: ")])
def test_a_server_that_follows_passes_and_the_weights_are_as_before(capsys, replicas, told):
    trainer = trainer_with(*[True] * replicas)
    before = copy.deepcopy(trainer.model.state_dict())
    serving.check_weights_arrive(trainer, replicas=replicas)
    assert told in capsys.readouterr().out
    for model in (trainer.model, *trainer.vllm_generation.models):
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert serving.REPLICA not in trainer.vllm_generation.session.headers


def test_a_server_that_ignores_what_it_is_sent_is_found_out():
    with pytest.raises(RuntimeError, match="weights do not reach the generation server"):
        serving.check_weights_arrive(trainer_with(False))


@pytest.mark.parametrize("stale", [0, 1, 2])
def test_one_replica_that_ignores_what_it_is_sent_is_found_out(stale):
    with pytest.raises(RuntimeError, match=f"weights do not reach replica {stale} of the generation server"):
        serving.check_weights_arrive(trainer_with(*(replica != stale for replica in range(3))), replicas=3)


@pytest.mark.parametrize("longest", [9, 64, 4096])
def test_the_probe_keeps_to_what_the_server_serves(longest):
    """vLLM refuses a prompt and a completion that are longer together: seen with topology.server_max_length=64 on an H200."""
    trainer = trainer_with(True)
    generate, asked = trainer.vllm_generation.generate, []

    def served(prompts, **given):
        asked.append(len(prompts[0]) + given["max_tokens"])
        return generate(prompts, **given)

    trainer.vllm_generation.generate = served
    serving.check_weights_arrive(trainer, longest)
    assert 2 <= max(asked) <= longest


@pytest.mark.parametrize("hardware", ["mi300x", "rx9070xt"])
@pytest.mark.parametrize("gpus", ["null", 1, 2])
@pytest.mark.parametrize("topology", ["split", "ddp"])
def test_trainer_and_launcher_agree_on_what_carries_the_weights(hardware, gpus, topology):
    config = composed(f"hardware={hardware}", "method=grpo", f"topology={topology}", f"topology.num_gpus={gpus}")
    ours = training.sends_over_gloo(OmegaConf.structured(config))
    assert ours == (launch_serving.backend(config) == "gloo")


REFUSED = """
import sys, threading
import requests
from omegaconf import OmegaConf
from trl.generation.vllm_client import VLLMClient
from recipes.common import serving

serving.give_up_where_refused(OmegaConf.create({"run_dir": sys.argv[1]}))
client = VLLMClient.__new__(VLLMClient)
client.session = requests.Session()
def post(path):
    try:
        client._post(f"http://127.0.0.1:{sys.argv[2]}/{path}", json={})
    except Exception as error:
        print(path, error, flush=True)
post("reset_prefix_cache")
threading.Thread(target=post, args=["update_weights"]).start()
threading.Event().wait()  # as the sending does, which nobody receives
"""


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b"no such parameter")

    def log_message(self, *_: object) -> None:
        pass


def test_a_refused_weight_transfer_ends_the_rank_that_waits_in_it(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        argv = [sys.executable, "-c", REFUSED, str(tmp_path), str(server.server_address[1])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=240)
        server.shutdown()
    assert done.returncode == 1, done.stderr
    assert "reset_prefix_cache Request failed: 400, no such parameter" in done.stdout  # any other request fails as it does
    said = "the generation server refuses a weight transfer (update_weights): Request failed: 400, no such parameter."
    assert f"error: {said}" in done.stderr
    failure = json.loads((tmp_path / "failures/rank0.json").read_text())
    assert failure["error"].startswith(said)
    assert (failure["rank"], failure["exit_code"]) == (0, 1)
