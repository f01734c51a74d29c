"""Smoke-train the experiments with public data, on small files of the published columns."""

from __future__ import annotations

import json

import pytest

from tests.conftest import command
from tests.helpers.hub_data import write_public

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("experiment", "data", "metric"), [
    ("chat_sft", "ultrachat", "mean_token_accuracy"),
    ("preferences_dpo", "ultrafeedback", "rewards/margins"),
    ("mi50_phase3", "numina_math", "mean_token_accuracy"),
    ("mi50_lora", "numina_math", "mean_token_accuracy"),
    ("mi300x_grpo_gsm8k", "gsm8k", "rewards/accuracy/mean"),
    ("rx7900xtx_grpo_gsm8k_lora", "gsm8k", "rewards/accuracy/mean"),
])  # fmt: skip
def test_experiment_trains_on_the_published_columns(
    tmp_path, monkeypatch, experiment, data, metric
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    hub_id = write_public(tmp_path / "hub", data)
    hardware = ["hardware=mi300x"] if experiment in ("chat_sft", "preferences_dpo") else []
    words = [f"experiment={experiment}", *hardware, f"data.hub_id={hub_id}", "tracking=none"]
    done = command(*words, "smoke=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / experiment / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(metric in line and line["num_tokens"] > 0 for line in lines)
    assert (run / "model/model.safetensors").is_file()


def test_reasoning_phases_train_on_the_published_columns(tmp_path, monkeypatch):
    """`datasets` prefers a directory of the name of a data set on the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_public(tmp_path / "AI-MO/NuminaMath-CoT", "numina_math")
    write_public(tmp_path / "openai/gsm8k", "gsm8k")
    name = "mi300x_reasoning_qwen3_4b"
    done = command(f"experiment={name}", "smoke=true", "tracking=none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = {
        path.parent.name[2:]: json.loads(path.read_text())
        for path in (tmp_path / "runs" / name / "latest").glob("*/result.json")
    }
    assert {results[phase]["steps"] for phase in ("sft", "grpo")} == {2}
    evaluations = [results[f"evaluate_{model}"] for model in ("base", "sft", "grpo", "gsm8k")]
    assert all(result["num_problems"] >= 8 for result in evaluations)
