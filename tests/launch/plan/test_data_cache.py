"""Test the rows' statistics and the scaled learning rate in a plan, and the key of the cache."""

from __future__ import annotations

import json

import pytest

from launch.core import json_files
from launch.plan import data_cache
from tests.conftest import composed, host_with

FIGURES = {
    "rows": 100,
    "read": 130,
    "tokens": 5000,
    "filtered": {"levels": 20},
    "duplicates": 10,
    "length": {"shortest": 10, "mean": 50.0, "longest": 90},
    "histogram": [[10, 49, 60], [50, 90, 40]],
    "max_length": 64,
    "truncated": 7,
    "packing": True,
    "packed_rows": 80,
    "efficiency": 0.9766,
    "by_level": {"0": 40, "1": 60},
}


@pytest.mark.parametrize(("how", "rate"), [("linear", 8e-5), ("sqrt", 4e-5), (None, 2e-5)])
def test_a_plan_shows_the_scaled_learning_rate(launch, how, rate):
    """The rate is 2e-5 for one sequence per step; this run has four."""
    overrides = [f"method.lr_scaling={how}", "method.lr_reference_batch=1"] if how else []
    plan = json.loads(
        launch("hardware=cpu", "model=qwen3_0_6b", *overrides, "mode=plan", "format=json").out
    )
    assert plan["trainer_args"]["learning_rate"] == pytest.approx(rate)
    words = f"method.lr_scaling={how}: learning_rate={rate:g}"
    assert any(words in line for line in plan["warnings"]) == bool(how)


def test_a_plan_describes_only_the_rows_of_its_composition(launch, tmp_path):
    config = composed("hardware=cpu", f"run_root={tmp_path}")
    cache = data_cache.for_ranks(config, host_with(0))
    json_files.write_json(tmp_path / ".cache/data/statistics" / f"{cache['key']}.json", FIGURES)
    output = launch("hardware=cpu", f"run_root={tmp_path}", "mode=plan", "verbose=true").out
    assert "100 prepared rows of 50 tokens on average, 10 to 90; 7 truncated to 64" in output
    assert "if every row" not in output  # the time is that of rows of this length
    for words in ("100 rows, lengths 10 to 90 tokens, mean 50.0", "7 rows truncated to 64 tokens"):
        assert words in output
    assert "97.7% of the tokens in a batch are not padding, packed" in output
    for other in ("data.limit=9", "method.args.max_length=32", "method=dpo"):
        page = launch("hardware=cpu", f"run_root={tmp_path}", "mode=plan", other).out
        assert "if every row" in page
        assert "data.preview=1 counts" in page


def test_the_key_changes_with_files_and_tokenizer(tmp_path):
    file, model = tmp_path / "a.jsonl", tmp_path / "model"
    model.mkdir()
    keys = []
    for path, content in (
        (file, "{}"),
        (file, "{} "),
        (model / "tokenizer.json", "a"),
        (model / "chat_template.jinja", "b"),
    ):
        path.write_text(content)
        keys.append(
            data_cache.key(
                composed("hardware=cpu", "data=jsonl", f"data.path={file}", f"model.path={model}")
            )
        )
    assert len(set(keys)) == 4


def test_the_key_changes_with_the_code_that_prepares_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(data_cache, "RECIPES", tmp_path)
    names, keys = (
        ("data/data_load.py", "data/tasks.py", "data/code_tasks.py", "models/model_build.py"),
        set(),
    )
    for folder in ("data", "models"):
        (tmp_path / folder).mkdir()
    for changed in (None, *names):
        for name in names:
            (tmp_path / name).write_text("new" if name == changed else "old")
        keys.add(tuple(data_cache._code_hashes.__wrapped__()))
    assert len(keys) == 5
