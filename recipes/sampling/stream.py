"""Generate continuously: train on groups of completions as they finish.

Besides the generation that the step waits for, half as many are in flight as the bound on staleness
allows; the other half leaves room for long completions. A step takes finished groups in the order
of sending, and new prompts are sent at once. Weights arrive between two decoding steps: vLLM
freezes its requests (`/pause?mode=keep`), loads the weights and resumes. Running requests keep the
keys and values of the previous weights, as in PipelineRL (arXiv:2509.19128). Each token keeps the
log-probability at which it was sampled, so TRL's importance-sampling correction reweights it.
Prompts share keys and values only with prompts sent under the same weights (vLLM's `cache_salt`).

Staleness is the number of optimizer steps from the weights under which a group was sent to the
first step that trains on it. No group exceeds `topology.max_staleness`: a step waits if later steps
could not use the remaining groups in time. So no completion is dropped for its age; that would
favour short completions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from launch.core.errors import UserError
from recipes.rank.program import say
from recipes.sampling.overlap import GenerationAhead, Threads

THREADS = 64  # concurrent requests, as many as TRL's client has connections


@dataclass(eq=False)
class Group:
    """Hold a row, the optimizer step after which it was sent, and its prompt's completions."""

    row: dict[str, Any]
    step: int
    answer: Future


class Stream:
    """Hold groups in flight, in the order of sending. `submit` requests a row's completions."""

    def __init__(self, submit: Callable[[dict[str, Any]], Future]) -> None:
        self._submit = submit
        self.groups: list[Group] = []

    def send(self, rows: list[dict[str, Any]], step: int) -> None:
        self.groups += [Group(row, step, self._submit(row)) for row in rows]

    def take(self, count: int, later: Callable[[int], int]) -> list[Group]:
        """Wait for `count` finished groups, and remove and return the oldest.

        `later` maps the step of a group to the number of later calls, of `count` each, that may
        still take it. If they could not take all remaining groups, wait for another group. Raises
        the error of an answer.
        """
        while True:
            whole = [group for group in self.groups if group.answer.done()][:count]
            remaining = [group for group in self.groups if group not in whole]
            if len(whole) == count and all(
                place < count * later(group.step) for place, group in enumerate(remaining)
            ):
                break
            unfinished = [group.answer for group in remaining if not group.answer.done()]
            assert unfinished, f"steps of {count} cannot consume all groups in flight in time"
            wait(unfinished, return_when=FIRST_COMPLETED)
        for group in whole:
            group.answer.result()
        self.groups = remaining
        return whole


def check_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Raise UserError if a column of `rows` cannot be saved as JSON in a checkpoint."""
    for column, value in next(iter(rows)).items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(
                "topology.overlap=stream: a checkpoint keeps rows in flight as JSON, but column "
                f"{column!r} cannot be ({error}). Use topology.overlap=true, or data without that "
                "column."
            ) from error


class StreamState(TrainerCallback, ExportableState):
    """Save rows in flight in checkpoints. A resumed run sends them again, under its own weights."""

    def __init__(self, trainer: StreamedGeneration) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        # As text, because the state file sorts keys, and a chat template may depend on their order.
        return {
            "args": {},
            "attributes": {"rows": json.dumps([group.row for group in self.trainer.stream.groups])},
        }

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved:
            self.trainer.unfinished = json.loads(saved["attributes"]["rows"])


class StreamedGeneration(GenerationAhead):
    """Implement topology.overlap=stream."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        per_step, cycle = self.args.gradient_accumulation_steps, self._cycle()  # micro-batches
        # Two generations by default.
        self.max_staleness = config.topology.max_staleness or -(-2 * cycle // per_step)
        self.ahead = max(1, self.max_staleness * per_step // cycle // 2)
        threads = Threads(THREADS)
        self.stream = Stream(lambda row: threads.submit(self._answer, row))
        self.unfinished: list[dict[str, Any]] = []  # rows that a resumed run must send again
        self._sent = 0  # number of generations whose rows are in flight, including this one
        self.add_callback(StreamState(self))
        check_rows(self.train_dataset)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the parent's batch for finished groups in place of `inputs`."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        count = len(inputs) * self.accelerator.num_processes // self.num_generations
        self._send_weights()
        with self.timed("wait"):
            self._send_rows(count)
            groups = self._take(count)
        self._sent -= 1
        ages = [self.state.global_step - step for _, step, _ in groups]
        self._metrics["train"]["staleness/mean"].append(sum(ages) / len(ages))
        oldest = self._metrics["train"]["staleness/max"]  # TRL logs the mean of a list
        oldest[:] = [max([*oldest, *ages])]
        rows = [row for row, _, _ in groups for _ in range(self.num_generations)]
        first = self.accelerator.process_index * len(inputs)
        own = slice(first, first + len(inputs))
        self._completions = [completion for _, _, answer in groups for completion in answer][own]
        return super()._generate_and_score_completions(rows[own])

    def _generate_single_turn(
        self, prompt_ids: list, *args: Any, **kwargs: Any
    ) -> tuple[list, list]:
        if not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completion_ids, logprobs = zip(*self._completions, strict=True)
        return list(completion_ids), list(logprobs)

    def _sync(self) -> None:
        """Send weights as the parent does, while the server holds its requests."""
        client = self.vllm_generation.vllm_client if self.accelerator.is_main_process else None
        if client:
            client._post(
                f"{client.base_url}/pause", params={"mode": "keep", "clear_cache": "false"}
            )
        super()._sync()
        if client:
            client._post(f"{client.base_url}/resume")

    def _send_rows(self, count: int) -> None:
        """Send rows until `ahead` generations of `count` groups are in flight besides this one."""
        if self.unfinished:
            if self.accelerator.is_main_process:
                say(f"resending {len(self.unfinished)} prompts that were in flight")
                self.stream.send(self.unfinished, self.state.global_step)
            self._sent, self.unfinished = len(self.unfinished) // count, []
        while self._sent <= self.ahead and (rows := self._upcoming(self._sent)) is not None:
            # The rows of a group are adjacent and equal.
            rows = gather_object(rows)[:: self.num_generations]
            if self.accelerator.is_main_process:
                self.stream.send(rows, self.state.global_step)
            self._sent += 1

    def _take(self, count: int) -> list[tuple[dict[str, Any], int, list]]:
        """Return (row, step of sending, completions with log-probabilities) of `count` groups."""
        answers: list[Any] = [None]
        if self.accelerator.is_main_process:
            groups = self.stream.take(count, self._later)
            answers = [[(group.row, group.step, group.answer.result()) for group in groups]]
        broadcast_object_list(answers, from_process=0)
        return answers[0]

    def _later(self, step: int) -> int:
        """Return the number of later generations that may train on a group sent after `step`."""
        per_step = self.args.gradient_accumulation_steps
        steps = step + self.max_staleness - self.state.global_step
        return ((steps + 1) * per_step - 1 - self._in_step) // self._cycle()

    def _answer(self, row: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
        (prompt,) = self._tokenize_prompts([row["prompt"]])[0]
        answer = self._ask([prompt], self.num_generations, cache_salt=f"step {self._loaded_step()}")
        logprobs = [[token[0] for token in sequence] for sequence in answer["logprobs"]]
        return list(zip(answer["completion_ids"], logprobs, strict=True))
