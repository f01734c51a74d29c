"""Measure the parts of GRPO's step: generation_s, wait_s, sync_s and reward_s in metrics.jsonl.

The measured calls wait for the GPU anyway, so timing on the host costs nothing. Queued GPU work is
included in the part where the host next waits for it. This is train_s if every step is logged,
else the next transfer or generation. Collectives are queued too, so train_s also includes time
waiting for other ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

KINDS = ("generation", "wait", "sync", "reward")


class Stopwatch:
    """Sum seconds by kind. The time of a nested block is excluded from the outer block."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._inside = 0.0  # seconds of finished blocks inside the current block

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        before, self._inside, began = self._inside, 0.0, time.monotonic()
        try:
            yield
        finally:
            duration = time.monotonic() - began
            self._seconds[kind] += duration - self._inside
            self._inside = before + duration

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds of a kind that runs in parallel with the step."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by kind since the last call, and reset them."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds


class TimedStep:
    """Measure the parts of a step. This is a mixin, placed before GRPOTrainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stopwatch = Stopwatch()
        if not self.use_vllm:
            return
        engine = self.vllm_generation
        sync_weights = engine.sync_weights

        def timed_sync() -> None:
            with self.timed("sync"):
                sync_weights()

        engine.sync_weights = timed_sync  # TRL itself times only one of its two calls
        if engine.mode == "server":
            engine.generate = self._timed_server(engine.generate)

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Return a context that adds its time to `kind`.

        Time in evaluation (eval_s) and in other threads is not added.
        """
        is_step = self.model.training and threading.current_thread() is threading.main_thread()
        return self.stopwatch(kind) if is_step else contextlib.nullcontext()

    def _timed_server(self, generate: Callable[..., tuple]) -> Callable[..., tuple]:
        """Wrap `generate`, and time the request separately from communication between ranks.

        TRL uses `profiler` as the context of only the request.
        """

        def timed_generate(*args: Any, profiler: AbstractContextManager, **kwargs: Any) -> tuple:
            @contextlib.contextmanager
            def timed_request() -> Iterator[None]:
                with profiler, self.timed("generation"):
                    yield

            with self.timed("wait"):
                return generate(*args, profiler=timed_request(), **kwargs)

        return timed_generate

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("generation"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)
