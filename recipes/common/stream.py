"""Generation that never stops: groups of completions are trained on as they become whole, while the server works on the next ones.

Besides the generation that is waited for, half as many are in flight as the bound on staleness allows; the other half leaves room for long
completions. A step takes the groups that are whole, in the order in which they were sent, and new prompts follow at once. New weights
arrive between two decoding steps: vLLM freezes its requests (`/pause?mode=keep`), takes the weights and resumes. Running requests keep the
keys and values of the previous weights, as in PipelineRL (arXiv:2509.19128). Each token keeps the log-probability that it was sampled with,
so TRL's importance-sampling correction reweights it by how far it is off-policy. Prompts share their keys and values only with others that
were sent under the same weights (vLLM's `cache_salt`).

Staleness is the number of optimizer steps between the weights that a group was sent under, those of its first token, and the first
step that trains on it. No group gets older than `topology.max_staleness`: a step waits rather than leave behind more ageing groups than
later steps can still take in time. So no completion is dropped for its age; to drop what takes long would teach the model to be brief.
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

from recipes.common.errors import UserError
from recipes.common.overlap import GenerationAhead, Threads
from recipes.common.program import say

THREADS = 64  # requests at once, a group each; as many as TRL's client keeps connections


@dataclass(eq=False)
class Group:
    """A row, the optimizer step after which it was sent, and the completions of its prompt."""

    row: dict[str, Any]
    step: int
    answer: Future


class Stream:
    """Groups in flight, in the order in which they were sent. `submit` has a row answered."""

    def __init__(self, submit: Callable[[dict[str, Any]], Future]) -> None:
        self._submit = submit
        self.groups: list[Group] = []

    def send(self, rows: list[dict[str, Any]], step: int) -> None:
        self.groups += [Group(row, step, self._submit(row)) for row in rows]

    def take(self, count: int, later: Callable[[int], int]) -> list[Group]:
        """Wait for `count` whole groups, and take the oldest. `later` maps the step of a group to the number of later calls, of `count`
        each, that may take it: where those could not take all that would be left, wait for another group.

        Raises the error of an answer.
        """
        while True:
            whole = [group for group in self.groups if group.answer.done()][:count]
            left = [group for group in self.groups if group not in whole]
            if len(whole) == count and all(place < count * later(group.step) for place, group in enumerate(left)):
                break
            unfinished = [group.answer for group in left if not group.answer.done()]
            if not unfinished:
                raise RuntimeError(f"{len(self.groups)} groups in flight are whole, and steps of {count} cannot take all of them in time")
            wait(unfinished, return_when=FIRST_COMPLETED)
        for group in whole:
            group.answer.result()
        self.groups = left
        return whole


def check_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Raises UserError where a column of `rows` cannot be written as JSON, as a checkpoint has those in flight."""
    for column, value in next(iter(rows)).items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(
                f"topology.overlap=stream: a checkpoint keeps the rows in flight as JSON, which column {column!r} cannot be ({error}). "
                "Use topology.overlap=true, or data without that column."
            ) from error


class StreamState(TrainerCallback, ExportableState):
    """Keeps the rows in flight in the trainer's state, and so in every checkpoint: a resumed run sends them again, under its weights."""

    def __init__(self, trainer: StreamedGeneration) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        # As text, since the state's file has its keys sorted, and a chat template may write those of a row in their order.
        return {"args": {}, "attributes": {"rows": json.dumps([group.row for group in self.trainer.stream.groups])}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved:
            self.trainer.unfinished = json.loads(saved["attributes"]["rows"])


class StreamedGeneration(GenerationAhead):
    """topology.overlap=stream."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        per_step, cycle = self.args.gradient_accumulation_steps, self._cycle()  # micro-batches
        self.max_staleness = config.topology.max_staleness or -(-2 * cycle // per_step)  # two generations
        self.ahead = max(1, self.max_staleness * per_step // cycle // 2)
        threads = Threads(THREADS)
        self.stream = Stream(lambda row: threads.submit(self._answer, row))
        self.unfinished: list[dict[str, Any]] = []  # rows that a resumed run had in flight
        self._sent = 0  # generations from this one on whose rows are in flight
        self.add_callback(StreamState(self))
        check_rows(self.train_dataset)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The parent's, of the groups that are whole in place of those of `inputs`."""
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
        oldest = self._metrics["train"]["staleness/max"]  # TRL logs the mean of such a list
        oldest[:] = [max([*oldest, *ages])]
        rows = [row for row, _, _ in groups for _ in range(self.num_generations)]
        own = slice(self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs))
        self._completions = [completion for _, _, answer in groups for completion in answer][own]
        return super()._generate_and_score_completions(rows[own])

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple[list, list]:
        if not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completion_ids, logprobs = zip(*self._completions, strict=True)
        return list(completion_ids), list(logprobs)

    def _send_weights(self) -> None:
        """The parent's, while the server holds its requests."""
        if self.state.global_step == self._last_loaded_step:
            return
        client = self.vllm_generation.vllm_client if self.accelerator.is_main_process else None
        with self.timed("sync"):
            if client:
                client._post(f"{client.base_url}/pause", params={"mode": "keep", "clear_cache": "false"})
            super()._send_weights()
            if client:
                client._post(f"{client.base_url}/resume")

    def _send_rows(self, count: int) -> None:
        """Have `ahead` generations of `count` groups in flight beside the one that is needed."""
        if self.unfinished:
            if self.accelerator.is_main_process:
                say(f"{len(self.unfinished)} prompts were in flight when the run was stopped: they are sent again")
                self.stream.send(self.unfinished, self.state.global_step)
            self._sent, self.unfinished = len(self.unfinished) // count, []
        while self._sent <= self.ahead and (rows := self._upcoming(self._sent)) is not None:
            rows = gather_object(rows)[:: self.num_generations]  # the rows of a group stand together and are the same
            if self.accelerator.is_main_process:
                self.stream.send(rows, self.state.global_step)
            self._sent += 1

    def _take(self, count: int) -> list[tuple[dict[str, Any], int, list]]:
        """(row, step that it was sent after, completions with their log-probabilities) of as many groups, on every rank."""
        taken: list[Any] = [None]
        if self.accelerator.is_main_process:
            taken = [[(group.row, group.step, group.answer.result()) for group in self.stream.take(count, self._later)]]
        broadcast_object_list(taken, from_process=0)
        return taken[0]

    def _later(self, step: int) -> int:
        """How many generations after this one may train on a group that was sent after `step`."""
        per_step = self.args.gradient_accumulation_steps
        left = step + self.max_staleness - self.state.global_step
        return ((left + 1) * per_step - 1 - self._in_step) // self._cycle()

    def _answer(self, row: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
        (prompt,) = self._tokenize_prompts([row["prompt"]])[0]
        answer = self._ask([prompt], self.num_generations, cache_salt=f"step {self._last_loaded_step}")
        logprobs = [[token[0] for token in sequence] for sequence in answer["logprobs"]]
        return list(zip(answer["completion_ids"], logprobs, strict=True))
