"""The seconds of GRPO's step by kind: what metrics.jsonl has as generation_s, wait_s, sync_s and reward_s.

They are read from the host's clock around calls that wait for the GPU anyway, so timing costs nothing. Work that the GPU still has queued
is counted where the host next waits for it. With a line each step that is the line, in train_s; without, the last backward pass and the
optimizer of a step count in the transfer or the generation that follows. A sum over the ranks that runs on GPUs (of gradients, of
rewards) is queued as well, so waiting for other ranks there is in train_s.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

KINDS = ("generation", "wait", "sync", "reward")


class Stopwatch:
    """Add up seconds by kind. A block is charged only for what no block inside it is charged for."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._inside = 0.0  # seconds of the blocks that have ended in the one that runs

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        before, self._inside, began = self._inside, 0.0, time.monotonic()
        try:
            yield
        finally:
            lasted = time.monotonic() - began
            self._seconds[kind] += lasted - self._inside
            self._inside = before + lasted

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds that passed beside the step, under a kind of their own."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds


class TimedStep:
    """Mixed into GRPOTrainer, before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stopwatch = Stopwatch()
        if not self.use_vllm:
            return
        engine = self.vllm_generation
        engine.sync_weights = self._timed_sync(engine.sync_weights)  # TRL calls it from two places, and times one
        if engine.mode == "server":
            engine.generate = self._timed_server(engine.generate)

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Charge a block of training to `kind`. Answers to held-out prompts are in eval_s."""
        return self.stopwatch(kind) if self.model.training else contextlib.nullcontext()

    def _timed_sync(self, sync_weights: Callable[[], None]) -> Callable[[], None]:
        def sync() -> None:
            with self.timed("sync"):
                sync_weights()

        return sync

    def _timed_server(self, generate: Callable[..., tuple]) -> Callable[..., tuple]:
        """Tell asking the server, which TRL's `profiler` surrounds, from exchanging prompts and completions with the other ranks."""

        def ask(*args: Any, profiler: AbstractContextManager, **kwargs: Any) -> tuple:
            with self.timed("wait"):
                return generate(*args, profiler=_both(profiler, self.timed("generation")), **kwargs)

        return ask

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("generation"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)


@contextlib.contextmanager
def _both(one: AbstractContextManager, other: AbstractContextManager) -> Iterator[None]:
    with one, other:
        yield
