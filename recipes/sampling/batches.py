"""Sample many prompts and judge each sample, in batches that ranks share.

method=sample and method=evaluate share this. A batch is a file of samples,
`samples/<hash>/<batch>.jsonl`, and one of verdicts, `verdicts/<hash>/<batch>.jsonl`, each complete
or absent. Equal work has an equal hash (recipes/sampling/sample_keys.py), so only batches of the
same work are reused. Each batch has its own seed, and ranks take batches in turn. So the number of
ranks does not affect samples, even if it changes between a killed run and its resumption.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from launch.core.json_files import read_metrics, write_json, write_text
from recipes.data.data_load import Row
from recipes.data.data_select import fields
from recipes.measure import profiling
from recipes.measure.metrics import progress_line
from recipes.rank import ranks
from recipes.rank.device import memory_peak_gb
from recipes.rank.files import append, json_sha256
from recipes.rank.program import Interrupted, is_main_rank, say, stop_requested
from recipes.rewards.verifier import Verifier
from recipes.sampling.generation import Generator, build_generator
from recipes.sampling.sample_keys import model_identity, samples_key, verdicts_key
from recipes.sampling.samples import is_correct
from recipes.training.checkpoint import HEARTBEAT


def sample_all(
    config: DictConfig,
    args: Any,
    rows: list[Row],
    verifier: Verifier,
    log: Log,
    reuse: str | None = None,
) -> tuple[list[Row], Generator | None]:
    """Return every sample with its verdict, in order, and the generator if one was needed.

    Only the main rank gets samples. Batches of the run or pipeline `reuse` with the same hash are
    reused. Raises UserError, and Interrupted on every rank if a signal reached one of them.
    """
    sampled, judged = stores(config, args, rows, reuse)
    numbers = range(math.ceil(len(rows) / args.batch_size))
    own_batches = ranks.rank_share(len(numbers))
    log.begin(len(own_batches))
    if args.engine == "vllm":
        os.environ.update(ranks.single_gpu_env(os.environ))
    # If all batches exist, load no model.
    missing = any(not sampled.has(number) for number in own_batches)
    generator = build_generator(config, args) if missing else None
    done = 0
    model = getattr(generator, "model", None)
    with profiling.session(config, len(own_batches), model=model) as profile:
        for number in own_batches:
            if stop_requested():
                break
            one_batch(rows, number, args, generator, verifier, sampled, judged, log)
            profile.step()
            done += 1
    if not ranks.all_ranks(done == len(own_batches)):
        say(f"interrupted after {done} of {len(own_batches)} batches; the same command resumes")
        raise Interrupted(batches=done)
    if not is_main_rank():
        return [], generator
    batches = [
        [{**s, **v} for s, v in zip(sampled.finished(n), judged.finished(n), strict=True)]
        for n in numbers
    ]
    log.of_all_ranks(batches)
    return list(chain.from_iterable(batches)), generator


def stores(
    config: DictConfig, args: Any, rows: list[Row], reuse: str | None = None
) -> tuple[Store, Store]:
    """Return the stores of samples and of verdicts. The main rank hashes the model for all."""
    model = ranks.broadcast(model_identity(config) if is_main_rank() else None)
    samples = samples_key(config, args, rows, model)
    opened = []
    for name, key in (("samples", samples), ("verdicts", verdicts_key(config, samples))):
        hashed, other = json_sha256(key), None
        folder = Path(config.run_dir) / name / hashed
        if is_main_rank():
            write_json(folder / "key.json", key)
        if reuse:  # a run, or a pipeline with a run in each phase
            runs = (Path(reuse) / name / hashed, *sorted(Path(reuse).glob(f"*/{name}/{hashed}")))
            other = next((run for run in runs if run.exists()), None)
            say(f"reuse={reuse}: {name} of this work {'found' if other else 'not found, so made'}")
        opened.append(Store(folder, other))
    return opened[0], opened[1]


def one_batch(
    rows: list[Row],
    number: int,
    args: Any,
    generator: Generator | None,
    verifier: Verifier,
    sampled: Store,
    judged: Store,
    log: Log,
) -> None:
    """Sample and judge batch `number` unless done; `generator` is None if all are sampled."""
    first = number * args.batch_size
    numbers = range(first, min(first + args.batch_size, len(rows)))
    places = [(prompt, n) for prompt in numbers for n in range(args.samples_per_prompt)]
    prompts = [rows[prompt]["prompt"] for prompt, _ in places]
    began = time.monotonic()
    samples, verdicts = sampled.get(number), judged.get(number)
    existed = samples is not None and verdicts is not None
    if samples is None:
        assert generator is not None
        generated = generator(prompts, sampled.seed_of(number))
        samples = [
            {"prompt_index": prompt, "sample_index": n, **asdict(sample)}
            for (prompt, n), sample in zip(places, generated, strict=True)
        ]
        sampled.put(number, samples)
    log.heartbeat.touch()
    generated_at = time.monotonic()
    if verdicts is None:
        names = [name for name in fields(rows) if name != "prompt"]
        columns = {name: [rows[prompt].get(name) for prompt, _ in places] for name in names}
        # A prompt that fills the model's context has no completion, so its score is 0.
        judgements = verifier(prompts, [sample["text"] for sample in samples], columns)
        verdicts = [
            {**asdict(verdict), "score": verdict.score if sample["num_tokens"] else 0.0}
            for verdict, sample in zip(judgements, samples, strict=True)
        ]
        judged.put(number, verdicts)
    judged_samples = [{**s, **v} for s, v in zip(samples, verdicts, strict=True)]
    seconds = (generated_at - began, time.monotonic() - generated_at)
    log.batch(number, judged_samples, existed, *seconds)


class Log:
    """Write a line of metrics.jsonl for each batch of the main rank, also after an interruption.

    Ranks do not wait for one another, so until all are done the figures cover only the main rank's
    batches; times always do.
    """

    def __init__(self, run_dir: Path, rate: str) -> None:
        """Create a log; `rate` is the key for the share of correct samples so far."""
        self.path, self.heartbeat = run_dir / "metrics.jsonl", run_dir / HEARTBEAT
        self.rate = rate
        self.step = self.num_steps = self.num_samples = self.num_correct = 0
        self.seconds = {"generation_s": 0.0, "verification_s": 0.0}
        self.before: dict[int, Row] = {}

    def begin(self, num_steps: int) -> None:
        """Start before the first of `num_steps` batches of this rank."""
        self.num_steps = num_steps
        if is_main_rank():
            self.before = {row["step"]: row for row in read_metrics(self.path)}
            self.path.unlink(missing_ok=True)

    def batch(
        self,
        number: int,
        samples: list[Row],
        existed: bool,
        generation_s: float,
        verification_s: float,
    ) -> None:
        """Log `samples` with their verdicts. `existed`: they were timed in an earlier attempt."""
        self.heartbeat.touch()  # progress of any rank counts for the run
        if not is_main_rank():
            return
        self.step += 1
        tokens = sum(s["num_tokens"] for s in samples)
        self.num_samples += len(samples)
        self.num_correct += sum(map(is_correct, samples))
        line = {
            "step": self.step,
            "num_steps": self.num_steps,
            "time_s": sum(self.seconds.values()) + generation_s + verification_s,
            self.rate: self.num_correct / self.num_samples,
            **_figures(samples),
            "tokens_per_second": None if existed else tokens / generation_s,
            "memory_peak_gb": memory_peak_gb(),
            "generation_s": self.seconds["generation_s"] + generation_s,
            "verification_s": self.seconds["verification_s"] + verification_s,
            "batch": number,
        }
        before = self.before.get(self.step, {}) if existed else {}
        # If the number of ranks was different, the main rank had different batches.
        if before.get("batch") == number:
            line = {**before, "num_steps": self.num_steps}
        self.seconds = {name: line[name] for name in self.seconds}
        append(self.path, line)
        say(progress_line(line, line["time_s"] / self.step))

    def of_all_ranks(self, batches: list[list[Row]]) -> None:
        """Rewrite the lines so that each covers the batches that all ranks took in that turn."""
        lines = read_metrics(self.path)
        each = ranks.num_ranks()
        num_samples = num_correct = 0
        for turn, line in enumerate(lines):
            samples = list(chain.from_iterable(batches[turn * each : (turn + 1) * each]))
            num_samples += len(samples)
            num_correct += sum(map(is_correct, samples))
            line |= {self.rate: num_correct / num_samples, **_figures(samples)}
        write_rows(self.path, lines)

    def times(self) -> dict[str, float]:
        """Return the times of the main rank's batches, including those before an interruption."""
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
    """Hold finished batches of one hash, and those of another run with the same hash."""

    def __init__(self, folder: Path, other: Path | None = None) -> None:
        self.folder, self.other = folder, other

    def seed_of(self, batch: int) -> int:
        """Return a batch's seed, from 0 to 2**31 - 1, from the hash and the batch's number."""
        digest = hashlib.sha256(f"{self.folder.name}/{batch}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def get(self, batch: int) -> list[Row] | None:
        """Return the rows of a finished batch, or None. Copy another run's batch into this run."""
        path = self._path(batch)
        if not path.is_file():
            return None
        # Not splitlines, since texts may contain other line separators.
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if path.parent != self.folder:
            self.put(batch, rows)
        return rows

    def has(self, batch: int) -> bool:
        return self._path(batch).is_file()

    def finished(self, batch: int) -> list[Row]:
        """Return a batch that some rank has finished. Raises UserError if it is not visible."""
        rows = self.get(batch)
        if rows is None:
            raise UserError(
                f"batch {batch} is done, but missing in {self.folder}. All ranks need a shared "
                "file system. Use: run_root=<shared directory>."
            )
        return rows

    def put(self, batch: int, rows: Iterable[Row]) -> None:
        write_rows(self.folder / f"{batch:06d}.jsonl", rows)

    def _path(self, batch: int) -> Path:
        own = self.folder / f"{batch:06d}.jsonl"
        other = (self.other or self.folder) / own.name
        return other if other.is_file() and not own.is_file() else own


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one line per row; the file is complete or absent, even after a power failure."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text(path, "".join(lines))
