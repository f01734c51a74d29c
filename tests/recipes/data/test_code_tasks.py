"""Test generated programming problems: solutions pass, and splits are disjoint."""

import json

from omegaconf import OmegaConf

from launch.core.json_files import plain
from launch.schema import Data
from recipes.data import code_tasks
from recipes.data.data_load import load, load_heldout
from recipes.rewards.verify_code import extract_code, parse_tests


def data(**changes):
    tasks = [{"name": name, "level": 1, "weight": 1.0, "config": {}} for name in code_tasks.KINDS]
    own = {"kind": "code", "name": "code", "tasks": tasks, "num_train": 60, "num_heldout": 30}
    return OmegaConf.create({**plain(Data()), **own, **changes})


def test_solutions_pass_their_tests_and_differ():
    train, heldout = code_tasks.generate(data())
    assert (len(train), len(heldout)) == (60, 30)
    for problem in [*train, *heldout]:
        language, code = extract_code(problem["completion"][0]["content"])
        space = {}
        exec(code, space)  # ours: the tables of code_tasks.py
        tests = parse_tests(problem["tests"])
        assert (language, len(tests)) == ("python", code_tasks.NUM_TESTS)
        results = [json.loads(json.dumps(eval(test["call"], space))) for test in tests]
        assert results == [test["expected"] for test in tests]
    assert len({problem["answer"] for problem in heldout}) > 25


def test_splits_are_disjoint_and_depend_on_the_seed():
    train, heldout = code_tasks.generate(data())
    trained, measured = ({p["prompt"][0]["content"] for p in part} for part in (train, heldout))
    assert not trained & measured
    assert code_tasks.generate(data()) == (train, heldout)
    assert code_tasks.generate(data(seed=1))[1] != heldout


def test_rows_have_the_fields_of_each_method():
    assert load(data(), "sft").rows.column_names == ["prompt", "completion"]
    assert load(data(), "grpo").rows.column_names == ["prompt", "answer", "task", "level", "tests"]
    assert {"prompt", "answer", "tests"} <= load_heldout(data())[0].keys()
