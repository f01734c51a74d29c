"""Smoke-train the experiments with public data, on small files of the published columns.

The runs are planned as on a machine without vLLM, and execute in this process.
"""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from launch.config import smoke
from launch.config.compose import compose
from launch.config.request import Request
from launch.plan.planning import make_plan, prepare
from launch.study import pipeline
from recipes.rank import program
from tests.conftest import ROOT, host_with
from tests.e2e import phases
from tests.helpers.hub_data import write_public


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke, "_has_vllm", lambda config: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes of rewards
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("experiment", "data", "metric"), [
    ("chat_sft", "ultrachat", "mean_token_accuracy"),
    ("preferences_dpo", "ultrafeedback", "rewards/margins"),
    ("mi300x_sft_qwen3_4b", "ultrachat", "mean_token_accuracy"),
    ("mi50_baseline", "numina_math", "mean_token_accuracy"),
    ("mi50_phase1", "numina_math", "mean_token_accuracy"),
    ("mi50_phase2", "numina_math", "mean_token_accuracy"),
    ("mi50_phase3", "numina_math", "mean_token_accuracy"),
    ("mi50_lora", "numina_math", "mean_token_accuracy"),
    ("one_card_sft", "ultrachat", "mean_token_accuracy"),
    ("strix_halo_sft", "ultrachat", "mean_token_accuracy"),
    ("rx7900xtx_grpo_gsm8k_lora", "gsm8k", "rewards/accuracy/mean"),
    ("mi300x_single_grpo_gsm8k", "gsm8k", "rewards/accuracy/mean"),
    ("mi350x_grpo_gsm8k", "gsm8k", "rewards/accuracy/mean"),
])  # fmt: skip
def test_experiment_trains_on_the_published_columns(tmp_path, experiment, data, metric):
    hub_id = write_public(tmp_path / "hub", data)
    hardware = ["hardware=mi300x"] if experiment in ("chat_sft", "preferences_dpo") else []
    words = [f"experiment={experiment}", *hardware, f"data.hub_id={hub_id}", "tracking=none"]
    config, _ = prepare(compose([*words, "smoke=true"]))
    plan = make_plan(config, host_with(0), tmp_path / "run")
    recipe = phases.WORK[config.method.name]
    assert program.run(recipe, ["--config", str(phases.written(plan))]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(metric in line and line["num_tokens"] > 0 for line in lines)
    assert Path("run/model/model.safetensors").is_file()


def test_reasoning_phases_train_on_the_published_columns(tmp_path):
    """`datasets` prefers a directory of the name of a data set on the Hub."""
    write_public(tmp_path / "AI-MO/NuminaMath-CoT", "numina_math")
    write_public(tmp_path / "openai/gsm8k", "gsm8k")
    words = ["experiment=mi300x_reasoning_qwen3_4b", "smoke=true", "tracking=none"]
    plans = pipeline.make_plans(compose(words), Request(words), host_with(0), tmp_path / "run")
    results = dict(phases.run(plans))
    assert {results[phase]["steps"] for phase in ("sft", "grpo")} == {2}
    evaluations = [results[f"evaluate_{model}"] for model in ("base", "sft", "grpo", "gsm8k")]
    assert all(result["num_problems"] >= 8 for result in evaluations)
