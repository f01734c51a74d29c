"""Generate ahead of training: the base of stream.py, and topology.overlap=true.

With overlap=true the server loads new weights and starts on the next generation's prompts while the
trainer steps on completions of the previous weights, so training is at most one generation off
policy. Where each rank holds whole weights they are sent in a thread, until the optimizer changes
them. TRL's importance-sampling correction weights every token by trainer over server probability,
which also corrects this difference. TRL's AsyncGRPOTrainer needs attention kernels from the hub,
which exist for Hopper, gfx942 and gfx950 only; this runs wherever vLLM does, under every strategy.
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


@dataclass
class UnderWay:
    """Hold all ranks' prompts in progress. On the main rank, `answer` yields (result, seconds)."""

    prompts: list[list[int]]
    answer: Future | None


class Threads:
    """Run calls in threads, in the order of submission.

    Unlike with concurrent.futures, a program exits without waiting for them.
    """

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, 0
        self._calls: queue.SimpleQueue[tuple[Future, Callable, tuple]] = queue.SimpleQueue()

    def submit(self, call: Callable, *arguments: Any) -> Future:
        result: Future = Future()
        self._calls.put((result, call, arguments))
        if self._threads < self._most:
            self._threads += 1
            Thread(target=self._work, daemon=True).start()
        return result

    def _work(self) -> None:
        while True:
            result, call, arguments = self._calls.get()
            try:
                result.set_result(call(*arguments))
            except BaseException as error:  # raised in the thread that waits for the result
                result.set_exception(error)
            del result, call, arguments  # else the answer would stay in memory until the next call


class WeightsStay(TrainerCallback):
    """Keep the optimizer from changing weights before they have been sent."""

    def __init__(self, trainer: GenerationAhead) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.wait_for_transfer()


class GenerationAhead:
    """Read rows ahead of the step that trains on them, and request completions from a server.

    This is a mixin, placed before a GRPOTrainer with TimedStep.
    """

    ahead = 1
    _source: Iterator | None = None
    _loaded: Future | None = None  # of the step of the weights that were sent last
    _is_sending = False

    def __init__(self, *args: Any, config: DictConfig, **kwargs: Any) -> None:
        # The remaining batches of this step, then later ones.
        self._batches: deque[Any] = deque()
        # The number of finished micro-batches in this step; an epoch's last step may have fewer.
        self._in_step = 0
        # Gathering sharded weights is a collective, which must not run concurrently with the
        # step's.
        self._sends_in_thread = config.topology.strategy in ("none", "ddp")
        self._sender = Threads(1)
        super().__init__(*args, config=config, **kwargs)
        self.add_callback(WeightsStay(self))

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> Any:
        """Return the parent's batches, from an iterator that reads ahead."""
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

    def _upcoming(self, cycles: int) -> list[dict[str, Any]] | None:
        """Return this rank's rows `cycles` generations later; None if epoch or run ends first."""
        steps = (self._in_step + cycles * self._cycle()) // self.args.gradient_accumulation_steps
        if self.state.global_step + steps >= self.state.max_steps:
            return None
        return next(islice(self._batches, cycles * self._cycle(), None), None)

    def _send_weights(self) -> None:
        """Send the weights after an optimizer step, while this step continues if they are whole."""
        step = self.state.global_step
        if step == self._last_loaded_step:
            return
        if self._sends_in_thread:
            updated = torch.cuda.Event() if self.accelerator.device.type == "cuda" else None
            if updated:
                updated.record()
            self._loaded, self._is_sending = (
                self._sender.submit(self._sync_in_thread, updated),
                True,
            )
        else:
            with self.timed("sync"):
                self._sync()
        self._last_loaded_step = step

    def _sync(self) -> None:
        self.vllm_generation.sync_weights()

    def _sync_in_thread(self, updated: torch.cuda.Event | None) -> tuple[int, float]:
        """Send the weights in a thread; return their step, and the seconds that took."""
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
                _, seconds = self._loaded.result()
            self.stopwatch.add("transfer", seconds)
            self._is_sending = False

    def _loaded_step(self) -> int:
        """Wait for the last transfer and return the step whose weights the server has."""
        return self._loaded.result()[0] if self._loaded else self._last_loaded_step

    def _ask(
        self, prompts: list[list[int]], num_generations: int, **arguments: Any
    ) -> dict[str, list]:
        """Return the server's completions of each prompt, with log-probabilities."""
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

    _under_way: UnderWay | None = None

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
        if self._under_way is None or self._under_way.prompts != self._of_all_ranks(prompt_ids):
            # The first batch of a run or epoch was not requested in advance.
            self._send_weights()
            self._under_way = self._send(prompt_ids, num_generations)
        completion_ids, logprobs = self._receive(self._under_way, len(prompt_ids))
        self._send_weights()
        upcoming = self._upcoming(1)
        self._under_way = None
        if upcoming is not None:
            prompts = self._tokenize_prompts([row["prompt"] for row in upcoming])[0]
            self._under_way = self._send(prompts, num_generations)
        return completion_ids, logprobs

    def _of_all_ranks(self, prompt_ids: list) -> list:
        with self.timed("wait"):
            return gather_object(prompt_ids)

    def _send(self, prompt_ids: list, num_generations: int) -> UnderWay:
        prompts = self._of_all_ranks(prompt_ids)
        if not self.accelerator.is_main_process:
            return UnderWay(prompts, None)
        groups = prompts[::num_generations]  # the rows of a group are adjacent and equal

        def timed_answer() -> tuple[Any, float]:
            self._loaded_step()
            began = time.monotonic()
            return self._ask(groups, num_generations), time.monotonic() - began

        return UnderWay(prompts, self._threads.submit(timed_answer))

    def _receive(self, under_way: UnderWay, count: int) -> tuple[list, list]:
        """Return this rank's completions, and the log-probability of each token."""
        with self.timed("wait"):
            answer, server_s = under_way.answer.result() if under_way.answer else ({}, 0.0)
            shared = [(answer.get("completion_ids"), answer.get("logprobs"))]
            broadcast_object_list(shared, from_process=0)
        completion_ids, logprobs = shared[0]
        self.stopwatch.add("server", server_s)
        first = self.accelerator.process_index * count
        rows = slice(first, first + count)
        return completion_ids[rows], [
            [token[0] for token in sequence] for sequence in logprobs[rows]
        ]
