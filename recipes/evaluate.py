"""Evaluate a model's accuracy, pass@k and maj@k on held-out problems.

The launcher starts this program, one process per GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=evaluate model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b
    The model of a run, with 8 samples per problem from vLLM:
             python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b \\
                 model.path=<run>/model method.args.engine=vllm method.args.temperature=0.7 \\
                 method.args.samples_per_prompt=8

A sample is correct if its score is 1. With method.rewards, the score is their weighted mean. By
default, the task scores generated problems, and the reward `accuracy` compares other answers with
the column `answer`. recipes/sampling/batches.py samples and scores, so the results depend neither
on the number of ranks nor on interruptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import set_seed

from recipes.data.data_load import Row, load_heldout
from recipes.data.data_select import fields, grouped
from recipes.measure import harness, statistics
from recipes.rank import ranks
from recipes.rank.files import json_sha256
from recipes.rank.program import is_main_rank, main, say
from recipes.rewards import reward_functions
from recipes.rewards.verifier import Verifier, build_verifier
from recipes.sampling.batches import Log, sample_all, write_rows
from recipes.sampling.generation import SampleGenerator, SamplingConfig, build_generator
from recipes.sampling.samples import is_correct

SAMPLES = "samples.jsonl"
NUM_SAMPLES_SHOWN = 24  # samples in result.json; samples.jsonl has all
NUM_FAILURES_SHOWN = 16  # failures among the samples in result.json
KEYS_SHOWN = (
    *("task", "level", "prompt", "completion", "answer", "score", "correct", "finished", "error"),
)


@dataclass
class EvaluateConfig(SamplingConfig):
    """Arguments of method=evaluate. `batch_size` counts problems.

    After the held-out problems, evaluate `lm_eval_tasks` of lm-evaluation-harness, each on at most
    `lm_eval_limit` documents. `lm_eval_include` is a directory with the user's task files.
    """

    temperature: float = 0.0
    samples_per_prompt: int = 1
    batch_size: int = 64
    lm_eval_tasks: list[str] = field(default_factory=list)
    lm_eval_include: str | None = None
    lm_eval_limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lm_eval_tasks = list(self.lm_eval_tasks)  # the harness does not accept a ListConfig


def evaluate(config: DictConfig) -> dict[str, Any]:
    args = EvaluateConfig(**config.trainer_args)
    manager = None
    if args.lm_eval_tasks:
        manager = harness.load(args.lm_eval_tasks, args.lm_eval_include)
    ranks.join()
    rows = load_heldout(config.data) if has_heldout(config.data) or manager is None else []
    result, generator = evaluate_rows(config, args, rows) if rows else ({}, None)
    if manager is not None and is_main_rank():  # the harness uses one rank
        generator = generator or build_generator(config, args)
        set_seed(args.seed)
        with generator.autocast():
            result["lm_eval"] = harness.evaluate(manager, generator, args)
    return result


def has_heldout(data: DictConfig) -> bool:
    """Return whether the data has held-out problems."""
    heldout = {"jsonl": data.heldout_path, "hub": data.heldout_split}
    heldout |= dict.fromkeys(("reasoning", "code"), data.num_heldout)
    return bool(heldout.get(data.kind) or data.heldout_fraction)


def evaluate_rows(
    config: DictConfig, args: EvaluateConfig, rows: list[Row]
) -> tuple[dict[str, Any], SampleGenerator | None]:
    """Sample and score `rows`, and write samples.jsonl.

    Return result.json's content ({} except on the main rank), and the generator if one was needed.
    """
    run_dir = Path(config.run_dir)
    log = Log(run_dir, "accuracy")
    samples, generator = sample_all(config, args, rows, scorer(config, rows), log)
    if not is_main_rank():
        return {}, generator
    scored = [scored_row(rows[sample["prompt_index"]], sample) for sample in samples]
    write_rows(run_dir / SAMPLES, scored)
    result = summary(scored, args.samples_per_prompt, args.seed)
    low, high = result["interval"]
    say(
        f"done: {result['accuracy']:.1%} of {len(rows)} held-out problems solved, "
        f"95% interval {low:.1%} to {high:.1%}. Of {result['num_samples']} samples, "
        f"{result['num_cut_off']} reached the length limit, {result['num_too_long']} have a prompt "
        f"that fills the model's context, and {result['verifier_errors']} could not be scored."
    )
    result |= {"time_s": sum(log.seconds.values()), "data_sha256": json_sha256(rows)}
    return result, generator


def scorer(config: DictConfig, rows: Sequence[Row]) -> Verifier:
    """Return a verifier with method.rewards, or by default with the task's scorer or accuracy."""
    if not config.method.rewards:
        reward = "reasoning_gym" if "entry" in rows[0] else "accuracy"
        method = {"rewards": {reward: 1.0}, "reward_chain": [], "reward_pattern": None}
        config = OmegaConf.create({"method": {**method, "reward_confined": True}})
    return build_verifier(config, fields(rows), rows)


def scored_row(row: Row, sample: Row) -> Row:
    """Return a row of samples.jsonl. `error` is the reason why a sample could not be scored."""
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


def summary(scored: Sequence[Row], samples_per_prompt: int, seed: int) -> dict[str, Any]:
    """Return figures and examples for result.json from the rows of samples.jsonl."""
    result: dict[str, Any] = {
        **figures(scored, seed),
        "num_too_long": sum(row["num_tokens"] == 0 for row in scored),
        "num_cut_off": sum(not row["finished"] and row["num_tokens"] > 0 for row in scored),
        "verifier_errors": sum("error" in row for row in scored),
        "completion_tokens": sum(row["num_tokens"] for row in scored) / len(scored),
        "samples_per_prompt": samples_per_prompt,
    }
    result |= curves(list(grouped(scored, "problem").values()), samples_per_prompt, seed)
    leveled = [row for row in scored if row.get("level") is not None]
    groupings = {
        "by_task": grouped(scored, "task"),
        "by_level": grouped(leveled, "level"),
        "by_task_and_level": grouped(leveled, "task", "level"),
    }
    for name, groups in groupings.items():
        result[name] = {", level ".join(key): figures(rows, seed) for key, rows in groups.items()}
    if len(result["by_task_and_level"]) in (len(result["by_task"]), len(result["by_level"])):
        del result["by_task_and_level"]  # equals by_task or by_level
    return {**result, "samples": examples(scored)}


def curves(problems: list[list[Row]], samples_per_prompt: int, seed: int) -> dict[str, Any]:
    """Return correct samples per problem and, if there are several, pass@k and maj@k."""
    right = [sum(row["correct"] for row in rows) for rows in problems]
    result: dict[str, Any] = {"right_per_problem": right}
    votes = [
        [(reward_functions.final_answer(row["completion"]), float(row["correct"])) for row in rows]
        for rows in problems
    ]
    for k in statistics.ks(samples_per_prompt) if samples_per_prompt > 1 else ():
        by_name = {
            "pass_at_k": [statistics.pass_at_k(n, samples_per_prompt, k) for n in right],
            "maj_at_k": [statistics.maj_at_k(answers, k) for answers in votes],
        }
        for name, values in by_name.items():
            interval = list(statistics.bootstrap(values, seed))
            result.setdefault(name, {})[str(k)] = sum(values) / len(values)
            result.setdefault(f"{name}_interval", {})[str(k)] = interval
    return result


def figures(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Return the accuracy and its 95% interval.

    The interval is Wilson's if each problem has one sample, else from a bootstrap over problems.
    """
    right = sum(row["correct"] for row in rows)
    problems = grouped(rows, "problem").values()
    if len(problems) == len(rows):
        interval = statistics.wilson(right, len(rows))
    else:
        shares = [sum(row["correct"] for row in group) / len(group) for group in problems]
        interval = statistics.bootstrap(shares, seed)
    return {
        "accuracy": right / len(rows),
        "interval": list(interval),
        "num_problems": len(problems),
        "num_samples": len(rows),
    }


def examples(scored: Sequence[Row]) -> list[Row]:
    """Return samples for result.json, at most one per problem: failures first, tasks in turn."""
    chosen: list[Row] = []
    for correct, limit in ((False, NUM_FAILURES_SHOWN), (True, NUM_SAMPLES_SHOWN)):
        firsts: dict[int, Row] = {}
        for row in scored:
            if row["correct"] == correct:
                firsts.setdefault(row["problem"], row)
        turns = itertools.zip_longest(*grouped(firsts.values(), "task").values())
        chosen += [row for turn in turns for row in turn if row is not None][: limit - len(chosen)]
    return [{key: row[key] for key in KEYS_SHOWN if key in row} for row in chosen]


if __name__ == "__main__":
    main(evaluate)
