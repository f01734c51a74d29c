"""Provide stubs of vLLM's engines, with a clock that advances only in their calls."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from trl.generation import vllm_generation

from recipes import grpo
from recipes.measure import metrics
from recipes.sampling import overlap, serving
from recipes.smoke import gloo_trainer
from recipes.training import step_shares
from tests.helpers.trainers import configured

# seconds per call
GENERATES, JUDGES, SENDS, GATHERS, WAITS, STEPS = 8.0, 2.0, 0.5, 0.25, 4.0, 16.0


class Clock:
    """A clock that only `spend` advances. Other threads have their own time in addition."""

    def __init__(self) -> None:
        self.seconds, self.thread, self.main = 100.0, threading.local(), threading.get_ident()

    def spend(self, seconds: float) -> None:
        if threading.get_ident() == self.main:
            self.seconds += seconds
        else:
            self.thread.seconds = getattr(self.thread, "seconds", 0.0) + seconds

    def time(self) -> float:
        return self.seconds + getattr(self.thread, "seconds", 0.0)

    monotonic = perf_counter = time

    def slow(self, call: Any, seconds: float) -> Any:
        def slowly(*args: Any, **kwargs: Any) -> Any:
            self.spend(seconds)
            return call(*args, **kwargs)

        return slowly


def client(clock: Clock) -> type:
    """Return a stub of TRL's client, for a server that answers every prompt with two tokens."""

    class Client:
        def __init__(self, **_: Any) -> None:
            pass

        base_url = ""

        def _post(self, url: str, **_: Any) -> dict[str, Any]:
            assert url in ("/pause", "/resume")
            return {}

        def init_communicator(self, device: Any) -> None:
            pass

        def get_server_info(self) -> dict[str, Any]:
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(self, metadata: list, params: Any) -> None:
            assert len(list(params)) == len(metadata)
            clock.spend(SENDS)

        def reset_prefix_cache(self) -> None:
            pass

        def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
            clock.spend(GENERATES)
            number = n * len(prompts)
            return {
                "prompt_ids": prompts,
                "completion_ids": [[7, 8]] * number,
                "logprobs": [[[-1.0], [-1.0]]] * number,
            }

    return Client


def engine(clock: Clock) -> type:
    """Return a stub of vLLM's engine in the trainer's process, with the answers of the server."""
    token = {7: SimpleNamespace(rank=1, logprob=-1.0)}
    answer = SimpleNamespace(token_ids=[7, 7], logprobs=[token, token])

    class Engine:
        def __init__(self, **_: Any) -> None:
            loads = SimpleNamespace(load_weights=lambda weights: None)
            worker = SimpleNamespace(model_runner=SimpleNamespace(model=loads))
            self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

        def generate(self, prompts: list[dict[str, Any]], **_: Any) -> list[Any]:
            clock.spend(GENERATES)
            return [
                SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer])
                for prompt in prompts
            ]

        def reset_prefix_cache(self) -> None:
            clock.spend(SENDS)

        def wake_up(self, tags: list[str]) -> None:
            pass

        def sleep(self, level: int) -> None:
            pass

    return Engine


class Late(Future):
    """An answer that is not ready when it is requested."""

    clock: Clock

    def result(self, timeout: float | None = None) -> Any:
        answer = super().result(timeout)
        self.clock.spend(WAITS)
        return answer


class Sends(TrainerCallback):
    """Send weights before the first step, as CheckWeightsArrive does."""

    def __init__(self, trainer: Any, *_: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.vllm_generation.sync_weights()


class Updates(TrainerCallback):
    """Spend time on each optimizer step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.clock.spend(STEPS)


def without_server(patch: pytest.MonkeyPatch, client: type, check: type[TrainerCallback]) -> None:
    """Replace the server by `client` and CheckWeightsArrive by `check`.

    vLLM need not be installed.
    """
    patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    for name in ("prepare", "wait_until_up"):
        patch.setattr(serving, name, lambda config: None)
    patch.setattr(serving, "CheckWeightsArrive", check)
    patch.setattr(gloo_trainer, "gloo_client", lambda: client)
    patch.setattr(vllm_generation, "VLLMClient", client, raising=False)
    patch.setattr(vllm_generation, "is_vllm_available", lambda: True)


def run_grpo(run_dir: Any, patch: pytest.MonkeyPatch, *overrides: str) -> list[dict[str, Any]]:
    """Train with stubs of vLLM, and return the rows of metrics.jsonl."""
    clock = Clock()
    without_server(patch, client(clock), Sends)
    for module in (metrics, overlap, step_shares):
        patch.setattr(module, "time", clock)
    for name in ("trainer", "trainer_utils"):
        patch.setattr(f"transformers.{name}.time", clock)
    patch.setattr(overlap, "Future", type("LateHere", (Late,), {"clock": clock}))
    patch.setattr(overlap, "gather_object", clock.slow(overlap.gather_object, GATHERS))
    stubs = {"LLM": engine(clock), "SamplingParams": dict, "os": SimpleNamespace(environ={})}
    stubs |= {"ensure_master_addr_port": lambda: None, "empty_cache": lambda: None}
    stubs |= {"gather_object": clock.slow(vllm_generation.gather_object, GATHERS)}
    for name, stub in stubs.items():
        patch.setattr(vllm_generation, name, stub, raising=False)

    def train(config: Any, trainer: Any, lines: metrics.Metrics, cycle: int) -> dict[str, Any]:
        trainer.reward_funcs[0] = clock.slow(trainer.reward_funcs[0], JUDGES)
        trainer.model.generate = clock.slow(trainer.model.generate, GENERATES)
        trainer.add_callback(Updates(clock))
        trainer.add_callback(lines)
        trainer.train()
        return {}

    patch.setattr(grpo, "train", train)
    grpo.grpo(configured(run_dir, "grpo", *overrides))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
