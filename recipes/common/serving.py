"""A trainer and its generation server: how they are set up, and whether weights really arrive."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.import_utils import is_vllm_available

from recipes.common.adapters import merged_params
from recipes.common.errors import UserError
from recipes.common.generation import engine_args
from recipes.common.program import give_up, say

PROBE = "The quick brown fox jumps over the lazy dog. 1 + 2 = 3."
PROBE_TOKENS = 32
REPLICA = "X-data-parallel-rank"
SCALE = 1.5  # of the last norm's weights: changes every log-probability by far more than rounding does
FOLLOWED = 0.25  # share of the change that may be missing; rounding in bf16 takes a few hundredths of it


def reach_directly() -> None:
    """Before a trainer is made: a proxy of the user's does not know this loopback, and TRL's client would ask it."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))


def give_up_where_refused(config: DictConfig) -> None:
    """Before a trainer is made. TRL's client sends tensors while a thread of its own asks the server to receive them. Where the server
    refuses, that thread has an error which nobody reads: the sending waits for a receiver until the watchdog ends it."""
    from trl.generation.vllm_client import VLLMClient

    post = VLLMClient._post

    def ask(self: VLLMClient, url: str, **kwargs: Any) -> dict:
        try:
            return post(self, url, **kwargs)
        except Exception as error:
            asked = url.rpartition("/")[2]
            if asked in ("pause", "init_weight_transfer_engine", "update_weights"):
                give_up(config, f"the generation server refuses a weight transfer ({asked}): {error}. logs/server.log has its reason")
            raise

    VLLMClient._post = ask


def pass_engine_args(config: DictConfig) -> None:
    """Before a trainer is made: under topology=colocate have TRL make its engine with topology.server_args too, of which it takes none."""
    from trl.generation import vllm_generation

    given = engine_args(config)
    if config.topology.name == "colocate" and given:
        engine = vllm_generation.LLM
        vllm_generation.LLM = lambda **own: engine(**{**own, **given})


def check_vllm() -> None:
    """Raises UserError where vLLM is absent, or TRL says of this version that it does not fit; it only warns, and fails later."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = is_vllm_available()
    wrong = next((str(w.message) for w in said if "vLLM" in str(w.message)), None)
    if wrong or not available:
        raise UserError(
            f"{wrong or 'vLLM is not installed where the ranks run.'} Use an image that holds both (containers/build.py lists them), on a "
            "CPU `make vllm`; or topology=ddp, where transformers generates."
        )


def send_merged(trainer: GRPOTrainer) -> None:
    """Have an adapter's trainer send the generation engine weights that its base and its adapter give together.

    TRL has no way to send an adapter alone (1.16: its client names one model and streams whole tensors), and vLLM's own loading of LoRA
    knows neither DoRA nor a base that trains in 4 bits. TRL merges in place and sends what then lies in the base: of nf4 the packed bytes.
    """
    generation = trainer.vllm_generation
    if isinstance(generation.model, PeftModel):
        generation._iter_named_params = lambda: merged_params(generation.model, generation._dist.gather_params)
        say("weights for generation: base and adapter merged, each time (no adapter alone)")


class CheckWeightsArrive(TrainerCallback):
    """Once, as training begins: every strategy has sharded the model by then."""

    def __init__(self, trainer: GRPOTrainer, longest: int | None, replicas: int) -> None:
        self.trainer = trainer
        self.longest, self.replicas = longest, replicas

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        check_weights_arrive(self.trainer, self.longest, self.replicas)


@torch.no_grad()
def check_weights_arrive(trainer: GRPOTrainer, longest: int | None = None, replicas: int = 1) -> None:
    """Change a parameter on the trainer, send it, and see the log-probabilities of every replica follow. Costs three transfers.

    A server that answers and ignores what it is sent would train a policy on another one's completions without a word.
    Every rank takes part. `longest`: tokens of prompt and completion that the server takes; None where it takes more than the probe's.
    Raises RuntimeError on every rank.
    """
    sync = trainer.vllm_generation.sync_weights
    sync()
    ids, server = _sample(trainer, longest, replicas)
    apart = _distance(server, _own_log_probs(trainer, ids, server.shape[1]))
    norm = _last_norm(trainer)
    with _whole(norm):
        kept = norm.detach().clone()
        norm.mul_(SCALE)
    sync()
    ids, server = _sample(trainer, longest, replicas)
    changed = _own_log_probs(trainer, ids, server.shape[1])
    norm = _last_norm(trainer)
    with _whole(norm):
        norm.copy_(kept)
    sync()
    apart = apart.maximum(_distance(server, changed))
    moved = _distance(changed, _own_log_probs(trainer, ids, server.shape[1]))
    for replica, (change, error) in enumerate(zip(moved.tolist(), apart.tolist(), strict=True)):
        if not (change > 0 and error <= FOLLOWED * change):
            which = f"replica {replica} of the generation server" if replicas > 1 else "the generation server"
            raise RuntimeError(
                f"weights do not reach {which}: a change that moves log-probabilities by {change:.3g} on the trainer leaves the "
                f"server {error:.3g} away from it. vLLM and TRL may not fit together, or the server computes in another precision."
            )
    to = "the server" if replicas == 1 else f"all {replicas} replicas of the server"
    say(f"weights reach {to}: log-probabilities moved by {moved.min():.3g} and are {apart.max():.2g} apart")


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens. Shape (replicas,)."""
    return (one - other).abs().mean(dim=1)


def _last_norm(trainer: GRPOTrainer) -> torch.nn.Parameter:
    """The weight before the head: one vector, on which every log-probability depends."""
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):  # what a forward pass has gathered is a copy, unless resharding is on
            module.reshard()
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.model.norm.weight


@contextlib.contextmanager
def _whole(parameter: torch.nn.Parameter) -> Iterator[None]:
    """ZeRO-3 keeps a part of it on each rank, and takes up a change on leaving; FSDP2's tensors compute as they lie."""
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


def _sample(trainer: GRPOTrainer, longest: int | None, replicas: int) -> tuple[list[list[int]], torch.Tensor]:
    """Of each replica prompt and completion, and its log-probabilities of the completion, shape (replicas, tokens); on every rank."""
    prompt = trainer.processing_class(PROBE, add_special_tokens=False)["input_ids"]
    num_tokens = PROBE_TOKENS
    if longest:
        num_tokens = min(num_tokens, longest // 2)
        prompt = prompt[: longest - num_tokens]
    answer: list[Any] = [None]
    if trainer.accelerator.is_main_process:
        client = trainer.vllm_generation.vllm_client
        client.reset_prefix_cache()  # its keys and values are those of other weights
        answer = [[_ask_replica(client, replica, prompt, num_tokens, trainer.temperature) for replica in range(replicas)]]
    broadcast_object_list(answer, from_process=0)
    completions, log_probs = zip(*answer[0], strict=True)
    return [[*prompt, *completion] for completion in completions], torch.tensor(log_probs)


def _ask_replica(client: Any, replica: int, prompt: list[int], num_tokens: int, temperature: float) -> tuple[list[int], list[float]]:
    """Completion and log-probabilities. By itself vLLM gives a request to whichever replica is free; this header of its API names one."""
    client.session.headers[REPLICA] = str(replica)
    try:
        done = client.generate([prompt], temperature=temperature, max_tokens=num_tokens, generation_kwargs={"ignore_eos": True, "seed": 0})
    finally:
        del client.session.headers[REPLICA]
    return done["completion_ids"][0], [token[0] for token in done["logprobs"][0]]


def _own_log_probs(trainer: GRPOTrainer, ids: list[list[int]], num_tokens: int) -> torch.Tensor:
    """Of the last `num_tokens` tokens of each, at the temperature of the run. Shape (sequences, num_tokens)."""
    tokens = torch.tensor(ids, device=trainer.accelerator.device)
    with trainer.accelerator.autocast():
        found, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, torch.ones_like(tokens), num_tokens)
    return found.float().cpu()
