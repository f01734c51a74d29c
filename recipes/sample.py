"""Samples of a model, a verdict on each, and the best of them as training rows: rejection sampling, RAFT's first half (arXiv:2304.06767).

Started by the launcher, one process a GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=sample model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=sample model=qwen3_4b
    RAFT:    python launch/run.py hardware=mi350x method=raft model=qwen3_4b        (cycles of this, SFT and evaluation)

Prompts go in batches that follow from the composition, each with a seed from the hash of all that decides what is sampled. A batch is
one file, whole or not there, so a run that was stopped or killed goes on at the next one and ends with the same rows; ranks take
batches in turn, and how many there are changes nothing. What becomes of a sample: recipes/common/samples.py.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from recipes.common import profiling
from recipes.common.checkpoint import HEARTBEAT
from recipes.common.data import load_train
from recipes.common.data_curriculum import check_levels, cycle_shares, read_pass_rates
from recipes.common.errors import UserError
from recipes.common.files import json_sha256, sha256, write_json
from recipes.common.generation import Generator, Sampling, build_generator
from recipes.common.metrics import append, memory_peak_gb, progress_line
from recipes.common.program import Interrupted, is_main_rank, main, rank, say, stop_asked
from recipes.common.sample_keys import model_identity, samples_key, verdicts_key
from recipes.common.samples import Row, Selection, Store, by_level, choose_prompts, pass_curve, select, write_rows
from recipes.common.verify import Verifier, build_verifier

SELECTED = "selected.jsonl"
SCORED = "scored.jsonl"  # all samples as rows, those that are not kept too: data=samples makes preference pairs of them
NUM_SAMPLES_SHOWN = 8


@dataclass
class SampleConfig:
    """Arguments of method=sample. `batch_size` counts prompts, each of `samples_per_prompt` completions. Raises UserError.

    `cycle` of `num_cycles` is where data.curriculum stands, and each draws other prompts; `reuse` is a run, or a pipeline of runs, whose
    batches of the same hash are taken.
    """

    output_dir: str
    seed: int = 0
    engine: str = "transformers"
    num_prompts: int | None = None
    samples_per_prompt: int = 8
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    threshold: float = 1.0
    finished_only: bool = True
    deduplicate: bool = True
    per_prompt: int | None = 4
    top_fraction: float = 1.0
    cycle: int = 1
    num_cycles: int = 1
    reuse: str | None = None
    use_cpu: bool = False
    bf16: bool = False
    fp16: bool = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "samples_per_prompt", "batch_size", "per_prompt", "cycle", "num_cycles"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UserError(f"method.args.{name}={given}: it must be at least 1.")
        if self.cycle > self.num_cycles:
            raise UserError(f"method.args.cycle={self.cycle}: it is one of method.args.num_cycles={self.num_cycles}.")
        if self.reuse is not None and not Path(self.reuse).is_dir():
            raise UserError(f"method.args.reuse={self.reuse}: no such directory. Give a run of method=sample, or a run of method=raft.")
        if not 0 < self.top_fraction <= 1:
            raise UserError(f"method.args.top_fraction={self.top_fraction}: it must be above 0 and at most 1 (1 keeps all).")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k)

    @property
    def selection(self) -> Selection:
        return Selection(self.threshold, self.finished_only, self.deduplicate, self.per_prompt, self.top_fraction)


@dataclass
class RaftConfig:
    """Arguments of method=raft, which launch/cycles.py makes phases of. `base`: continued or fresh, what each cycle's training starts from.

    `sample`, `train`, `evaluate` and `start` hold arguments of those phases.
    """

    cycles: int = 3
    base: str = "continued"
    learning_rate_decay: float = 0.5
    sample: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)


def sample(config: DictConfig) -> dict[str, Any]:
    args = SampleConfig(**config.trainer_args)
    run_dir = Path(config.run_dir)
    if _num_ranks() > 1:  # ranks share files and a last word; a day, since one of them may have hours of work left when others are done
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=1))
    rows = prompts(config, args)
    batches = [rows[start : start + args.batch_size] for start in range(0, len(rows), args.batch_size)]
    verifier = build_verifier(config, [name for name in rows[0] if name != "prompt"])  # refuses rewards that cannot be imported
    sampled, judged = stores(config, args, rows)
    if args.engine == "vllm":
        os.environ.update(own_gpu(os.environ))
    generator = functools.cache(lambda: build_generator(config, args.sampling))  # loads no model where all batches are there
    mine = [number for number in range(len(batches)) if number % _num_ranks() == rank()]
    log = Log(run_dir, len(mine), args)
    done = 0
    with profiling.session(config, len(mine)) as profile:
        for number in mine:
            if stop_asked():
                break
            one_batch(batches[number], number, args, generator, verifier, sampled, judged, log)
            profile.step()
            done += 1
    if not _all_ranks(done == len(mine)):
        say(f"interrupted after {done} of {len(mine)} batches; the same command continues")
        raise Interrupted(batches=done)
    if not is_main_rank():
        return {}
    samples = [{**s, **v} for n in range(len(batches)) for s, v in zip(sampled.finished(n), judged.finished(n), strict=True)]
    return finish(run_dir, args, rows, samples) | log.times()


def prompts(config: DictConfig, args: SampleConfig) -> list[Row]:
    """The rows whose prompts this run samples. Raises UserError for levels or pass rates that data.curriculum cannot use."""
    rows = load_train(config.data, "grpo").to_list()
    weights = None
    if config.data.curriculum != "none":
        levels = [row.get("level") for row in rows]
        check_levels(config.data.curriculum, levels)
        rates = read_pass_rates(config.data.pass_rates)
        weights = cycle_shares(config.data, sorted(set(levels)), args.cycle, args.num_cycles, rates)
    chosen = choose_prompts(rows, args.num_prompts, weights, args.seed + args.cycle - 1)
    if args.num_prompts and len(chosen) < args.num_prompts:
        say(f"num_prompts={args.num_prompts}: of the rows to choose from there are {len(chosen)}, and all are sampled")
    return chosen


def stores(config: DictConfig, args: SampleConfig, rows: list[Row]) -> tuple[Store, Store]:
    """Where samples and verdicts of exactly this work lie. One rank hashes the model and tells the others."""
    found = [model_identity(config) if is_main_rank() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    key = samples_key(config, args, rows, found[0])
    made = []
    for name, content in (("samples", key), ("verdicts", verdicts_key(config, key))):
        hashed = json_sha256(content)
        folder = Path(config.run_dir) / name / hashed
        if is_main_rank():
            write_json(folder / "key.json", content)
        reused = (
            sorted(Path(args.reuse).glob(f"{name}/{hashed}")) + sorted(Path(args.reuse).glob(f"*/{name}/{hashed}")) if args.reuse else []
        )
        if args.reuse:
            say(f"reuse={args.reuse}: {name} of this work {'are there' if reused else 'are not there, and are made'}")
        made.append(Store(folder, reused[0] if reused else None))
    return made[0], made[1]


def one_batch(
    rows: list[Row], number: int, args: SampleConfig, generator: Any, verifier: Verifier, sampled: Store, judged: Store, log: Log
) -> None:
    """Sample and judge a batch, as far as that is not done."""
    each = [(row, place, n) for place, row in enumerate(rows) for n in range(args.samples_per_prompt)]
    began = time.monotonic()
    samples, verdicts = sampled.get(number), judged.get(number)
    there = samples is not None and verdicts is not None
    if samples is None:
        make: Generator = generator()
        made = make([row["prompt"] for row, _, _ in each], sampled.seed_of(number))
        first = number * args.batch_size
        samples = [
            {"prompt_index": first + place, "sample_index": n, "text": s.text, "num_tokens": s.num_tokens, "finished": s.finished}
            for (_, place, n), s in zip(each, made, strict=True)
        ]
        sampled.put(number, samples)
    log.beat()
    generated = time.monotonic()
    if verdicts is None:
        columns = {name: [row[name] for row, _, _ in each] for name in rows[0] if name != "prompt"}
        found = verifier([row["prompt"] for row, _, _ in each], [s["text"] for s in samples], columns)
        # A prompt that fills the model's context has no completion: whatever a reward makes of an empty text, it is wrong.
        verdicts = [
            {"score": v.score if s["num_tokens"] else 0.0, "scores": v.scores, "error": v.error}
            for v, s in zip(found, samples, strict=True)
        ]
        judged.put(number, verdicts)
    log.batch(samples, verdicts, there, generated - began, time.monotonic() - generated)


class Log:
    """A line of metrics.jsonl for each batch of the main rank; those of an interrupted run go on."""

    def __init__(self, run_dir: Path, num_steps: int, args: SampleConfig) -> None:
        self.path, self.heartbeat = run_dir / "metrics.jsonl", run_dir / HEARTBEAT
        self.num_steps, self.threshold = num_steps, args.threshold
        self.step = self.num_samples = self.num_passed = 0
        self.seconds = {"generation_s": 0.0, "verification_s": 0.0}
        self.before: dict[int, Row] = {}
        if is_main_rank():
            lines = self.path.read_text().splitlines() if self.path.is_file() else []
            self.before = {row["step"]: row for line in lines if line.endswith("}") and (row := json.loads(line))}
            self.path.unlink(missing_ok=True)

    def beat(self) -> None:
        """Any rank's progress is the run's."""
        self.heartbeat.touch()

    def batch(self, samples: list[Row], verdicts: list[Row], there: bool, generation_s: float, verification_s: float) -> None:
        """`there`: a run before this one has done it, and logged its time."""
        self.beat()
        if not is_main_rank():
            return
        self.step += 1
        tokens = sum(s["num_tokens"] for s in samples)
        self.num_samples += len(samples)
        self.num_passed += sum(v["score"] >= self.threshold for v in verdicts)
        line = {
            "step": self.step,
            "num_steps": self.num_steps,
            "time_s": sum(self.seconds.values()) + generation_s + verification_s,
            "pass_rate": self.num_passed / self.num_samples,
            "score": math.fsum(v["score"] for v in verdicts) / len(verdicts),
            "completion_tokens": tokens / len(samples),
            "unfinished": sum(not s["finished"] for s in samples),
            "errors": sum(v["error"] is not None for v in verdicts),
            "tokens_per_second": None if there else tokens / generation_s,
            "memory_peak_gb": memory_peak_gb(),
            "generation_s": self.seconds["generation_s"] + generation_s,
            "verification_s": self.seconds["verification_s"] + verification_s,
        }
        line = self.before.get(self.step, line) if there else line
        self.seconds = {name: line[name] for name in self.seconds}
        append(self.path, line)
        say(progress_line(line, line["time_s"] / self.step))

    def times(self) -> dict[str, float]:
        """Of the main rank's batches, also of those before an interruption."""
        hours = {f"{name.removesuffix('_s')}_hours": seconds / 3600 for name, seconds in self.seconds.items()}
        return {**hours, "sample_s": self.seconds["generation_s"] / max(1, self.num_samples)}


def finish(run_dir: Path, args: SampleConfig, rows: list[Row], samples: list[Row]) -> dict[str, Any]:
    """Write scored.jsonl and selected.jsonl; the content of result.json. Raises UserError where nothing is kept."""
    write_rows(run_dir / SCORED, (training_row(rows[s["prompt_index"]], s) for s in samples))
    selected = select(samples, args.selection)
    if not selected:
        raise UserError(nothing_kept(run_dir, args, samples))
    kept = [training_row(rows[s["prompt_index"]], s) for s in selected]
    write_rows(run_dir / SELECTED, kept)
    passed = sum(s["score"] >= args.threshold for s in samples)
    too_long, errors = sum(s["num_tokens"] == 0 for s in samples), sum(s["error"] is not None for s in samples)
    curve = pass_curve(samples, args.threshold)
    say(f"done: {len(kept)} of {len(samples)} samples kept, {passed / len(samples):.1%} pass, in {run_dir / SELECTED}")
    for what, number in (("their prompt fills the model's context", too_long), ("could not be judged", errors)):
        if number:
            say(f"{number} of {len(samples)} samples: {what}; they count as wrong")
    shown = [{"prompt": row["prompt"], "completion": row["completion"], "score": row["score"]} for row in kept[:NUM_SAMPLES_SHOWN]]
    return {
        "num_prompts": len(rows),
        "num_samples": len(samples),
        "num_unfinished": sum(not s["finished"] for s in samples),
        "num_too_long": too_long,
        "verifier_errors": errors,
        "num_selected": len(kept),
        "num_prompts_selected": len({s["prompt_index"] for s in selected}),
        "pass_rate": passed / len(samples),
        "pass_at_k": curve,
        "by_level": by_level(samples, rows, args.threshold),
        "selected": str(run_dir / SELECTED),
        "selected_sha256": sha256(run_dir / SELECTED),
        "data_sha256": json_sha256(rows),
        "samples": shown,
    }


def training_row(row: Row, chosen: Row) -> Row:
    """A row of TRL's prompt-completion format, which SFT trains on the completion of; where it is not `finished`, without its end."""
    text = chosen["text"]
    completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
    about = {name: row[name] for name in ("task", "level", "answer") if name in row}
    return {
        "prompt": row["prompt"],
        "completion": completion,
        **about,
        **{n: chosen[n] for n in ("prompt_index", "sample_index", "score", "finished")},
    }


def nothing_kept(run_dir: Path, args: SampleConfig, samples: list[Row]) -> str:
    """Why no sample was kept, and what to loosen."""
    scores = sorted({round(s["score"], 4) for s in samples}, reverse=True)[:3]
    passed = sum(s["score"] >= args.threshold for s in samples)
    too_long = sum(s["num_tokens"] == 0 for s in samples)
    cut = sum(not s["finished"] for s in samples) - too_long
    errors = sum(s["error"] is not None for s in samples)
    loosen = []
    if passed == 0 and scores[0] > 0:
        loosen.append(f"threshold={scores[0]:g} or less")
    if cut:
        loosen.append(f"max_new_tokens above {args.max_new_tokens}" + (", or finished_only=false" if passed else ""))
    if passed == 0:
        loosen += [
            f"samples_per_prompt above {args.samples_per_prompt}",
            "another temperature",
            "easier prompts",
            "a better model to start from",
        ]
    if too_long:
        loosen.append("shorter prompts, or a model of more positions")
    said = f"{passed} reach threshold={args.threshold:g}, {cut} are cut off at max_new_tokens={args.max_new_tokens}"
    said += f", {errors} could not be judged" * bool(errors) + f", {too_long} are of prompts that fill the model's context" * bool(too_long)
    return (
        f"none of {len(samples)} samples is kept: {said}; best scores: "
        f"{', '.join(f'{score:g}' for score in scores)}. Use: {'; '.join(loosen)} (of method.args; under method=raft, of "
        f"method.args.sample). reuse={run_dir} takes what was sampled again, where it stays the same."
    )


def own_gpu(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that leave this rank its own GPU: vLLM's process takes the first that it sees."""
    local = int(environ.get("LOCAL_RANK", "0"))
    masks = {name: environ[name].split(",") for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if environ.get(name)}
    return {name: gpus[local] for name, gpus in masks.items() if len(gpus) > 1} | ({"LOCAL_RANK": "0"} if masks else {})


def _num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _all_ranks(flag: bool) -> bool:
    """Whether it holds on every rank: a signal may reach one in the middle of its batches and another after its last."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags.item())


if __name__ == "__main__":
    main(sample)
