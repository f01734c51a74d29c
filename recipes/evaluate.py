"""Evaluate a model on held-out problems: accuracy, pass@k and maj@k, or the mean reward.

The launcher starts this program, one process per GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=evaluate model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b
    The model of a run, with 8 samples per problem from vLLM:
             python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b \\
                 model.path=<run>/model method.args.engine=vllm method.args.temperature=0.7 \\
                 method.args.samples_per_prompt=8

The score of a sample is the weighted mean of method.rewards, which by default follow the rows
(launch/config/row_reward.py). If one of them compares answers with a column, a sample with a score
of 1 is correct. Other rewards only say what is better, so the result is their mean.
recipes/sampling/batches.py samples and scores, so the results depend neither on the number of ranks
nor on interruptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from omegaconf import DictConfig
from transformers import set_seed

from recipes.data.data_load import Row, load_heldout
from recipes.data.data_select import fields, grouped
from recipes.measure import harness, statistics
from recipes.rank import ranks
from recipes.rank.files import json_sha256
from recipes.rank.program import is_main_rank, main, say
from recipes.rewards import reward_functions
from recipes.rewards.verifier import build_verifier
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
    judges = reward_functions.NEEDED_COLUMN.keys() & set(config.method.rewards)
    log = Log(run_dir, "accuracy") if judges else Log(run_dir, "reward", itemgetter("score"))
    verifier = build_verifier(config, fields(rows), rows)
    samples, generator = sample_all(config, args, rows, verifier, log)
    if not is_main_rank():
        return {}, generator
    scored = [scored_row(rows[sample["prompt_index"]], sample, bool(judges)) for sample in samples]
    write_rows(run_dir / SAMPLES, scored)
    result = summary(scored, args.samples_per_prompt, args.seed)
    low, high = result["interval"]
    text = (
        f"{result['accuracy']:.1%} of {len(rows)} held-out problems solved, "
        f"95% interval {low:.1%} to {high:.1%}."
        if judges
        else f"mean reward {result['reward']:.3f} on {len(rows)} held-out problems, "
        f"95% interval {low:.3f} to {high:.3f}."
    )
    if args.samples_per_prompt > 1 and "pass_at_k" not in result:
        text += " No pass@k, because scores other than 0 and 1 are neither right nor wrong."
    say(
        f"done: {text} Of {result['num_samples']} samples, "
        f"{result['num_cut_off']} reached the length limit, {result['num_too_long']} have a prompt "
        f"that fills the model's context, and {result['verifier_errors']} could not be scored."
    )
    result |= {"time_s": sum(log.seconds.values()), "data_sha256": json_sha256(rows)}
    return result, generator


def scored_row(row: Row, sample: Row, is_judged: bool) -> Row:
    """Return a row of samples.jsonl, with `correct` only if a reward judges answers.

    `error` is the reason why a sample could not be scored.
    """
    return {
        "problem": sample["prompt_index"],
        "sample": sample["sample_index"],
        **{key: row[key] for key in ("prompt", "answer", "task", "level") if key in row},
        "completion": sample["text"],
        "score": sample["score"],
        **({"correct": is_correct(sample)} if is_judged else {}),
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
    problems = list(grouped(scored, "problem").values())
    if "reward" in result:
        result["reward_per_problem"] = [mean(row["score"] for row in rows) for rows in problems]
    if "accuracy" in result or all(row["score"] in (0.0, 1.0) for row in scored):
        result |= curves(problems, samples_per_prompt, seed)
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
    right = [sum(map(is_correct, rows)) for rows in problems]
    result: dict[str, Any] = {"right_per_problem": right}
    votes = [
        [(reward_functions.final_answer(row["completion"]), float(is_correct(row))) for row in rows]
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
    """Return the accuracy, or the mean reward of rows without `correct`, and its 95% interval.

    The interval of an accuracy is Wilson's if each problem has one sample. Others are from a
    bootstrap over problems.
    """
    name, field = ("accuracy", "correct") if "correct" in rows[0] else ("reward", "score")
    total = sum(row[field] for row in rows)
    problems = grouped(rows, "problem").values()
    if name == "accuracy" and len(problems) == len(rows):
        interval = statistics.wilson(total, len(rows))
    else:
        means = [mean(row[field] for row in group) for group in problems]
        interval = statistics.bootstrap(means, seed)
    return {
        name: total / len(rows),
        "interval": list(interval),
        "num_problems": len(problems),
        "num_samples": len(rows),
    }


def examples(scored: Sequence[Row]) -> list[Row]:
    """Return samples for result.json, at most one per problem, tasks in turn.

    Samples without the full score are first.
    """
    chosen: list[Row] = []
    for correct, limit in ((False, NUM_FAILURES_SHOWN), (True, NUM_SAMPLES_SHOWN)):
        firsts: dict[int, Row] = {}
        for row in scored:
            if is_correct(row) == correct:
                firsts.setdefault(row["problem"], row)
        turns = itertools.zip_longest(*grouped(firsts.values(), "task").values())
        chosen += [row for turn in turns for row in turn if row is not None][: limit - len(chosen)]
    return [{key: row[key] for key in KEYS_SHOWN if key in row} for row in chosen]


if __name__ == "__main__":
    main(evaluate)
