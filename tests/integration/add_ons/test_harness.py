"""Test lm-evaluation-harness with transformers. test_exported_models.py tests it with vLLM."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.conftest import command

pytestmark = pytest.mark.integration

TASK = """
task: own_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: ["3", "4"]
metric_list: [{{metric: acc}}]
"""


def test_custom_task(tmp_path):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("no lm-evaluation-harness (make lm-eval)")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "sums.jsonl").write_text('{"question": "1 + 2 =", "label": 0}\n' * 6)
    (tasks / "sums.yaml").write_text(TASK.format(data=tasks / "sums.jsonl"))
    asked = [
        "method.args.lm_eval_tasks=[own_sums]",
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
    (file,) = tmp_path.glob("runs/*/[0-9]*/result.json")
    found = json.loads(file.read_text())["lm_eval"]["own_sums"]
    assert found["acc"] in (0.0, 1.0)  # all six questions are equal
    assert found["acc_stderr"] == 0.0
    assert [
        line
        for samples in file.parent.glob("samples.jsonl")
        for line in samples.read_text().splitlines()
    ] == []
