"""Accuracy, pass@k and maj@k on held-out problems: generate, take the answer out, score it.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b
    8 GPUs:  the same: one of them evaluates
    A run's model, 8 answers a problem, by vLLM:
             python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b model.path=<run>/model method.args.engine=vllm \
                 method.args.temperature=0.7 method.args.samples_per_prompt=8

A sample of a generated problem is right when the task's own scorer gives 1, one of another row when math-verify finds the answers
equal; with method.rewards it is right when their weighted mean is 1. Every batch draws from a seed of its own and goes to samples.jsonl
when it is done, so that a run which was stopped goes on after its last whole batch and ends with the same figures.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import set_seed

from recipes.common import harness, profiling, rewards, statistics
from recipes.common.data import Row, load_heldout
from recipes.common.errors import UserError
from recipes.common.files import json_sha256
from recipes.common.generation import Generator, Sample, Sampling, build_generator
from recipes.common.metrics import append, drop_after, memory_peak_gb, progress_line
from recipes.common.program import Interrupted, main, say, stop_asked
from recipes.common.verify import Verifier, build_verifier

NUM_SAMPLES_SHOWN = 24  # in result.json; samples.jsonl has all
NUM_FAILURES_SHOWN = 16  # of these, where there are as many: what went wrong is what a reader looks for


@dataclass
class EvaluateConfig:
    """Arguments of the evaluation. `batch_size` counts problems. `lm_eval_tasks`: names of tasks of lm-evaluation-harness, asked after
    the held-out problems; `lm_eval_include`: a directory with task files of one's own; `lm_eval_limit`: of each task the first so many.
    Raises UserError for a value out of range."""

    output_dir: str
    seed: int = 0
    engine: str = "transformers"
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    samples_per_prompt: int = 1
    batch_size: int = 64
    lm_eval_tasks: list[str] = field(default_factory=list)
    lm_eval_include: str | None = None
    lm_eval_limit: int | None = None
    use_cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"method.args.{name}={getattr(self, name)}: it must be at least 1.")
        if isinstance(self.lm_eval_tasks, str):
            raise UserError(f"method.args.lm_eval_tasks={self.lm_eval_tasks}: a list is expected: [{self.lm_eval_tasks}].")
        self.lm_eval_tasks = list(self.lm_eval_tasks)  # the harness takes no list of another class
        self.sampling = Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k)


def evaluate(config: DictConfig) -> dict[str, Any]:
    args = EvaluateConfig(**config.trainer_args)
    manager = harness.load(args.lm_eval_tasks, args.lm_eval_include) if args.lm_eval_tasks else None  # refused before work is done
    rows = load_heldout(config.data) if has_heldout(config.data) or manager is None else []
    generator = build_generator(config, args.sampling)
    set_seed(args.seed)
    result = answer(config, args, generator, rows) if rows else {}
    if manager is not None:
        with generator.autocast():
            found = harness.evaluate(
                manager, args.lm_eval_tasks, generator.model, generator.tokenizer, args.batch_size, args.lm_eval_limit, args.seed
            )
        result["lm_eval"] = found
    return result


def has_heldout(data: DictConfig) -> bool:
    """Whether there are problems to ask: without them the harness's tasks are all that is evaluated."""
    return bool(data.num_heldout or data.heldout_path or data.heldout_split or data.heldout_fraction)


def answer(config: DictConfig, args: EvaluateConfig, generator: Generator, rows: list[Row]) -> dict[str, Any]:
    """Every batch that is not in samples.jsonl yet, and the figures of all. Raises Interrupted between two batches."""
    samples, metrics = Path(config.run_dir) / "samples.jsonl", Path(config.run_dir) / "metrics.jsonl"
    starts = range(0, len(rows), args.batch_size)
    answered, done, before_s = resume(samples, metrics, rows, args)
    score = scorer(config, rows)
    began = time.monotonic()
    with profiling.session(config, len(starts) - done, model=getattr(generator, "model", None)) as profile:
        for step, start in enumerate(starts[done:], start=done + 1):
            batch_began = time.monotonic()
            problems = range(start, min(start + args.batch_size, len(rows)))
            asked = [(problem, n) for problem in problems for n in range(args.samples_per_prompt)]
            given = generator([rows[problem]["prompt"] for problem, _ in asked], batch_seed(args.seed, start))
            new = grade([rows[problem] for problem, _ in asked], given, score)
            new = [{"problem": problem, "sample": n, **row} for (problem, n), row in zip(asked, new, strict=True)]
            append_all(samples, new)
            answered += new
            num_tokens = sum(sample.num_tokens for sample in given)
            line = {
                "step": step,
                "num_steps": len(starts),
                "time_s": before_s + time.monotonic() - began,
                "accuracy": _mean(answered),
                "num_problems": problems.stop,
                "completion_tokens": num_tokens / len(given),
                "tokens_per_second": num_tokens / (time.monotonic() - batch_began),
                "cut_off": sum(not row["finished"] for row in answered) / len(answered),
                "memory_peak_gb": memory_peak_gb(),
            }
            append(metrics, line)
            say(progress_line(line, (time.monotonic() - began) / (step - done)))
            profile.step()
            if stop_asked() and step < len(starts):
                raise Interrupted(accuracy=_mean(answered), num_problems=problems.stop)
    result = summary(answered, args.samples_per_prompt, args.seed)
    say(f"done: {result['accuracy']:.1%} of {len(rows)} held-out problems solved, 95% interval {_shown(result['interval'])}")
    for name in ("num_too_long", "num_cut_off", "verifier_errors"):
        if result[name]:
            say(f"{name}: {result[name]} of {result['num_samples']} samples")
    return {**result, "time_s": before_s + time.monotonic() - began, "data_sha256": json_sha256(rows)}


def batch_seed(seed: int, start: int) -> int:
    """Of the batch that begins with problem `start`: another one for each, the same on every run."""
    return random.Random(f"{seed}/{start}").getrandbits(32)


def resume(samples: Path, metrics: Path, rows: list[Row], args: EvaluateConfig) -> tuple[list[Row], int, float]:
    """(samples of the whole batches there are, how many batches, their seconds); what follows them is removed from both files.

    Raises UserError where they are answers to other problems: the file that they came from has changed.
    """
    # Bytes: a last line may be cut off inside a character, and an answer may hold what Unicode counts as another end of a line.
    *lines, _ = samples.read_bytes().split(b"\n") if samples.is_file() else [b""]
    found = [json.loads(line) for line in lines]
    known = drop_after(metrics, len(rows))
    whole = [min(batch * args.batch_size, len(rows)) * args.samples_per_prompt for batch in range(len(known) + 1)]
    done = max(batch for batch, num_samples in enumerate(whole) if num_samples <= len(found))
    kept = found[: whole[done]]
    for row in kept:
        asked = rows[row["problem"]]
        if any(row.get(key) != asked.get(key) for key in ("prompt", "answer")):
            raise UserError(f"{samples}: answers to other problems than the data now has. Start a new run with resume=never.")
    temporary = samples.with_name(f".{samples.name}.tmp")
    temporary.write_bytes(b"".join(line + b"\n" for line in lines[: len(kept)]))
    temporary.replace(samples)
    known = drop_after(metrics, done)
    if kept:
        say(f"resuming after batch {done}: {len(kept)} samples are in {samples}")
    return kept, done, known[-1]["time_s"] if known else 0.0


def append_all(path: Path, rows: Sequence[Row]) -> None:
    """All lines of a batch, on the disk before its line in metrics.jsonl says that they are."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def scorer(config: DictConfig, rows: Sequence[Row]) -> Verifier:
    """The weighted rewards of the composition where it has some; else the task's own scorer, or math-verify on column `answer`."""
    if not config.method.rewards:
        own = "reasoning_gym" if "entry" in rows[0] else "accuracy"
        config = OmegaConf.create({"method": {"rewards": {own: 1.0}, "reward_chain": [], "reward_pattern": None}})
    return build_verifier(config, list(rows[0]))


def grade(rows: Sequence[Row], samples: Sequence[Sample], score: Verifier) -> list[Row]:
    """A line of samples.jsonl for each row and its sample; only a full score is correct, and a prompt that was too long has 0.

    `error`: why a sample could not be scored, where that was so.
    """
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    prompts = columns.pop("prompt")
    verdicts = score(prompts, [sample.text for sample in samples], columns)
    kept = ("prompt", "answer", "task", "level")
    return [
        {
            **{key: row[key] for key in kept if key in row},
            "completion": sample.text,
            "score": verdict.score if sample.num_tokens else 0.0,
            "correct": verdict.score == 1.0 and sample.num_tokens > 0,
            "num_tokens": sample.num_tokens,
            "finished": sample.finished,
            **({"error": verdict.error} if verdict.error else {}),
        }
        for row, sample, verdict in zip(rows, samples, verdicts, strict=True)
    ]


def summary(answered: Sequence[Row], samples_per_prompt: int, seed: int) -> dict[str, Any]:
    """The content of result.json, without status, time and hash; `answered` are all lines of samples.jsonl."""
    problems = _grouped(answered, "problem")
    right = [sum(row["correct"] for row in rows) for rows in problems.values()]
    votes = [[(rewards.final_answer(row["completion"]), float(row["correct"])) for row in rows] for rows in problems.values()]
    found: dict[str, Any] = {
        **figures(answered, seed),
        "num_too_long": sum(row["num_tokens"] == 0 for row in answered),
        "num_cut_off": sum(not row["finished"] and row["num_tokens"] > 0 for row in answered),
        "verifier_errors": sum("error" in row for row in answered),
        "completion_tokens": sum(row["num_tokens"] for row in answered) / len(answered),
        "samples_per_prompt": samples_per_prompt,
        "right_per_problem": right,
    }
    if samples_per_prompt > 1:
        for k in statistics.ks(samples_per_prompt):
            passed = [statistics.pass_at_k(count, samples_per_prompt, k) for count in right]
            voted = [statistics.maj_at_k(answers, k) for answers in votes]
            for name, values in (("pass_at_k", passed), ("maj_at_k", voted)):
                found.setdefault(name, {})[str(k)] = sum(values) / len(values)
                found.setdefault(f"{name}_interval", {})[str(k)] = list(statistics.bootstrap(values, seed))
    by = {"by_task": ("task",), "by_level": ("level",), "by_task_and_level": ("task", "level")}
    for name, keys in by.items():
        rows_of = [row for row in answered if "level" in row] if "level" in keys else answered
        groups = {", level ".join(map(str, values)): rows for values, rows in _grouped(rows_of, *keys).items()}
        found[name] = {group: figures(rows, seed) for group, rows in groups.items()}
    if len(found["by_task_and_level"]) in (len(found["by_task"]), len(found["by_level"])):
        del found["by_task_and_level"]  # says what one of the others does
    return {**found, "samples": shown(answered)}


def figures(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Accuracy with its interval, of any samples: Wilson's where each problem was asked once, else a bootstrap over the problems."""
    shares = [sum(row["correct"] for row in group) / len(group) for group in _grouped(rows, "problem").values()]
    once = len(shares) == len(rows)
    interval = statistics.wilson(sum(row["correct"] for row in rows), len(rows)) if once else statistics.bootstrap(shares, seed)
    return {"accuracy": _mean(rows), "interval": list(interval), "num_problems": len(shares), "num_samples": len(rows)}


def shown(answered: Sequence[Row]) -> list[Row]:
    """Some samples to look at, of each problem one: failures first, as many of each task; then by task and score."""
    chosen: list[Row] = []
    for correct, most in ((False, NUM_FAILURES_SHOWN), (True, NUM_SAMPLES_SHOWN)):
        one_a_problem = {row["problem"]: row for row in reversed(answered) if row["correct"] == correct}
        tasks = list(_grouped(sorted(one_a_problem.values(), key=lambda row: row["problem"]), "task").values())
        turns = [row for turn in range(NUM_SAMPLES_SHOWN) for rows in tasks for row in rows[turn : turn + 1]]
        chosen += sorted(turns[: most - len(chosen)], key=lambda row: (str(row.get("task", "")), row["score"], row["problem"]))
    keys = ("task", "level", "prompt", "completion", "answer", "score", "correct", "finished", "error")
    return [{key: row[key] for key in keys if key in row} for row in chosen]


def _grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of `keys`, sorted by these; a row that has no such value is of none ("all")."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(key, "all") for key in keys)].append(row)
    return dict(sorted(groups.items(), key=lambda item: tuple((isinstance(value, str), value) for value in item[0])))


def _mean(rows: Sequence[Row]) -> float:
    return sum(row["correct"] for row in rows) / len(rows)


def _shown(interval: Sequence[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


if __name__ == "__main__":
    main(evaluate)
