"""An exported model, asked by vLLM's build for the CPU and by transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.conftest import command
from tests.integration.conftest import lacking

pytestmark = pytest.mark.integration

ENDS_WITHIN_S = 900  # four phases, one of which starts an engine, on two cores that do something else too
PHASES = [
    '{name: sft, overrides: ["method=sft"]}',
    '{name: export, model_from: sft, overrides: ["method=export", "method.args.weights=bf16"]}',
    '{name: vllm, model_from: export, overrides: ["method=evaluate", "method.args.engine=vllm"]}',
    '{name: transformers, model_from: export, overrides: ["method=evaluate"]}',
]


def completions(run: Path) -> list[str]:
    return [json.loads(line)["completion"] for line in (run / "samples.jsonl").read_text().splitlines()]


def test_vllm_and_transformers_answer_alike_with_an_exported_model(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        lacking("no vLLM (make vllm)")
    done = command("hardware=cpu", "smoke=true", f"phases=[{', '.join(PHASES)}]", cwd=tmp_path, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (by_vllm,) = tmp_path.glob("runs/*/*/3_vllm")
    by_transformers = by_vllm.with_name("4_transformers")
    assert len(completions(by_vllm)) == 8
    assert completions(by_vllm) == completions(by_transformers)
