"""Test recipes/evaluate.py without a model."""

import json

import pytest
from omegaconf import OmegaConf

from recipes import evaluate
from recipes.evaluate import EvaluateConfig
from recipes.measure import statistics
from recipes.rewards.verifier import Judgment, build_verifier
from recipes.sampling import batches
from recipes.sampling.generation import TOO_LONG, Sample


def lines(*answers: tuple[int, str, int, bool]) -> list[dict]:
    """Return rows of samples.jsonl from (problem, task, level, whether it is correct)."""
    same = {"answer": "1", "num_tokens": 2, "finished": True}
    return [
        {"problem": problem, "task": task, "level": level, "prompt": f"p{problem}", **same}
        | {"completion": "1" if right else "2", "score": float(right), "correct": right}
        for problem, task, level, right in answers
    ]


def score(folder, rows, samples, verifier) -> list[dict]:
    """Return rows of samples.jsonl for a batch whose generator returns `samples`."""
    sampled, judged = batches.Store(folder / "samples"), batches.Store(folder / "verdicts")
    args, log = EvaluateConfig("x", batch_size=len(rows)), batches.Log(folder, "accuracy")
    batches.run_batch(rows, 0, args, lambda prompts, seed: samples, verifier, sampled, judged, log)
    pairs = zip(sampled.finished(0), judged.finished(0), strict=True)
    return [evaluate.scored_row(rows[s["prompt_index"]], {**s, **v}, True) for s, v in pairs]


def verifier_of(rows, **rewards):
    method = {"rewards": rewards, "reward_chain": [], "reward_pattern": None}
    config = OmegaConf.create({"method": {**method, "reward_confined": True}})
    return build_verifier(config, [*rows[0]], rows)


def test_score_answers_and_prompt_that_is_too_long(tmp_path):
    rows = [{"prompt": "p", "answer": a, "task": "t"} for a in ("1", "2", "")]
    samples = [Sample("<answer>1</answer>", 5, True), Sample("3", 1, False), TOO_LONG]
    scored = score(tmp_path, rows, samples, verifier_of(rows, accuracy=1.0))
    keys = ("completion", "score", "correct", "num_tokens", "finished")
    assert [tuple(row[key] for key in keys) for row in scored] == [
        ("<answer>1</answer>", 1.0, True, 5, True),
        ("3", 0.0, False, 1, False),
        ("", 0.0, False, 0, False),
    ]
    (metrics,) = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (metrics["accuracy"], metrics["unfinished"]) == (1 / 3, 2)
    assert metrics["completion_tokens"] == 2.0


def test_count_answers_that_cannot_be_scored(tmp_path):
    rows = [{"prompt": "p", "answer": "1", "entry": "no record of a task"}] * 2
    verifier = verifier_of(rows, reasoning_gym=1.0)
    judged = [Judgment(1.0), Judgment(0.0, "no score within 5 s")]
    verifier.judges["reasoning_gym"] = lambda prompts, completions, columns: judged
    scored = score(tmp_path, rows, [Sample("1", 1, True), Sample("9**9", 1, True)], verifier)
    assert [(row["correct"], row.get("error")) for row in scored] == [
        (True, None),
        (False, "reasoning_gym: no score within 5 s"),
    ]
    assert evaluate.summary(scored, 1, 0)["verifier_errors"] == 1


@pytest.mark.parametrize(("data", "expected"), [
    ({}, False),
    ({"num_heldout": 3}, False),
    ({"kind": "reasoning", "num_heldout": 3}, True),
    ({"heldout_path": "a"}, True),
    ({"heldout_fraction": 0.1}, True),
])  # fmt: skip
def test_has_heldout(data, expected):
    none = dict.fromkeys(("heldout_path", "heldout_split"))
    none |= {"kind": "jsonl", "num_heldout": 0, "heldout_fraction": 0.0}
    assert evaluate.has_heldout(OmegaConf.create({**none, **data})) is expected


def test_score_by_rewards(tmp_path):
    rows = [{"prompt": "p", "answer": "1"}] * 2
    verifier = verifier_of(rows, accuracy=1.0, format=1.0)
    texts = ("1", "<think>.</think><answer>1</answer>")
    scored = score(tmp_path, rows, [Sample(text, 1, True) for text in texts], verifier)
    assert [(row["score"], row["correct"]) for row in scored] == [(0.5, False), (1.0, True)]


def test_figures_by_task_and_level():
    answers = [(0, "a", 0, True), (1, "a", 1, False), (2, "b", 0, True), (3, "b", 0, True)]
    result = evaluate.summary(lines(*answers), 1, seed=0)
    assert (result["accuracy"], result["interval"]) == (0.75, list(statistics.wilson(3, 4)))
    interval = list(statistics.wilson(1, 2))
    counts = {"num_problems": 2, "num_samples": 2}
    assert result["by_task"]["a"] == {"accuracy": 0.5, "interval": interval, **counts}
    by_level = {level: group["accuracy"] for level, group in result["by_level"].items()}
    assert by_level == {"0": 1.0, "1": 0.0}
    both = {name: group["num_problems"] for name, group in result["by_task_and_level"].items()}
    assert both == {"a, level 0": 1, "a, level 1": 1, "b, level 0": 2}
    assert result["right_per_problem"] == [1, 0, 1, 1]
    assert "pass_at_k" not in result
    # failures first, tasks in turn
    assert [row["task"] for row in result["samples"]] == ["a", "a", "b", "b"]


def test_figures_of_several_samples():
    scored = [row for n in range(4) for row in lines((0, "a", 0, n == 0), (1, "a", 0, n < 3))]
    result = evaluate.summary(scored, 4, seed=0)
    assert result["accuracy"] == result["pass_at_k"]["1"] == result["maj_at_k"]["1"] == 0.5
    # 1/4 and 3/4; 1 - 3/6 and 1; 1 and 1
    assert result["pass_at_k"] == {"1": 0.5, "2": 0.75, "4": 1.0}
    assert result["maj_at_k"]["4"] == 0.5  # three of four are wrong, three of four are right
    assert result["interval"] == list(statistics.bootstrap([0.25, 0.75], 0))
    assert result["by_task"]["a"]["num_samples"] == 8
    assert (result["num_problems"], result["num_samples"]) == (2, 8)
    assert result["right_per_problem"] == [1, 3]


def test_rewards_that_judge_no_answer_have_a_mean():
    graded = [
        {"problem": n // 2, "prompt": "p", "completion": "a", "score": score}
        | {"num_tokens": 2, "finished": True}
        for n, score in enumerate((0.5, 0.75, 1.0, 0.25))
    ]
    result = evaluate.summary(graded, 2, seed=0)
    assert (result["reward"], result["reward_per_problem"]) == (0.625, [0.625, 0.625])
    assert result["interval"] == list(statistics.bootstrap([0.625, 0.625], 0))
    assert not {"accuracy", "pass_at_k", "right_per_problem"} & result.keys()
    assert [row["score"] for row in result["samples"]] == [0.5, 0.25, 1.0]
    # scores of 0 and 1 are as good as right and wrong
    binary = [{**row, "score": float(row["score"] == 1.0)} for row in graded]
    result = evaluate.summary(binary, 2, seed=0)
    assert (result["reward"], result["pass_at_k"]["2"]) == (0.25, 0.5)
    assert "accuracy" not in result
