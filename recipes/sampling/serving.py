"""Set up a trainer and its generation server, and check that weights arrive."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import requests
import torch
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.import_utils import is_vllm_available

from launch.core.errors import UserError
from recipes.models.adapters import merged_params
from recipes.rank.program import Interrupted, give_up, say, stop_requested
from recipes.sampling.generation import engine_args

PROBE = "The quick brown fox jumps over the lazy dog. 1 + 2 = 3."
PROBE_TOKENS = 32
ASK_S, POLL_S = 10.0, 0.5
REPLICA = "X-data-parallel-rank"  # vLLM's header that selects the replica
# Scale the last norm's weights by this, which changes log-probabilities far more than rounding.
SCALE = 1.5
# Share of the change that may be missing; rounding in bf16 causes a few hundredths.
FOLLOWED = 0.25


def prepare(config: DictConfig) -> None:
    """Set up TRL's client of vLLM before a trainer is made. Raises UserError."""
    check_vllm()
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's loopback
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    give_up_where_refused(config)
    pass_engine_args(config)


def connect(config: DictConfig, trainer: GRPOTrainer) -> None:
    """Set up a new trainer that generates with vLLM."""
    send_merged(trainer)
    if config.topology.servers:
        name_ends(trainer)
        longest, servers = config.topology.server_max_length, config.topology.servers
        trainer.add_callback(CheckWeightsArrive(trainer, longest, servers))
    elif not (trainer.args.generation_kwargs or trainer.args.vllm_structured_outputs_regex):
        # Detokenization, which only `stop` and similar options need, took half of an engine's time.
        trainer.vllm_generation.generation_kwargs = {"detokenize": False}


def wait_until_up(base_url: str) -> None:
    """Wait for the server, which loads while this rank does; the launcher limits the time.

    TRL's client waits only on the main rank, while the others wait in a collective that times out
    after ten minutes. Raises Interrupted.
    """
    while not stop_requested():
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{base_url}/health", timeout=ASK_S).ok:
                return
        time.sleep(POLL_S)
    raise Interrupted


def give_up_where_refused(config: DictConfig) -> None:
    """End the run if the server rejects a weight transfer.

    TRL's client sends tensors while a thread asks the server to receive them. TRL ignores that
    thread's error, so sending would hang until the watchdog ends the run.
    """
    from trl.generation.vllm_client import VLLMClient

    post = VLLMClient._post

    def ask(self: VLLMClient, url: str, **kwargs: Any) -> dict:
        try:
            return post(self, url, **kwargs)
        except Exception as error:
            endpoint = url.rpartition("/")[2]
            if endpoint in ("pause", "init_weight_transfer_engine", "update_weights"):
                reason = f"the generation server rejects a weight transfer ({endpoint}): {error}"
                give_up(config, f"{reason}. logs/server.log has its reason")
            raise

    VLLMClient._post = ask


def pass_engine_args(config: DictConfig) -> None:
    """Pass topology.server_args to the engine that TRL makes under topology=colocate."""
    from trl.generation import vllm_generation

    extra = engine_args(config)
    if config.topology.name == "colocate" and extra:
        engine = vllm_generation.LLM
        vllm_generation.LLM = lambda **own: engine(**{**own, **extra})


def check_vllm() -> None:
    """Raise UserError if vLLM is missing, or if TRL warns that it does not support its version."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = is_vllm_available()
    wrong = next((str(w.message) for w in caught if "vLLM" in str(w.message)), None)
    if wrong or not available:
        raise UserError(
            f"{wrong or 'vLLM is not installed where the ranks run.'} Use an image that holds both "
            "(containers/build.py lists them), on a CPU `make vllm`; or topology=ddp, where "
            "transformers generates."
        )


def send_merged(trainer: GRPOTrainer) -> None:
    """Send the weights of base and adapter merged.

    TRL cannot send an adapter alone (1.16: its client names one model and streams whole tensors),
    and vLLM's LoRA supports neither DoRA nor a base that trains in 4 bits. TRL itself would merge
    in place and send the base's tensors, which for nf4 are packed bytes.
    """
    generation = trainer.vllm_generation
    if isinstance(generation.model, PeftModel):
        generation._iter_named_params = lambda: merged_params(
            generation.model, generation._dist.gather_params
        )
        say("weights for generation: base and adapter are merged before each transfer")


def name_ends(trainer: GRPOTrainer) -> None:
    """Put a completion's end tokens into requests.

    The server has no tokenizer, so it uses only the end tokens in the model's files.
    """
    generation = trainer.vllm_generation
    arguments = generation.generation_kwargs
    if not arguments.get("ignore_eos"):
        ends = {*(arguments.get("stop_token_ids") or []), *trainer.eos_token_ids} - {None}
        generation.generation_kwargs = {**arguments, "stop_token_ids": sorted(ends)}


class CheckWeightsArrive(TrainerCallback):
    """Check weight transfers once, when training begins and the strategy has sharded the model."""

    def __init__(self, trainer: GRPOTrainer, longest: int | None, replicas: int) -> None:
        self.trainer = trainer
        self.longest, self.replicas = longest, replicas

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        check_weights_arrive(self.trainer, self.longest, self.replicas)


@torch.no_grad()
def check_weights_arrive(
    trainer: GRPOTrainer, longest: int | None = None, replicas: int = 1
) -> None:
    """Change a weight and check that every replica's log-probabilities follow, by three transfers.

    If a server ignored weights, the policy would train on completions of a different policy. Every
    rank must call this. `longest` limits the tokens of prompt and completion; None if the probe
    fits. Raises RuntimeError on every rank.
    """
    sync = trainer.vllm_generation.sync_weights
    sync()
    ids, server = _sample(trainer, longest, replicas)
    apart = _distance(server, _own_log_probs(trainer, ids, server.shape[1]))
    norm = _last_norm(trainer)
    with _whole(norm):
        original = norm.detach().clone()
        norm.mul_(SCALE)
    sync()
    ids, server = _sample(trainer, longest, replicas)
    changed = _own_log_probs(trainer, ids, server.shape[1])
    norm = _last_norm(trainer)
    with _whole(norm):
        norm.copy_(original)
    sync()
    apart = apart.maximum(_distance(server, changed))
    moved = _distance(changed, _own_log_probs(trainer, ids, server.shape[1]))
    for replica, (change, error) in enumerate(zip(moved.tolist(), apart.tolist(), strict=True)):
        if not (change > 0 and error <= FOLLOWED * change):
            server_name = f"replica {replica} of " * (replicas > 1) + "the generation server"
            raise RuntimeError(
                f"weights do not reach {server_name}: a change shifts log-probabilities by "
                f"{change:.3g} on the trainer, but the server ends {error:.3g} away. vLLM "
                "and TRL may be incompatible, or the server computes in another precision."
            )
    to = "the server" if replicas == 1 else f"all {replicas} replicas of the server"
    moved_by, distance = f"{moved.min():.3g}", f"{apart.max():.2g}"
    say(f"weights reach {to}: log-probabilities changed by {moved_by} and are {distance} apart")


def _distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference over the tokens, of shape (replicas,)."""
    return (first - second).abs().mean(dim=1)


def _last_norm(trainer: GRPOTrainer) -> torch.nn.Parameter:
    """Return the last norm's weight, a vector that all log-probabilities depend on."""
    for module in trainer.model.modules():
        # Without resharding, a forward pass leaves a gathered copy.
        if isinstance(module, FSDPModule):
            module.reshard()
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.model.norm.weight


@contextlib.contextmanager
def _whole(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Gather a parameter under ZeRO-3, which stores changes when the block ends.

    FSDP2's tensors support the computation without gathering.
    """
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


def _sample(
    trainer: GRPOTrainer, longest: int | None, replicas: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Return each replica's prompt and completion, and log-probabilities (replicas, tokens)."""
    prompt = trainer.processing_class(PROBE, add_special_tokens=False)["input_ids"]
    num_tokens = PROBE_TOKENS
    if longest:
        num_tokens = min(num_tokens, longest // 2)
        prompt = prompt[: longest - num_tokens]
    answer: list[Any] = [None]
    if trainer.accelerator.is_main_process:
        client = trainer.vllm_generation.vllm_client
        client.reset_prefix_cache()  # it was computed with other weights
        answer = [[]]
        for replica in range(replicas):
            client.session.headers[REPLICA] = str(replica)
            try:
                done = client.generate(
                    [prompt],
                    temperature=trainer.temperature,
                    max_tokens=num_tokens,
                    generation_kwargs={"ignore_eos": True, "seed": 0},
                )
            finally:
                del client.session.headers[REPLICA]
            log_probs = [token[0] for token in done["logprobs"][0]]
            answer[0].append((done["completion_ids"][0], log_probs))
    broadcast_object_list(answer, from_process=0)
    completions, log_probs = zip(*answer[0], strict=True)
    return [[*prompt, *completion] for completion in completions], torch.tensor(log_probs)


def _own_log_probs(trainer: GRPOTrainer, ids: list[list[int]], num_tokens: int) -> torch.Tensor:
    """Return this model's log-probabilities of the last `num_tokens`, at the run's temperature."""
    tokens = torch.tensor(ids, device=trainer.accelerator.device)
    with trainer.accelerator.autocast():
        log_probs, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, tokens, torch.ones_like(tokens), num_tokens
        )
    return log_probs.float().cpu()
