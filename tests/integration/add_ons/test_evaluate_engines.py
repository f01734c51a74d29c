"""Evaluations with what is not in every environment: vLLM's build for the CPU, and lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.conftest import command
from tests.integration.conftest import lacking

pytestmark = pytest.mark.integration

SMALL = ["hardware=mi350x", "method=evaluate", "model=qwen3_4b", "smoke=true"]
ENDS_WITHIN_S = 600  # of an engine's start, on two cores that do something else too
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


def evaluated(folder: Path, *overrides: str) -> tuple[dict, list[dict]]:
    """result.json and the lines of samples.jsonl."""
    folder.mkdir()
    done = command(*SMALL, *overrides, cwd=folder, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = folder.glob("runs/*/*/")
    samples = run / "samples.jsonl"
    lines = samples.read_text().splitlines() if samples.is_file() else []
    return json.loads((run / "result.json").read_text()), [json.loads(line) for line in lines]


def test_vllm_gives_the_greedy_answers_of_transformers(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        lacking("no vLLM (make vllm)")
    result, by_vllm = evaluated(tmp_path / "vllm", "method.args.engine=vllm")
    expected, by_transformers = evaluated(tmp_path / "transformers")
    assert len(by_vllm) == result["num_samples"] == 8
    assert [row["completion"] for row in by_vllm] == [row["completion"] for row in by_transformers]
    assert [row["num_tokens"] for row in by_vllm] == [row["num_tokens"] for row in by_transformers]
    assert result["data_sha256"] == expected["data_sha256"]


def test_a_task_of_ones_own_in_the_harness(tmp_path):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("no lm-evaluation-harness (make lm-eval)")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "sums.jsonl").write_text('{"question": "1 + 2 =", "label": 0}\n' * 6)
    (tasks / "sums.yaml").write_text(TASK.format(data=tasks / "sums.jsonl"))
    asked = ["method.args.lm_eval_tasks=[own_sums]", f"+method.args.lm_eval_include={tasks}", "data.num_heldout=0"]
    result, samples = evaluated(tmp_path / "run", *asked)
    assert result["lm_eval"]["own_sums"]["acc"] in (0.0, 1.0)  # six times the same question
    assert (result["lm_eval"]["own_sums"]["acc_stderr"], samples) == (0.0, [])
    unknown = command(*SMALL, "method.args.lm_eval_tasks=[gsm8]", cwd=tmp_path, timeout=ENDS_WITHIN_S)
    assert unknown.returncode == 2, unknown.stdout
    assert "'gsm8', which lm-evaluation-harness does not know. Did you mean gsm8k" in unknown.stdout
