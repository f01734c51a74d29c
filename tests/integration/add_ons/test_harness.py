"""Test lm-evaluation-harness with transformers. test_exported_models.py tests it with vLLM."""

from __future__ import annotations

import importlib.util
import json

import datasets
import pytest

from tests.conftest import command

pytestmark = pytest.mark.integration

TASK = """
task: {name}
{data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: ["3", "4"]
metric_list: [{{metric: acc}}]
"""
MAP = """
def process(rows):
    return rows.map(lambda row: {"question": row["question"].strip()})
"""


def test_custom_tasks(tmp_path, monkeypatch):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("no lm-evaluation-harness (make lm-eval)")
    tasks, source, cache = (tmp_path / name for name in ("tasks", "sums", "cache"))
    tasks.mkdir()
    source.mkdir()
    file = source / "test.jsonl"
    file.write_text('{"question": "1 + 2 =", "label": 0}\n' * 6)
    datasets.load_dataset(str(source), cache_dir=str(cache))
    (cache / "sums").rename(cache / "nobody___sums")  # as if from the Hub
    own = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}"
    public = "dataset_path: nobody/sums\nprocess_docs: !function maps.process"
    for name, data in (("own_sums", own), ("public_sums", public)):
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    (tasks / "maps.py").write_text(MAP)
    prepared = sorted(cache.glob("nobody___sums/*/*/*/*"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    asked = [
        "method.args.lm_eval_tasks=[own_sums,public_sums]",
        f"+method.args.lm_eval_include={tasks}",
        "data.num_heldout=0",
    ]
    done = command(
        "hardware=mi350x",
        "method=evaluate",
        "model=qwen3_4b",
        "smoke=true",
        *asked,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("runs/*/[0-9]*/result.json")
    found = json.loads(result.read_text())["lm_eval"]
    assert found.keys() == {"own_sums", "public_sums"}
    for metrics in found.values():
        assert metrics["acc"] in (0.0, 1.0)  # all six questions are equal
        assert metrics["acc_stderr"] == 0.0
    # In a container, this folder is read-only offline.
    assert sorted(cache.glob("nobody___sums/*/*/*/*")) == prepared != []
    samples = result.parent / "samples.jsonl"
    assert not samples.exists() or not samples.read_text()
