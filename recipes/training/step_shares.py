"""Time GRPO's step by kind: generation_s, wait_s, sync_s and reward_s of metrics.jsonl.

Seconds are read from the host's clock around calls that wait for the GPU anyway, so timing is free.
Queued GPU work counts at the host's next wait: in train_s if every step is logged, else in the
transfer or generation that follows. Sums over ranks on GPUs are queued too, so waiting for other
ranks there counts as train_s.
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
    """Sum seconds by kind. The time of an inner block does not count for the outer one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._inside = 0.0  # seconds of inner blocks that have ended in the current block

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
        """Add seconds that passed in parallel with the step, under a separate kind."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds


class TimedStep:
    """Time GRPOTrainer's step: a mixin, placed before it."""

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

        engine.sync_weights = timed_sync  # TRL calls it in two places, but times only one
        if engine.mode == "server":
            engine.generate = self._timed_server(engine.generate)

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Return a context that adds its time to `kind`.

        It adds nothing in evaluation, which is eval_s, or in a thread, whose time belongs to no
        step.
        """
        counts = self.model.training and threading.current_thread() is threading.main_thread()
        return self.stopwatch(kind) if counts else contextlib.nullcontext()

    def _timed_server(self, generate: Callable[..., tuple]) -> Callable[..., tuple]:
        """Return `generate` with separate times for the request and for exchanges between ranks.

        TRL's `profiler` surrounds only the request.
        """

        def ask(*args: Any, profiler: AbstractContextManager, **kwargs: Any) -> tuple:
            @contextlib.contextmanager
            def both() -> Iterator[None]:
                with profiler, self.timed("generation"):
                    yield

            with self.timed("wait"):
                return generate(*args, profiler=both(), **kwargs)

        return ask

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("generation"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)
