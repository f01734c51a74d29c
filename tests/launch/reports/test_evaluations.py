"""Test the report of an evaluation, and which evaluations are compared."""

import json
import re

from launch.reports import evaluations
from launch.reports.run_files import read
from recipes import evaluate
from tests.conftest import composed, leave_record
from tests.recipes.test_evaluate import lines


def a_run(folder, right: list[int], sha: str = "s", per_problem: int = 1, overrides=()):
    answered = [
        row
        for n, count in enumerate(right)
        for k in range(per_problem)
        for row in lines((n, "a", 0, k < count))
    ]
    folder.mkdir()
    content = {"status": "done", **evaluate.summary(answered, per_problem, 0), "data_sha256": sha}
    (folder / "result.json").write_text(json.dumps(content))
    if overrides:
        leave_record(folder, composed("method=evaluate", "hardware=cpu", *overrides), "done")
    return read(folder, folder.name)


def test_only_evaluations_of_the_same_problems_are_compared(tmp_path):
    first, second = (
        a_run(tmp_path / "A", [0] * 6 + [1]),
        a_run(tmp_path / "B", [4] * 7, per_problem=4),
    )
    table, note = evaluations.comparisons(
        evaluations.pairs_with_first([first, second, a_run(tmp_path / "C", [1] * 7, sha="other")])
    )
    assert [cell.text for cell in table.rows[0]] == [
        "A to B",
        *"14.3% 100.0% +85.7".split(),
        "+23.1 to +100.0",
        "6 / 0 of 7",
        "0.031",
    ]
    assert table.rows[0][-1].mark == "good"
    assert "A and C have different problems" in note.text
    assert evaluations.pairs_with_first([first]) == []


def test_mean_rewards_are_compared_with_each_other_only(tmp_path):
    runs = [a_run(tmp_path / "accuracy", [1, 0, 1])]
    for name, rewards in {"before": [0.25, 0.5, 0.5], "after": [0.5, 0.75, 0.5]}.items():
        (tmp_path / name).mkdir()
        content = {"reward": sum(rewards) / 3, "reward_per_problem": rewards}
        content |= {"samples_per_prompt": 1, "data_sha256": "s"}
        (tmp_path / name / "result.json").write_text(json.dumps(content))
        runs.append(read(tmp_path / name, name))
    (table,) = evaluations.comparisons([(runs[1], runs[2])])
    change = [cell.text for cell in table.rows[0]]
    assert (change[1:4], change[5]) == (["41.7%", "58.3%", "+16.7"], "2 / 0 of 3")
    assert "rows" not in vars(evaluations.comparisons([(runs[0], runs[1])])[-1])


def test_settings_that_make_a_comparison_unfair_are_named(tmp_path):
    settings = {
        "A": ["method.args.max_new_tokens=512"],
        "B": ["method.args.max_new_tokens=512", "method.args.batch_size=7", "model=qwen3_76m"],
        "C": ["method.args.max_new_tokens=99", "+method.rewards.accuracy=1.0"],
        "D": ["method.args.max_new_tokens=512", "data.num_heldout=7"],
    }
    first, fair, unfair, others = (
        a_run(tmp_path / name, [1] * 7, "other" if name == "D" else "s", 1, overrides)
        for name, overrides in settings.items()
    )
    assert len(evaluations.comparisons([(first, fair)])) == 1  # the table
    rewards = ["method.rewards.reasoning_gym", "method.rewards.accuracy"]
    keys = {"C": [rewards[0], "method.args.max_new_tokens", rewards[1]],
            "D": ["data.num_heldout"]}  # fmt: skip
    for run in (unfair, others):
        note = evaluations.comparisons([(first, run)])[-1]
        assert re.findall(r"([\w.]+) \(\S+ and \S+\)", note.text) == keys[run.name]


def test_a_report_of_an_evaluation(tmp_path):
    *tables, answers = evaluations.blocks(a_run(tmp_path / "A", [1, 3], per_problem=4))
    rows = {table.caption: [[cell.text for cell in row] for row in table.rows] for table in tables}
    assert rows["By task"] == [["a", "50.0%", "25.0% to 75.0%", "2", "8"]]
    assert rows["By number of samples"][-1][:2] == ["4", "100.0%"]
    assert answers.title == "4 answers, 2 of them wrong"
    assert [row[-2].text for row in answers.blocks[0].rows] == ["false", "false", "true", "true"]
