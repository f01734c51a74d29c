"""Smoke-train GRPO with vLLM's server on a small file of GSM8K's columns, and evaluate with vLLM.

tests/e2e/test_public_data.py runs the other experiments with public data.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.conftest import command
from tests.helpers.hub_data import write_public
from tests.integration.conftest import skip_without

pytestmark = pytest.mark.integration


def test_vllm_generates_for_grpo_and_an_evaluation(tmp_path, monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    hub_id = write_public(tmp_path / "hub", "gsm8k")
    words = [f"data.hub_id={hub_id}", "tracking=none", "smoke=true"]
    done = command("experiment=mi300x_grpo_gsm8k", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/mi300x_grpo_gsm8k/latest"
    assert (run / "logs/server.log").is_file()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all("rewards/accuracy/mean" in line and line["num_tokens"] > 0 for line in lines)

    evaluation = ["method=evaluate", "method.args.engine=vllm", "hardware=mi300x", "data=gsm8k"]
    path = f"model.path={run}/model"
    done = command(*evaluation, path, *words, "name=evaluated", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/evaluated/latest/result.json").read_text())
    assert result["num_problems"] >= 8
