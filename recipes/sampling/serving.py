"""Set up a trainer's generation with vLLM, and check that the server gets the trainer's weights."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig
from packaging.version import Version
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.import_utils import is_vllm_available

from launch.core.errors import UserError
from recipes.models import vision
from recipes.models.adapters import merged_params
from recipes.models.model_build import whole_model
from recipes.rank.program import Interrupted, ServerLost, give_up, say, stop_requested
from recipes.sampling.generation import engine_args
from recipes.training.communication import reshard

PROBE = "The quick brown fox jumps over the lazy dog. 1 + 2 = 3."
PROBE_TOKENS = 32
REQUEST_TIMEOUT_S, POLL_S = 10.0, 0.5
# TRL's client retries five times, which takes a minute. These take 12 s, so that a trainer whose
# server has ended can still save.
RETRIES = 3
REPLICA = "X-data-parallel-rank"  # vLLM's header that selects the replica
# Factor for 1 + the last norm's weights, which changes log-probabilities far more than rounding.
# Gemma and Qwen3.5 store these weights minus 1. A factor above 1 would hardly change a confident
# policy's log-probabilities, which are near 0.
SCALE = 0.25
# Largest error as a share of the change; rounding in bf16 causes a few hundredths.
TOLERANCE = 0.25


def prepare(config: DictConfig) -> None:
    """Set up TRL's client of vLLM, before the trainer exists. Raises UserError."""
    check_vllm()
    if config.topology.name == "colocate" and config.trainer_args.get("vllm_enable_sleep_mode"):
        check_sleep(version("vllm"))
    server = urlsplit(config.trainer_args.get("vllm_server_base_url", "http://127.0.0.1")).hostname
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach the server
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), server]))
    check_requests(config)
    pass_engine_args(config)


def connect(config: DictConfig, trainer: GRPOTrainer) -> None:
    """Set up a new trainer that generates with vLLM."""
    send_merged_weights(trainer)
    send_gathered_modules(trainer)
    if whole_model(config, trainer.accelerator.unwrap_model(trainer.model).config):
        send_whole_names(trainer)
    if config.topology.servers:
        send_end_tokens(trainer)
        outlive_server(trainer)
        max_length, servers = config.topology.server_max_length, config.topology.servers
        trainer.add_callback(CheckWeightsArrive(trainer, max_length, servers))
    elif not (trainer.args.generation_kwargs or trainer.args.vllm_structured_outputs_regex):
        # Only options such as `stop` need text, and detokenization took half of the engine's time.
        trainer.vllm_generation.generation_kwargs = {"detokenize": False}


def wait_until_up(base_url: str) -> None:
    """Wait until the server has started. The launcher limits this time. Raises Interrupted.

    With TRL's own wait, all ranks except the main rank would wait in a collective, which times out
    after ten minutes.
    """
    while not stop_requested():
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{base_url}/health", timeout=REQUEST_TIMEOUT_S).ok:
                return
        time.sleep(POLL_S)
    raise Interrupted


def check_requests(config: DictConfig) -> None:
    """Make TRL's client end the run if the server rejects a weight transfer.

    TRL ignores an error of the thread that asks the server to receive tensors. Sending would then
    hang until the watchdog ends the run; only gloo notices that the server has ended.
    If the server does not answer, later requests fail immediately, since it may lack weights.
    """
    from trl.generation.vllm_client import VLLMClient

    post = VLLMClient._post
    lost: requests.RequestException | None = None

    def checked_post(self: VLLMClient, url: str, **kwargs: Any) -> dict:
        nonlocal lost
        if lost is not None:
            raise lost
        adapter = self.session.get_adapter(url)
        adapter.max_retries = adapter.max_retries.new(total=RETRIES)
        try:
            return post(self, url, **kwargs)
        except Exception as error:
            if isinstance(error, requests.RequestException):
                lost = error
            endpoint, ends = url.rpartition("/")[2], lost and getattr(self, "over_gloo", False)
            if endpoint in ("init_weight_transfer_engine", "update_weights") and not ends:
                reason = f"the generation server rejects a weight transfer ({endpoint}): {error}"
                give_up(config, f"{reason}. See logs/server.log.")
            raise

    VLLMClient._post = checked_post


def outlive_server(trainer: GRPOTrainer) -> None:
    """Ignore a transfer to a server that has ended, so that the trainers can finish their step.

    The next request for completions reports the loss.
    """
    generation = trainer.vllm_generation
    sync, params = generation.sync_weights, generation._iter_named_params
    remaining: Iterator[Any] = iter(())

    def iter_params() -> Iterator[Any]:
        nonlocal remaining
        remaining = params()
        return remaining

    def sync_unless_lost() -> None:
        try:
            sync()
        except requests.RequestException:
            for _ in remaining:  # the other ranks gather all weights
                pass

    generation.sync_weights, generation._iter_named_params = sync_unless_lost, iter_params


@contextlib.contextmanager
def shared_loss() -> Iterator[None]:
    """If the main rank's request fails in this block, raise ServerLost on every rank.

    The other ranks wait for completions, and raise when they iterate over what they get.
    """
    try:
        yield
    except requests.RequestException as error:
        lost = ServerLost(f"the generation server does not answer: {error}")
        broadcast_object_list([lost], from_process=0)
        raise lost from error


def pass_engine_args(config: DictConfig) -> None:
    """Pass topology.server_args to the engine that TRL creates under topology=colocate.

    Like a server (launch/plan/process_groups.py), it loads no vision tower.
    """
    from trl.generation import vllm_generation

    if config.topology.name == "colocate":
        server_args = {"language_model_only": True, **engine_args(config)}
        engine = vllm_generation.LLM
        vllm_generation.LLM = lambda **trl_args: engine(**{**trl_args, **server_args})


def check_vllm() -> None:
    """Raise UserError if vLLM is missing, or if TRL does not support its version."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = is_vllm_available()
    warning = next((str(w.message) for w in caught if "vLLM" in str(w.message)), None)
    if warning or not available:
        raise UserError(
            f"{warning or 'vLLM is not installed.'} Use an image with vLLM (python "
            "containers/build.py lists images), `make vllm` on a CPU, or topology=ddp, which "
            "generates with transformers."
        )


def check_sleep(vllm: str) -> None:
    """Raise UserError if this version of vLLM keeps its memory on ROCm while it sleeps.

    The plan counts on that memory. vllm#46203 frees it; vllm#40686 had reverted an earlier fix.
    """
    if torch.version.hip and Version(vllm).release < (0, 24):
        raise UserError(
            f"method.args.vllm_enable_sleep_mode=true: vLLM {vllm} frees no memory on ROCm. Use "
            "vLLM 0.25 or newer, or method.args.vllm_enable_sleep_mode=false."
        )


def send_merged_weights(trainer: GRPOTrainer) -> None:
    """With an adapter, make TRL send the merged weights of base and adapter.

    TRL 1.16 cannot send only the adapter, and vLLM's LoRA supports neither DoRA nor 4-bit bases.
    TRL itself would merge in place and send the base's tensors, which are packed bytes in nf4.
    """
    generation = trainer.vllm_generation
    if isinstance(generation.model, PeftModel):
        generation._iter_named_params = lambda: merged_params(
            generation.model, generation._dist.gather_params
        )
        say("merging base and adapter before each weight transfer to vLLM")


def send_gathered_modules(trainer: GRPOTrainer) -> None:
    """With FSDP2, make TRL send the weights that `gathered_weights` yields.

    TRL gathers each tensor alone, as fp32. For 4B on three H100s, generation paused for 1.6 s per
    step (docs/results/speed.md). These are a tenth of the gathers and half of the bytes.
    """
    generation = trainer.vllm_generation
    generation._iter_fsdp2_params = lambda model: (
        (generation._fix_param_name_to_vllm(name), weight)
        for name, weight in gathered_weights(model)
    )


def gathered_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole weight in the compute dtype) for each weight of a model under FSDP2.

    Every rank must iterate. One module's weights are gathered at a time.
    """
    sharded = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    reshard(model)
    for prefix, module in sharded:
        module.unshard()
        # Copies, because vLLM's sender keeps tensors until it has packed 1 GB.
        weights = [
            (name, weight.detach().clone())
            for name, weight in module.named_parameters(prefix)
            if not isinstance(weight, DTensor)  # of a module inside this one
        ]
        if torch.cuda.is_available():  # the sender alternates between two streams
            torch.cuda.current_stream().synchronize()
        module.reshard()
        yield from weights


def send_whole_names(trainer: GRPOTrainer) -> None:
    """Send the text's weights under the names that the server's model with its tower has."""
    generation = trainer.vllm_generation
    params = generation._iter_named_params
    generation._iter_named_params = lambda: (
        (vision.whole_name(name), weight) for name, weight in params()
    )


def send_end_tokens(trainer: GRPOTrainer) -> None:
    """Send the trainer's end tokens with each request.

    The server knows only the end tokens in the model's files, because it has no tokenizer.
    """
    generation = trainer.vllm_generation
    arguments = generation.generation_kwargs
    if not arguments.get("ignore_eos"):
        ends = {*(arguments.get("stop_token_ids") or []), *trainer.eos_token_ids} - {None}
        generation.generation_kwargs = {**arguments, "stop_token_ids": sorted(ends)}


class CheckWeightsArrive(TrainerCallback):
    """Check weight transfers when training begins, after the model has been sharded."""

    def __init__(self, trainer: GRPOTrainer, max_length: int | None, replicas: int) -> None:
        self.trainer = trainer
        self.max_length, self.replicas = max_length, replicas

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        check_weights_arrive(self.trainer, self.max_length, self.replicas)


@torch.no_grad()
def check_weights_arrive(
    trainer: GRPOTrainer, max_length: int | None = None, replicas: int = 1
) -> None:
    """Change a weight, and check that each replica's log-probabilities change equally.

    This costs three transfers. Without it, a server that ignores weights would go unnoticed, and
    training would use completions of another policy. Every rank must call this function.
    `max_length` limits the tokens of prompt and completion. Raises RuntimeError on every rank.
    """
    sync = trainer.vllm_generation.sync_weights
    sync()
    ids, server = _sample(trainer, max_length, replicas)
    errors = _distance(server, _log_probs(trainer, ids, server.shape[1]))
    norm = _last_norm(trainer)
    with _gathered(norm):
        original = norm.detach().clone()
        norm.add_(1).mul_(SCALE).sub_(1)
    sync()
    ids, server = _sample(trainer, max_length, replicas)
    changed = _log_probs(trainer, ids, server.shape[1])
    norm = _last_norm(trainer)
    with _gathered(norm):
        norm.copy_(original)
    sync()
    errors = errors.maximum(_distance(server, changed))
    changes = _distance(changed, _log_probs(trainer, ids, server.shape[1]))
    for replica, (change, error) in enumerate(zip(changes.tolist(), errors.tolist(), strict=True)):
        if not (change > 0 and error <= TOLERANCE * change):
            server_name = f"replica {replica} of " * (replicas > 1) + "the generation server"
            raise RuntimeError(
                f"weights do not reach {server_name}: a test changed the trainer's "
                f"log-probabilities by {change:.3g}, but the server's differ from them by "
                f"{error:.3g}. vLLM and TRL may be incompatible, or the server may compute in "
                "another precision."
            )
    target = "the server" if replicas == 1 else f"all {replicas} replicas of the server"
    say(
        f"weights reach {target}: a test changed log-probabilities by {changes.min():.3g}, and "
        f"the server's differ from the trainer's by {errors.max():.2g}"
    )


def _distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference over the tokens, of shape (replicas,)."""
    return (first - second).abs().mean(dim=1)


def _last_norm(trainer: GRPOTrainer) -> torch.nn.Parameter:
    """Return the last norm's weight, which affects all log-probabilities."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.model.norm.weight


@contextlib.contextmanager
def _gathered(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Gather a parameter under ZeRO-3, and store changes after the block.

    FSDP2's tensors can be changed without gathering.
    """
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


def _sample(
    trainer: GRPOTrainer, max_length: int | None, replicas: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Sample each replica; return token ids and log-probabilities of shape (replicas, tokens)."""
    prompt = trainer.processing_class(PROBE, add_special_tokens=False)["input_ids"]
    num_tokens = PROBE_TOKENS
    if max_length:
        num_tokens = min(num_tokens, max_length // 2)
        prompt = prompt[: max_length - num_tokens]
    results: list[Any] = [None]
    if trainer.accelerator.is_main_process:
        client = trainer.vllm_generation.vllm_client
        results = [[]]
        with shared_loss():
            client.reset_prefix_cache()  # computed with other weights
            for replica in range(replicas):
                client.session.headers[REPLICA] = str(replica)
                try:
                    generated = client.generate(
                        [prompt],
                        temperature=trainer.temperature,
                        max_tokens=num_tokens,
                        generation_kwargs={"ignore_eos": True, "seed": 0},
                    )
                finally:
                    del client.session.headers[REPLICA]
                log_probs = [token[0] for token in generated["logprobs"][0]]
                results[0].append((generated["completion_ids"][0], log_probs))
    broadcast_object_list(results, from_process=0)
    completions, log_probs = zip(*results[0], strict=True)
    return [[*prompt, *completion] for completion in completions], torch.tensor(log_probs)


def _log_probs(trainer: GRPOTrainer, ids: list[list[int]], num_tokens: int) -> torch.Tensor:
    """Return the trainer's log-probabilities of the last `num_tokens` tokens of each sequence."""
    tokens = torch.tensor(ids, device=trainer.accelerator.device)
    mask = torch.ones_like(tokens)
    if not any(isinstance(module, FSDPModule) for module in trainer.model.modules()):
        with trainer.accelerator.autocast():
            log_probs, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, tokens, mask, num_tokens
            )
        return log_probs.float().cpu()
    # The trainer's method uses the head's weight without running the head, and before torch 2.13
    # FSDP2 does not release a group of weights until all of its modules have run.
    with trainer.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
        logits = trainer.model(input_ids=tokens, attention_mask=mask).logits
    reshard(trainer.model)
    log_probs = (logits[:, -num_tokens - 1 : -1].float() / trainer.temperature).log_softmax(-1)
    return log_probs.gather(-1, tokens[:, -num_tokens:, None]).squeeze(-1).cpu()
