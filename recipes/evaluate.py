"""Accuracy, pass@k and maj@k on held-out problems: generate, take the answer out, score it.

Started by the launcher, one process a GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=evaluate model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b
    A run's model, 8 answers a problem, by vLLM:
             python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b model.path=<run>/model method.args.engine=vllm \
                 method.args.temperature=0.7 method.args.samples_per_prompt=8

A sample of a generated problem is right when the task's own scorer gives 1, one of another row when its answer is column `answer` (reward
accuracy: as mathematics where that is mathematics, else as text); with method.rewards it is right when their weighted mean is 1. Batches of
problems are sampled and scored as by method=sample (recipes/common/batches.py): ranks take them in turn, a run that was stopped goes on
after its last whole one, and neither changes a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import set_seed

from recipes.common import harness, ranks, rewards, statistics
from recipes.common.batches import Log, sample_all, write_rows
from recipes.common.data import Row, load_heldout
from recipes.common.data_files import check_tests
from recipes.common.data_select import fields, grouped
from recipes.common.errors import UserError
from recipes.common.files import json_sha256
from recipes.common.generation import Generator, Sampling, build_generator
from recipes.common.program import is_main_rank, main, say
from recipes.common.samples import is_correct
from recipes.common.verify import Verifier, build_verifier

SAMPLES = "samples.jsonl"
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
    ranks.join()
    rows = load_heldout(config.data) if has_heldout(config.data) or manager is None else []
    result, generator = answer(config, args, rows) if rows else ({}, None)
    if manager is not None and is_main_rank():  # the harness, given a model, asks for no other ranks
        generator = generator or build_generator(config, args.sampling)
        set_seed(args.seed)
        with generator.autocast():
            found = harness.evaluate(
                manager, args.lm_eval_tasks, generator.model, generator.tokenizer, args.batch_size, args.lm_eval_limit, args.seed
            )
        result["lm_eval"] = found
    return result


def has_heldout(data: DictConfig) -> bool:
    """Whether there are problems to ask: without them the harness's tasks are all that is evaluated."""
    own = {"reasoning": data.num_heldout, "code": data.num_heldout, "jsonl": data.heldout_path, "hub": data.heldout_split}
    return bool(own.get(data.kind) or data.heldout_fraction)


def answer(config: DictConfig, args: EvaluateConfig, rows: list[Row]) -> tuple[dict[str, Any], Generator | None]:
    """Samples of all problems in samples.jsonl and their figures, by the main rank; and the generator where one was needed."""
    run_dir = Path(config.run_dir)
    log = Log(run_dir, "accuracy")
    samples, generator = sample_all(config, args, rows, scorer(config, rows), log)
    if not is_main_rank():
        return {}, generator
    answered = [line(rows[sample["prompt_index"]], sample) for sample in samples]
    write_rows(run_dir / SAMPLES, answered)
    result = summary(answered, args.samples_per_prompt, args.seed)
    say(f"done: {result['accuracy']:.1%} of {len(rows)} held-out problems solved, 95% interval {_shown(result['interval'])}")
    for name in ("num_too_long", "num_cut_off", "verifier_errors"):
        if result[name]:
            say(f"{name}: {result[name]} of {result['num_samples']} samples")
    return {**result, "time_s": sum(log.seconds.values()), "data_sha256": json_sha256(rows)}, generator


def scorer(config: DictConfig, rows: Sequence[Row]) -> Verifier:
    """The weighted rewards of the composition where it has some; else the task's own scorer, or reward accuracy."""
    if not config.method.rewards:
        own = "reasoning_gym" if "entry" in rows[0] else "accuracy"
        config = OmegaConf.create({"method": {"rewards": {own: 1.0}, "reward_chain": [], "reward_pattern": None, "reward_confined": True}})
    verifier = build_verifier(config, fields(rows))
    check_tests(config, rows)
    return verifier


def line(row: Row, sample: Row) -> Row:
    """A line of samples.jsonl. `error`: why a sample could not be scored, where that was so."""
    return {
        "problem": sample["prompt_index"],
        "sample": sample["sample_index"],
        **{key: row[key] for key in ("prompt", "answer", "task", "level") if key in row},
        "completion": sample["text"],
        "score": sample["score"],
        "correct": is_correct(sample),
        "num_tokens": sample["num_tokens"],
        "finished": sample["finished"],
        **({"error": sample["error"]} if sample["error"] else {}),
    }


def summary(answered: Sequence[Row], samples_per_prompt: int, seed: int) -> dict[str, Any]:
    """The content of result.json, without status, time and hash; `answered` are all lines of samples.jsonl."""
    problems = grouped(answered, "problem")
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
        rows_of = [row for row in answered if row.get("level") is not None] if "level" in keys else answered
        groups = {", level ".join(values): rows for values, rows in grouped(rows_of, *keys).items()}
        found[name] = {group: figures(rows, seed) for group, rows in groups.items()}
    if len(found["by_task_and_level"]) in (len(found["by_task"]), len(found["by_level"])):
        del found["by_task_and_level"]  # says what one of the others does
    return {**found, "samples": shown(answered)}


def figures(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Accuracy with its interval, of any samples: Wilson's where each problem was asked once, else a bootstrap over the problems."""
    shares = [sum(row["correct"] for row in group) / len(group) for group in grouped(rows, "problem").values()]
    once = len(shares) == len(rows)
    interval = statistics.wilson(sum(row["correct"] for row in rows), len(rows)) if once else statistics.bootstrap(shares, seed)
    return {"accuracy": _mean(rows), "interval": list(interval), "num_problems": len(shares), "num_samples": len(rows)}


def shown(answered: Sequence[Row]) -> list[Row]:
    """Some samples to look at, of each problem one: failures first, as many of each task; then by task and score."""
    chosen: list[Row] = []
    for correct, most in ((False, NUM_FAILURES_SHOWN), (True, NUM_SAMPLES_SHOWN)):
        one_a_problem = {row["problem"]: row for row in reversed(answered) if row["correct"] == correct}
        tasks = list(grouped(sorted(one_a_problem.values(), key=lambda row: row["problem"]), "task").values())
        turns = [row for turn in range(NUM_SAMPLES_SHOWN) for rows in tasks for row in rows[turn : turn + 1]]
        chosen += sorted(turns[: most - len(chosen)], key=lambda row: (str(row.get("task", "")), row["score"], row["problem"]))
    keys = ("task", "level", "prompt", "completion", "answer", "score", "correct", "finished", "error")
    return [{key: row[key] for key in keys if key in row} for row in chosen]


def _mean(rows: Sequence[Row]) -> float:
    return sum(row["correct"] for row in rows) / len(rows)


def _shown(interval: Sequence[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


if __name__ == "__main__":
    main(evaluate)
