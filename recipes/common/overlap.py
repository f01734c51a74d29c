"""Generate ahead of training: the base that stream.py shares, and topology.overlap=true, which is one generation off policy at most.

With overlap=true the server takes new weights and starts on the prompts of the next generation, while the trainer steps on completions made
with the weights before. TRL's importance-sampling correction weighs every token by trainer over server probability, which covers this
difference too. TRL's own AsyncGRPOTrainer runs packed prompts through attention kernels that it fetches from the hub, for Hopper and
for gfx942 and gfx950; this runs wherever vLLM does, under every strategy.
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

from accelerate.utils import broadcast_object_list, gather_object


@dataclass
class UnderWay:
    """Prompts of all ranks that the server works on; `answer`, with the seconds it took, is the main rank's."""

    prompts: list[list[int]]
    answer: Future | None


class Threads:
    """Run calls in a number of threads, in the order of submission. A program exits without waiting for them, unlike those of
    concurrent.futures."""

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
            except BaseException as error:  # for whoever waits for it
                result.set_exception(error)
            del result, call, arguments  # or the answer would stay until the next call


class GenerationAhead:
    """Mixed into GRPOTrainer with TimedStep, before both: reads rows ahead of the step that trains on them, and asks a generation server
    for their completions."""

    ahead = 1
    _source: Iterator | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._batches: deque[Any] = deque()  # those of this step that are still to train on, then those after it
        self._in_step = 0  # micro-batches of this step that are done: the last step of an epoch may have fewer than the others
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> Any:
        """The parent's, over an iterator that is read ahead."""
        if epoch_iterator is not self._source:
            self._source = epoch_iterator
            self._batches.clear()
        self._in_step = 0
        missing = num_batches + self.ahead * self._cycle() - len(self._batches)
        self._batches.extend(islice(epoch_iterator, max(0, missing)))
        return super().get_batch_samples(iter(list(islice(self._batches, num_batches))), num_batches, device)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        prepared = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._batches.popleft()
            self._in_step += 1
        return prepared

    def _cycle(self) -> int:
        """Micro-batches from one generation to the next."""
        return self.args.steps_per_generation * self.num_iterations

    def _upcoming(self, cycles: int) -> list[dict[str, Any]] | None:
        """This rank's rows of so many generations later; None where the epoch or the run ends before."""
        steps = (self._in_step + cycles * self._cycle()) // self.args.gradient_accumulation_steps
        if self.state.global_step + steps >= self.state.max_steps:
            return None
        return next(islice(self._batches, cycles * self._cycle(), None), None)

    def _send_weights(self) -> None:
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def _ask(self, prompts: list[list[int]], num_generations: int, **arguments: Any) -> dict[str, list]:
        """The server's completions of each prompt, and the log-probabilities of their tokens."""
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
    """topology.overlap=true."""

    _under_way: UnderWay | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threads = Threads(1)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: Any, num_generations: int, **kwargs: Any
    ) -> tuple[list, list]:
        if not self.model.training:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        if self._under_way is None or self._under_way.prompts != self._of_all_ranks(prompt_ids):
            self._send_weights()  # the first batch, or the first of an epoch: there is nothing to overlap with
            self._under_way = self._send(prompt_ids, num_generations)
        completion_ids, logprobs = self._receive(self._under_way, len(prompt_ids))
        self._send_weights()
        upcoming = self._upcoming(1)
        self._under_way = None
        if upcoming is not None:
            self._under_way = self._send(self._tokenize_prompts([row["prompt"] for row in upcoming])[0], num_generations)
        return completion_ids, logprobs

    def _of_all_ranks(self, prompt_ids: list) -> list:
        with self.timed("wait"):
            return gather_object(prompt_ids)

    def _send(self, prompt_ids: list, num_generations: int) -> UnderWay:
        prompts = self._of_all_ranks(prompt_ids)
        if not self.accelerator.is_main_process:
            return UnderWay(prompts, None)
        # The rows of a group stand together and are the same.
        return UnderWay(prompts, self._threads.submit(_timed, self._ask, prompts[::num_generations], num_generations))

    def _receive(self, under_way: UnderWay, mine: int) -> tuple[list, list]:
        """This rank's completions, and the log-probability of each of their tokens."""
        with self.timed("wait"):
            answer, server_s = under_way.answer.result() if under_way.answer else ({}, 0.0)
            shared = [(answer.get("completion_ids"), answer.get("logprobs"))]
            broadcast_object_list(shared, from_process=0)
        completion_ids, logprobs = shared[0]
        self.stopwatch.add("server", server_s)
        own = slice(self.accelerator.process_index * mine, (self.accelerator.process_index + 1) * mine)
        return completion_ids[own], [[token[0] for token in sequence] for sequence in logprobs[own]]


def _timed(call: Callable, *arguments: Any) -> tuple[Any, float]:
    """Its result, and the seconds it took."""
    began = time.monotonic()
    return call(*arguments), time.monotonic() - began
