"""Samples of many prompts and a verdict on each, in batches that ranks share: what method=sample and method=evaluate have in common.

A batch is a file of samples, `samples/<hash>/<batch>.jsonl`, and one of verdicts, `verdicts/<hash>/<batch>.jsonl`, each whole or not
there, so that a batch is taken again where it is the same work and never where it is not; recipes/common/sample_keys.py says what the
hashes are of. Each batch draws from a seed of its own, and ranks take batches in turn: how many ranks there are changes nothing, also not
between a run that was killed and the one that goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from recipes.common import profiling, ranks
from recipes.common.checkpoint import HEARTBEAT
from recipes.common.data import Row
from recipes.common.data_select import fields
from recipes.common.device import memory_peak_gb
from recipes.common.errors import UserError
from recipes.common.files import append, json_sha256, sync, write_json
from recipes.common.generation import Generator, Sampling, build_generator
from recipes.common.metrics import progress_line
from recipes.common.program import Interrupted, is_main_rank, say, stop_asked
from recipes.common.sample_keys import model_identity, samples_key, verdicts_key
from recipes.common.samples import is_correct
from recipes.common.verify import Verifier


class Asked(Protocol):
    """What the arguments of both methods say. `batch_size` counts prompts."""

    seed: int
    engine: str
    samples_per_prompt: int
    batch_size: int

    @property
    def sampling(self) -> Sampling: ...


def sample_all(
    config: DictConfig, args: Asked, rows: list[Row], verifier: Verifier, log: Log, reuse: str | None = None
) -> tuple[list[Row], Generator | None]:
    """Every sample of every row with its verdict, in their order, on the main rank, on others none; and the generator where one was needed.

    `reuse` is a run, or a pipeline of runs, whose batches of the same hash are taken. Raises Interrupted on every rank when a signal came
    to one of them, and UserError.
    """
    sampled, judged = stores(config, args, rows, reuse)
    numbers = range(math.ceil(len(rows) / args.batch_size))
    mine = ranks.mine(len(numbers))
    log.begin(len(mine))
    if args.engine == "vllm":
        os.environ.update(ranks.own_gpu(os.environ))
    missing = any(not sampled.has(number) for number in mine)  # no model is loaded where all batches are there
    generator = build_generator(config, args.sampling) if missing else None
    done = 0
    with profiling.session(config, len(mine), model=getattr(generator, "model", None)) as profile:
        for number in mine:
            if stop_asked():
                break
            one_batch(rows, number, args, generator, verifier, sampled, judged, log)
            profile.step()
            done += 1
    if not ranks.on_all(done == len(mine)):
        say(f"interrupted after {done} of {len(mine)} batches; the same command continues")
        raise Interrupted(batches=done)
    if not is_main_rank():
        return [], generator
    batches = [[{**s, **v} for s, v in zip(sampled.finished(n), judged.finished(n), strict=True)] for n in numbers]
    log.of_all_ranks(batches)
    return [sample for batch in batches for sample in batch], generator


def stores(config: DictConfig, args: Asked, rows: list[Row], reuse: str | None = None) -> tuple[Store, Store]:
    """Where samples and verdicts of exactly this work lie. One rank hashes the model and tells the others."""
    key = samples_key(config, args, rows, ranks.from_main(model_identity(config) if is_main_rank() else None))
    made = []
    for name, content in (("samples", key), ("verdicts", verdicts_key(config, key))):
        hashed = json_sha256(content)
        folder = Path(config.run_dir) / name / hashed
        if is_main_rank():
            write_json(folder / "key.json", content)
        reused = [found for depth in ("", "*/") for found in sorted(Path(reuse).glob(f"{depth}{name}/{hashed}"))] if reuse else []
        if reuse:
            say(f"reuse={reuse}: {name} of this work {'are there' if reused else 'are not there, and are made'}")
        made.append(Store(folder, reused[0] if reused else None))
    return made[0], made[1]


def one_batch(
    rows: list[Row],
    number: int,
    args: Asked,
    generator: Generator | None,
    verifier: Verifier,
    sampled: Store,
    judged: Store,
    log: Log,
) -> None:
    """Sample and judge a batch of `rows`, as far as that is not done. `generator` is None where all are sampled."""
    first = number * args.batch_size
    prompts = range(first, min(first + args.batch_size, len(rows)))
    each = [(rows[prompt], prompt, n) for prompt in prompts for n in range(args.samples_per_prompt)]
    began = time.monotonic()
    samples, verdicts = sampled.get(number), judged.get(number)
    there = samples is not None and verdicts is not None
    if samples is None:
        assert generator is not None
        made = generator([row["prompt"] for row, _, _ in each], sampled.seed_of(number))
        samples = [
            {"prompt_index": prompt, "sample_index": n, "text": s.text, "num_tokens": s.num_tokens, "finished": s.finished}
            for (_, prompt, n), s in zip(each, made, strict=True)
        ]
        sampled.put(number, samples)
    log.beat()
    generated = time.monotonic()
    if verdicts is None:
        columns = {name: [row.get(name) for row, _, _ in each] for name in fields(rows) if name != "prompt"}
        found = verifier([row["prompt"] for row, _, _ in each], [s["text"] for s in samples], columns)
        # A prompt that fills the model's context has no completion: whatever a reward makes of an empty text, it is wrong.
        verdicts = [
            {"score": v.score if s["num_tokens"] else 0.0, "scores": v.scores, "error": v.error}
            for v, s in zip(found, samples, strict=True)
        ]
        judged.put(number, verdicts)
    log.batch(number, [{**s, **v} for s, v in zip(samples, verdicts, strict=True)], there, generated - began, time.monotonic() - generated)


class Log:
    """A line of metrics.jsonl for each batch of the main rank; those of an interrupted run go on.

    Ranks do not wait for one another, so figures of samples are of all ranks' batches only once all are done; times are the main rank's.
    """

    def __init__(self, run_dir: Path, rate: str) -> None:
        """`rate` is the line's name for the share of samples so far that are correct."""
        self.path, self.heartbeat = run_dir / "metrics.jsonl", run_dir / HEARTBEAT
        self.rate = rate
        self.step = self.num_steps = self.num_samples = self.num_passed = 0
        self.seconds = {"generation_s": 0.0, "verification_s": 0.0}
        self.before: dict[int, Row] = {}

    def begin(self, num_steps: int) -> None:
        """Before the first of `num_steps` batches of this rank."""
        self.num_steps = num_steps
        if is_main_rank():
            lines = self.path.read_text().splitlines() if self.path.is_file() else []
            self.before = {row["step"]: row for line in lines if line.endswith("}") and (row := json.loads(line))}
            self.path.unlink(missing_ok=True)

    def beat(self) -> None:
        """Any rank's progress is the run's."""
        self.heartbeat.touch()

    def batch(self, number: int, samples: list[Row], there: bool, generation_s: float, verification_s: float) -> None:
        """`samples` with their verdicts; `there`: a run before this one has done them, and logged its time."""
        self.beat()
        if not is_main_rank():
            return
        self.step += 1
        tokens = sum(s["num_tokens"] for s in samples)
        self.num_samples += len(samples)
        self.num_passed += sum(map(is_correct, samples))
        line = {
            "step": self.step,
            "num_steps": self.num_steps,
            "time_s": sum(self.seconds.values()) + generation_s + verification_s,
            self.rate: self.num_passed / self.num_samples,
            **_figures(samples),
            "tokens_per_second": None if there else tokens / generation_s,
            "memory_peak_gb": memory_peak_gb(),
            "generation_s": self.seconds["generation_s"] + generation_s,
            "verification_s": self.seconds["verification_s"] + verification_s,
            "batch": number,
        }
        before = self.before.get(self.step, {}) if there else {}
        if before.get("batch") == number:  # of another number of ranks, the main one had others
            line = {**before, "num_steps": self.num_steps}
        self.seconds = {name: line[name] for name in self.seconds}
        append(self.path, line)
        say(progress_line(line, line["time_s"] / self.step))

    def of_all_ranks(self, batches: list[list[Row]]) -> None:
        """Write the lines anew, each of the batches that all ranks took in its turn. `batches` are all, with their verdicts."""
        lines, each = [json.loads(line) for line in self.path.read_text().splitlines()], ranks.num_ranks()
        num_samples = num_correct = 0
        for turn, line in enumerate(lines):
            samples = [sample for batch in batches[turn * each : (turn + 1) * each] for sample in batch]
            num_samples += len(samples)
            num_correct += sum(map(is_correct, samples))
            line |= {self.rate: num_correct / num_samples, **_figures(samples)}
        write_rows(self.path, lines)

    def times(self) -> dict[str, float]:
        """Of the main rank's batches, also of those before an interruption."""
        hours = {f"{name.removesuffix('_s')}_hours": seconds / 3600 for name, seconds in self.seconds.items()}
        return {**hours, "sample_s": self.seconds["generation_s"] / max(1, self.num_samples)}


def _figures(samples: list[Row]) -> dict[str, float]:
    return {
        "score": math.fsum(s["score"] for s in samples) / len(samples),
        "completion_tokens": sum(s["num_tokens"] for s in samples) / len(samples),
        "unfinished": sum(not s["finished"] for s in samples),
        "errors": sum(s["error"] is not None for s in samples),
    }


class Store:
    """Files of finished batches of one hash, and those that another run has left under the same one."""

    def __init__(self, folder: Path, other: Path | None = None) -> None:
        """The folder's name is the hash."""
        self.folder, self.other = folder, other

    def seed_of(self, batch: int) -> int:
        """From 0 to 2**31 - 1, of this work's hash: batches can be made in any order, on any rank."""
        return int.from_bytes(hashlib.sha256(f"{self.folder.name}/{batch}".encode()).digest()[:4], "big") >> 1

    def get(self, batch: int) -> list[Row] | None:
        """The rows of a finished batch, or None. What another run has left becomes this run's own."""
        for folder in filter(None, (self.folder, self.other)):
            path = _file(folder, batch)
            if path.is_file():
                rows = [
                    json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line
                ]  # a text may hold other line ends
                if folder == self.other:
                    self.put(batch, rows)
                return rows
        return None

    def has(self, batch: int) -> bool:
        return any(_file(folder, batch).is_file() for folder in (self.folder, self.other) if folder)

    def finished(self, batch: int) -> list[Row]:
        """A batch that some rank has finished. Raises UserError where this one does not see it."""
        rows = self.get(batch)
        if rows is None:
            raise UserError(
                f"batch {batch} is done, and not in {self.folder}: all ranks need one file system. Use: run_root=<shared directory>."
            )
        return rows

    def put(self, batch: int, rows: Iterable[Row]) -> None:
        write_rows(_file(self.folder, batch), rows)


def _file(folder: Path, batch: int) -> Path:
    return folder / f"{batch:06d}.jsonl"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """A line a row, whole or not there, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
