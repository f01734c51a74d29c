"""Generate continuously, and train on completions as they finish (topology.overlap=stream).

A group is the completions of one prompt. A step uses the oldest finished groups, and new prompts
are sent immediately. In addition to the current generation, half as many generations are in flight
as `topology.max_staleness` allows, rounded up, so that long completions have time to finish.

The server loads weights between two decoding steps: vLLM pauses its requests (`/pause?mode=keep`),
loads the weights and resumes. Requests continue with the keys and values of the previous weights,
as in PipelineRL (arXiv:2509.19128). Each token keeps its log-probability from sampling,
which TRL's importance-sampling correction uses. Prompts share cached keys and values only with
prompts sent under the same weights (vLLM's `cache_salt`).

A group's staleness is the number of optimizer steps between sending it and training on it. It never
exceeds `topology.max_staleness`, because a step waits if later steps could not use the remaining
groups in time. Completions are never dropped, since this would favor short ones.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import requests
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from launch.core.errors import UserError
from recipes.rank.program import say
from recipes.sampling.overlap import GenerationAhead, Threads
from recipes.sampling.serving import shared_loss

THREADS = 64  # concurrent requests; TRL's client has 64 connections


@dataclass(eq=False)
class Group:
    """A row, the optimizer step after which it was sent, and its completions."""

    row: dict[str, Any]
    step: int
    completions: Future


class Stream:
    """The groups in flight, oldest first. `submit` requests a row's completions."""

    def __init__(self, submit: Callable[[dict[str, Any]], Future]) -> None:
        self._submit = submit
        self.groups: list[Group] = []

    def send(self, rows: list[dict[str, Any]], step: int) -> None:
        self.groups += [Group(row, step, self._submit(row)) for row in rows]

    def take(self, count: int, remaining_calls: Callable[[int], int]) -> list[Group]:
        """Remove and return the `count` oldest finished groups.

        `remaining_calls` maps a group's step to the number of later calls that may take the group.
        Wait until those calls can take all groups that are left. Raises the error of a request.
        """
        while True:
            finished = [group for group in self.groups if group.completions.done()][:count]
            remaining = [group for group in self.groups if group not in finished]
            if len(finished) == count and all(
                n < count * remaining_calls(group.step) for n, group in enumerate(remaining)
            ):
                break
            unfinished = [group.completions for group in remaining if not group.completions.done()]
            assert unfinished, f"steps of {count} cannot consume all groups in flight in time"
            wait(unfinished, return_when=FIRST_COMPLETED)
        for group in finished:
            group.completions.result()
        self.groups = remaining
        return finished


def check_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Raise UserError if a column of `rows` cannot be saved as JSON in a checkpoint."""
    for column, value in next(iter(rows)).items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(
                "topology.overlap=stream: checkpoints contain rows as JSON, which does not support "
                f"the column {column!r} ({error}). Use topology.overlap=true, or data without this "
                "column."
            ) from error


class StreamState(TrainerCallback, ExportableState):
    """Save rows in flight in checkpoints, so that a resumed run can send them again."""

    def __init__(self, trainer: StreamedGeneration) -> None:
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        # A string, because the state file sorts keys, and chat templates may depend on their order.
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
        # The default is two generations.
        self.max_staleness = config.topology.max_staleness or -(-2 * cycle // per_step)
        self.ahead = max(1, (self.max_staleness * per_step // cycle + 1) // 2)
        threads = Threads(THREADS)
        self.stream = Stream(lambda row: threads.submit(self._complete, row))
        self.unfinished: list[dict[str, Any]] = []  # rows that a resumed run must send again
        self._sent = 0  # number of generations in flight, including the current one
        self.add_callback(StreamState(self))
        check_rows(self.train_dataset)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the parent's batch, for finished groups instead of `inputs`."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        count = len(inputs) * self.accelerator.num_processes // self.num_generations
        self._send_weights()
        with self.timed("wait"), shared_loss():
            self._send_rows(count)
            results: list[Any] = [None]
            if self.accelerator.is_main_process:
                groups = self.stream.take(count, self._remaining_calls)
                results = [[(g.row, g.step, g.completions.result()) for g in groups]]
            broadcast_object_list(results, from_process=0)
        (groups,) = results
        self._sent -= 1
        ages = [self.state.global_step - step for _, step, _ in groups]
        self._metrics["train"]["staleness/mean"].append(sum(ages) / len(ages))
        oldest = self._metrics["train"]["staleness/max"]
        oldest[:] = [max([*oldest, *ages])]  # one value, because TRL logs the mean
        rows = [row for row, _, _ in groups for _ in range(self.num_generations)]
        first = self.accelerator.process_index * len(inputs)
        of_rank = slice(first, first + len(inputs))
        self._completions = [c for _, _, completions in groups for c in completions][of_rank]
        return super()._generate_and_score_completions(rows[of_rank])

    def _generate_single_turn(
        self, prompt_ids: list, *args: Any, **kwargs: Any
    ) -> tuple[list, list]:
        if not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completion_ids, logprobs = zip(*self._completions, strict=True)
        return list(completion_ids), list(logprobs)

    def _sync(self) -> None:
        """Send weights as the parent class does, while the server's requests are paused."""
        self._post("pause", mode="keep", clear_cache="false")
        super()._sync()
        self._post("resume")

    def _post(self, endpoint: str, **params: str) -> None:
        """Send a request from the main rank. _complete reports a server that has ended."""
        if self.accelerator.is_main_process:
            client = self.vllm_generation.vllm_client
            with contextlib.suppress(requests.RequestException):
                client._post(f"{client.base_url}/{endpoint}", params=params)

    def _send_rows(self, count: int) -> None:
        """Send rows until `ahead` generations are in flight in addition to the current one."""
        if self.unfinished:
            if self.accelerator.is_main_process:
                say(f"sending {len(self.unfinished)} unfinished prompts again")
                self.stream.send(self.unfinished, self.state.global_step)
            self._sent, self.unfinished = len(self.unfinished) // count, []
        while self._sent <= self.ahead and (rows := self._rows_ahead(self._sent)) is not None:
            # The rows of a group are adjacent and equal.
            rows = gather_object(rows)[:: self.num_generations]
            if self.accelerator.is_main_process:
                self.stream.send(rows, self.state.global_step)
            self._sent += 1

    def _remaining_calls(self, step: int) -> int:
        """Return the number of later generations that may train on a group sent after `step`."""
        per_step = self.args.gradient_accumulation_steps
        steps = step + self.max_staleness - self.state.global_step
        return ((steps + 1) * per_step - 1 - self._in_step) // self._cycle()

    def _complete(self, row: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
        (prompt,) = self._tokenize_prompts([row["prompt"]])[0]
        salt = f"step {self._loaded_step()}"
        result = self._request([prompt], self.num_generations, cache_salt=salt)
        logprobs = [[token[0] for token in sequence] for sequence in result["logprobs"]]
        return list(zip(result["completion_ids"], logprobs, strict=True))
