"""Sample prompts and score the samples in batches, for method=sample and method=evaluate.

The ranks divide the batches among themselves. Each batch has a file of samples,
`samples/<hash>/<batch>.jsonl`, and a file of verdicts, `verdicts/<hash>/<batch>.jsonl`. These files
are complete or absent. The hash covers all inputs (recipes/sampling/sample_keys.py), so a resumed
run reuses only batches with equal inputs. Each batch has its own seed, so samples do not depend on
the number of ranks, even if it changes when a run resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from launch.core.json_files import read_metrics, write_json, write_text
from recipes.data.data_load import Row
from recipes.data.data_locate import Located
from recipes.data.data_select import fields
from recipes.measure import profiling
from recipes.measure.metrics import progress_line
from recipes.rank import ranks
from recipes.rank.device import memory_peak_gb
from recipes.rank.files import append, json_sha256
from recipes.rank.program import Interrupted, is_main_rank, say, stop_requested
from recipes.rewards.verifier import Verifier
from recipes.sampling.generation import SampleGenerator, build_generator
from recipes.sampling.sample_keys import model_identity, samples_key, verdicts_key
from recipes.sampling.samples import completion, is_correct
from recipes.training.checkpoint import HEARTBEAT


def sample_all(
    config: DictConfig,
    args: Any,
    rows: list[Row],
    verifier: Verifier,
    log: Log,
    reuse: str | None = None,
) -> tuple[list[Row], SampleGenerator | None]:
    """Return all samples with their verdicts, in order, and the generator if one was needed.

    Only the main rank gets samples. Batches with the same hash in the run or pipeline `reuse` are
    reused. Raises UserError. After a signal to any rank, all ranks raise Interrupted.
    """
    sample_store, verdict_store = open_stores(config, args, rows, reuse)
    numbers = range(math.ceil(len(rows) / args.batch_size))
    own_batches = ranks.rank_share(len(numbers))
    log.begin(len(own_batches))
    if args.engine == "vllm":
        os.environ.update(ranks.single_gpu_env(os.environ))
    # If all batches exist, do not load the model.
    incomplete = any(not sample_store.has(number) for number in own_batches)
    generator = build_generator(config, args) if incomplete else None
    if generator is not None:  # fail before completions are generated
        own = (rows[n * args.batch_size : (n + 1) * args.batch_size] for n in own_batches)
        prompts = [row["prompt"] for row in chain.from_iterable(own)]
        conversations = [prompt for prompt in prompts if isinstance(prompt, list)]
        Located(generator.render, config.data, "grpo")(conversations)
    done = 0
    model = getattr(generator, "model", None)
    with profiling.session(config, len(own_batches), model=model) as profile:
        for number in own_batches:
            if stop_requested():
                break
            run_batch(rows, number, args, generator, verifier, sample_store, verdict_store, log)
            profile.step()
            done += 1
    if not ranks.all_ranks(done == len(own_batches)):
        say(
            f"interrupted after {done} of {len(own_batches)} batches. To resume, repeat the command"
        )
        raise Interrupted(batches=done)
    if not is_main_rank():
        return [], generator
    batches = [
        [
            {**sample, **verdict}
            for sample, verdict in zip(
                sample_store.finished(n), verdict_store.finished(n), strict=True
            )
        ]
        for n in numbers
    ]
    log.include_all_ranks(batches)
    return list(chain.from_iterable(batches)), generator


def open_stores(
    config: DictConfig, args: Any, rows: list[Row], reuse: str | None = None
) -> tuple[Store, Store]:
    """Return the stores of samples and of verdicts."""
    # Hashing the model takes long, so only the main rank does it.
    model = ranks.broadcast(model_identity(config) if is_main_rank() else None)
    samples = samples_key(config, args, rows, model)
    stores = []
    for name, key in (("samples", samples), ("verdicts", verdicts_key(config, samples))):
        digest, other = json_sha256(key), None
        folder = Path(config.run_dir) / name / digest
        if is_main_rank():
            write_json(folder / "key.json", key)
        if reuse:  # a run, or a pipeline with a run in each phase
            runs = (Path(reuse) / name / digest, *sorted(Path(reuse).glob(f"*/{name}/{digest}")))
            other = next((run for run in runs if run.exists()), None)
            say(f"reuse={reuse}: {'reusing' if other else 'no'} {name} with the same inputs")
        stores.append(Store(folder, other))
    return stores[0], stores[1]


def run_batch(
    rows: list[Row],
    number: int,
    args: Any,
    generator: SampleGenerator | None,
    verifier: Verifier,
    sample_store: Store,
    verdict_store: Store,
    log: Log,
) -> None:
    """Sample and score batch `number`, or read its files; `generator` is None if all exist."""
    first = number * args.batch_size
    numbers = range(first, min(first + args.batch_size, len(rows)))
    indices = [(prompt, n) for prompt in numbers for n in range(args.samples_per_prompt)]
    prompts = [rows[prompt]["prompt"] for prompt, _ in indices]
    began = time.monotonic()
    samples, verdicts = sample_store.get(number), verdict_store.get(number)
    reused = samples is not None and verdicts is not None
    if samples is None:
        assert generator is not None
        generated = generator(prompts, sample_store.seed_of(number))
        samples = [
            {"prompt_index": prompt, "sample_index": n, **asdict(sample)}
            for (prompt, n), sample in zip(indices, generated, strict=True)
        ]
        sample_store.put(number, samples)
    log.heartbeat.touch()
    generated_at = time.monotonic()
    if verdicts is None:
        names = [name for name in fields(rows) if name != "prompt"]
        columns = {name: [rows[prompt].get(name) for prompt, _ in indices] for name in names}
        # If the prompt fills the model's context, there is no completion, and the score is 0.
        completions = list(map(completion, prompts, (sample["text"] for sample in samples)))
        results = verifier(prompts, completions, columns)
        verdicts = [
            {**asdict(verdict), "score": verdict.score if sample["num_tokens"] else 0.0}
            for verdict, sample in zip(results, samples, strict=True)
        ]
        verdict_store.put(number, verdicts)
    scored = [{**sample, **verdict} for sample, verdict in zip(samples, verdicts, strict=True)]
    seconds = (generated_at - began, time.monotonic() - generated_at)
    log.batch(number, scored, reused, *seconds)


class Log:
    """Write a line of metrics.jsonl for each batch of the main rank.

    At the end, `include_all_ranks` replaces the figures by all ranks' figures. Times are
    always the main rank's.
    """

    def __init__(
        self, run_dir: Path, rate: str, value: Callable[[Row], float] = is_correct
    ) -> None:
        """Create a log. `rate` is the key for the mean `value` of the samples so far."""
        self.path, self.heartbeat = run_dir / "metrics.jsonl", run_dir / HEARTBEAT
        self.rate, self.value = rate, value
        self.step = self.num_steps = self.num_samples = 0
        self.sum = 0.0
        self.seconds = {"generation_s": 0.0, "verification_s": 0.0}
        self.earlier_lines: dict[int, Row] = {}  # of an interrupted attempt, by step

    def begin(self, num_steps: int) -> None:
        """Start a new metrics.jsonl, for `num_steps` batches of this rank."""
        self.num_steps = num_steps
        if is_main_rank():
            self.earlier_lines = {row["step"]: row for row in read_metrics(self.path)}
            self.path.unlink(missing_ok=True)

    def batch(
        self,
        number: int,
        samples: list[Row],
        reused: bool,
        generation_s: float,
        verification_s: float,
    ) -> None:
        """Log samples with their verdicts. If `reused`, repeat the line of that attempt."""
        self.heartbeat.touch()  # the run is alive while any rank makes progress
        if not is_main_rank():
            return
        self.step += 1
        tokens = sum(s["num_tokens"] for s in samples)
        self.num_samples += len(samples)
        self.sum += sum(map(self.value, samples))
        line = {
            "step": self.step,
            "num_steps": self.num_steps,
            "time_s": sum(self.seconds.values()) + generation_s + verification_s,
            self.rate: self.sum / self.num_samples,
            **_figures(samples),
            "tokens_per_second": None if reused else tokens / generation_s,
            "memory_peak_gb": memory_peak_gb(),
            "generation_s": self.seconds["generation_s"] + generation_s,
            "verification_s": self.seconds["verification_s"] + verification_s,
            "batch": number,
        }
        earlier = self.earlier_lines.get(self.step, {}) if reused else {}
        # With another number of ranks, the main rank had other batches.
        if earlier.get("batch") == number:
            line = {**earlier, "num_steps": self.num_steps}
        self.seconds = {name: line[name] for name in self.seconds}
        append(self.path, line)
        say(progress_line(line, line["time_s"] / self.step))

    def include_all_ranks(self, batches: list[list[Row]]) -> None:
        """Rewrite the lines of metrics.jsonl, so that line n covers each rank's n-th batch."""
        lines = read_metrics(self.path)
        num_ranks = ranks.num_ranks()
        num_samples, total = 0, 0.0
        for n, line in enumerate(lines):
            samples = list(chain.from_iterable(batches[n * num_ranks : (n + 1) * num_ranks]))
            num_samples += len(samples)
            total += sum(map(self.value, samples))
            line |= {self.rate: total / num_samples, **_figures(samples)}
        write_rows(self.path, lines)

    def times(self) -> dict[str, float]:
        """Return the times of the main rank's batches, including an interrupted attempt's."""
        generation_s, verification_s = self.seconds.values()
        return {
            "generation_hours": generation_s / 3600,
            "verification_hours": verification_s / 3600,
            "sample_s": generation_s / max(1, self.num_samples),
        }


def _figures(samples: list[Row]) -> dict[str, float]:
    return {
        "score": math.fsum(s["score"] for s in samples) / len(samples),
        "completion_tokens": sum(s["num_tokens"] for s in samples) / len(samples),
        "unfinished": sum(not s["finished"] for s in samples),
        "errors": sum(s["error"] is not None for s in samples),
    }


class Store:
    """Read and write the files of one hash's batches; also read another run's."""

    def __init__(self, folder: Path, other: Path | None = None) -> None:
        self.folder, self.other = folder, other

    def seed_of(self, batch: int) -> int:
        """Return a seed from 0 to 2**31 - 1 that depends on the hash and the batch's number."""
        digest = hashlib.sha256(f"{self.folder.name}/{batch}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def get(self, batch: int) -> list[Row] | None:
        """Return the rows of a batch, or None without a whole file. Copy another run's file."""
        path = self._path(batch)
        if not path.is_file():
            return None
        try:
            # splitlines() would also split at other separators, which texts may contain.
            lines = path.read_text(encoding="utf-8").split("\n")
            rows = [dict(json.loads(line)) for line in lines if line]
        except (ValueError, TypeError) as error:
            say(f"{path} is damaged ({error}), so its batch is repeated")
            return None
        if path.parent != self.folder:
            self.put(batch, rows)
        return rows

    def has(self, batch: int) -> bool:
        return self.get(batch) is not None

    def finished(self, batch: int) -> list[Row]:
        """Return a batch that some rank has finished. Raises UserError if its file is missing."""
        rows = self.get(batch)
        if rows is None:
            raise UserError(
                f"run_root: batch {batch} of another rank is missing in {self.folder}. Use "
                "run_root=<directory that all nodes share>."
            )
        return rows

    def put(self, batch: int, rows: Iterable[Row]) -> None:
        write_rows(self.folder / f"{batch:06d}.jsonl", rows)

    def _path(self, batch: int) -> Path:
        path = self.folder / f"{batch:06d}.jsonl"
        other = (self.other or self.folder) / path.name
        return other if other.is_file() and not path.is_file() else path


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines, atomically."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text(path, "".join(lines))
