"""Generate completions ahead of training (topology.overlap=true). stream.py uses this too.

While the trainer uses the completions of one generation, the server generates the next, so training
is at most one generation off-policy. TRL's importance-sampling correction accounts for this by
weighting each token with the ratio of the trainer's to the server's probability. If weights are not
sharded, a thread sends them until the next optimizer step.

TRL's AsyncGRPOTrainer is not used, because it needs attention kernels from the hub, which exist
only for Hopper, gfx942 and gfx950.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from threading import Thread
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from omegaconf import DictConfig
from transformers import TrainerCallback

from recipes.sampling.serving import shared_loss


@dataclass
class Request:
    """All ranks' prompts, and the response (completions, seconds), which only the main rank has."""

    prompts: list[list[int]]
    response: Future | None


class Threads:
    """Run calls in at most `limit` threads, in the order of submission.

    Unlike with concurrent.futures, the program can exit while they run.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._threads = limit, 0
        self._calls: queue.SimpleQueue[tuple[Future, Callable, tuple]] = queue.SimpleQueue()

    def submit(self, call: Callable, *arguments: Any) -> Future:
        result: Future = Future()
        self._calls.put((result, call, arguments))
        if self._threads < self._limit:
            self._threads += 1
            Thread(target=self._work, daemon=True).start()
        return result

    def _work(self) -> None:
        while True:
            result, call, arguments = self._calls.get()
            try:
                result.set_result(call(*arguments))
            except BaseException as error:  # Future.result() raises it
                result.set_exception(error)
            del result, call, arguments  # free the memory before the next call


class WaitForTransfer(TrainerCallback):
    """Delay the optimizer step until the weights have been sent."""

    def __init__(self, trainer: GenerationAhead) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.wait_for_transfer()


class GenerationAhead:
    """Read rows ahead of training, send weights, and request completions from a server.

    This is a mixin, placed before a GRPOTrainer with TimedStep.
    """

    ahead = 1
    _source: Iterator | None = None
    _transfer: Future | None = None  # result of the last _sync_in_thread
    _is_sending = False

    def __init__(self, *args: Any, config: DictConfig, **kwargs: Any) -> None:
        # Prefetched batches: the rest of this step, then later steps.
        self._batches: deque[Any] = deque()
        # Number of finished micro-batches in this step.
        self._in_step = 0
        # Sharded weights need collectives, which must not run in parallel with the step's.
        self._sends_in_thread = config.topology.strategy in ("none", "ddp")
        self._sender = Threads(1)
        super().__init__(*args, config=config, **kwargs)
        self.add_callback(WaitForTransfer(self))

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> Any:
        """Return this step's batches as the parent class does, and prefetch later ones."""
        if epoch_iterator is not self._source:
            self._source = epoch_iterator
            self._batches.clear()
        self._in_step = 0
        missing = num_batches + self.ahead * self._cycle() - len(self._batches)
        self._batches.extend(islice(epoch_iterator, max(0, missing)))
        batches = iter(list(islice(self._batches, num_batches)))
        return super().get_batch_samples(batches, num_batches, device)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        prepared = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._batches.popleft()
            self._in_step += 1
        return prepared

    def _cycle(self) -> int:
        """Return the number of micro-batches from one generation to the next."""
        return self.args.steps_per_generation * self.num_iterations

    def _rows_ahead(self, cycles: int) -> list[dict[str, Any]] | None:
        """Return this rank's rows `cycles` generations later, or None if the epoch ends before."""
        steps = (self._in_step + cycles * self._cycle()) // self.args.gradient_accumulation_steps
        if self.state.global_step + steps >= self.state.max_steps:
            return None
        return next(islice(self._batches, cycles * self._cycle(), None), None)

    def _send_weights(self) -> None:
        """Send the weights if they have changed. Do not wait if a thread can send them."""
        step = self.state.global_step
        if step == self._last_loaded_step:
            return
        if self._sends_in_thread:
            updated = torch.cuda.Event() if self.accelerator.device.type == "cuda" else None
            if updated:
                updated.record()
            self._transfer = self._sender.submit(self._sync_in_thread, updated)
            self._is_sending = True
        else:
            with self.timed("sync"):
                self._sync()
        self._last_loaded_step = step

    def _sync(self) -> None:
        self.vllm_generation.sync_weights()

    def _sync_in_thread(self, updated: torch.cuda.Event | None) -> tuple[int, float]:
        """Send the weights, and return their step and the seconds of the transfer."""
        step = self.state.global_step
        if updated:
            torch.cuda.set_device(self.accelerator.device)
            updated.synchronize()
        began = time.monotonic()
        with torch.no_grad():
            self._sync()
        return step, time.monotonic() - began

    def wait_for_transfer(self) -> None:
        if self._is_sending:
            with self.timed("sync"):
                _, seconds = self._transfer.result()
            self.stopwatch.add("transfer", seconds)
            self._is_sending = False

    def _loaded_step(self) -> int:
        """Wait for the last transfer, and return the step of the server's weights."""
        return self._transfer.result()[0] if self._transfer else self._last_loaded_step

    def _request(
        self, prompts: list[list[int]], num_generations: int, **arguments: Any
    ) -> dict[str, list]:
        """Return the server's `num_generations` completions per prompt, with log-probabilities."""
        server = self.vllm_generation
        return server.vllm_client.generate(
            prompts=prompts,
            n=num_generations,
            repetition_penalty=server.repetition_penalty,
            temperature=server.temperature,
            top_p=server.top_p,
            top_k=server.top_k,
            min_p=server.min_p or 0.0,
            max_tokens=server.max_completion_length,
            logprobs=server.logprobs,
            structured_outputs_regex=server.structured_outputs_regex,
            generation_kwargs={**(server.generation_kwargs or {}), **arguments},
        )


class OverlappedGeneration(GenerationAhead):
    """Implement topology.overlap=true."""

    _pending: Request | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threads = Threads(1)

    def _generate_single_turn(
        self,
        prompt_ids: list,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        **kwargs: Any,
    ) -> tuple[list, list]:
        if not self.model.training:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, **kwargs
            )
        if self._pending is None or self._pending.prompts != self._gather_prompts(prompt_ids):
            # The first prompts of a run or epoch were not sent ahead.
            self._send_weights()
            self._pending = self._send(prompt_ids, num_generations)
        response = self._pending.response
        with self.timed("wait"), shared_loss():
            result, server_s = response.result() if response else ({}, 0.0)
            shared = [(result.get("completion_ids"), result.get("logprobs"))]
            broadcast_object_list(shared, from_process=0)
        self.stopwatch.add("server", server_s)
        first = self.accelerator.process_index * len(prompt_ids)
        of_rank = slice(first, first + len(prompt_ids))
        completion_ids, logprobs = (values[of_rank] for values in shared[0])
        self._send_weights()
        rows = self._rows_ahead(1)
        self._pending = None
        if rows is not None:
            prompts = self._tokenize_prompts([row["prompt"] for row in rows])[0]
            self._pending = self._send(prompts, num_generations)
        return completion_ids, [[token[0] for token in sequence] for sequence in logprobs]

    def _gather_prompts(self, prompt_ids: list) -> list:
        with self.timed("wait"):
            return gather_object(prompt_ids)

    def _send(self, prompt_ids: list, num_generations: int) -> Request:
        prompts = self._gather_prompts(prompt_ids)
        if not self.accelerator.is_main_process:
            return Request(prompts, None)
        groups = prompts[::num_generations]  # the rows of a group are adjacent and equal

        def timed_request() -> tuple[Any, float]:
            self._loaded_step()
            began = time.monotonic()
            return self._request(groups, num_generations), time.monotonic() - began

        return Request(prompts, self._threads.submit(timed_request))
