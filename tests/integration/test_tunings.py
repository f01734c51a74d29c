"""Test small tunings on the CPU, and plan the experiments that they write."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from tests.conftest import command
from tests.integration.conftest import skip_without, started, wait_until

pytestmark = pytest.mark.integration
SMALL = ["hardware=mi350x", "smoke=true", "run_root=runs"]


@pytest.mark.parametrize(("tuning", "overrides", "figure", "num_rows"), [
    ("batch", ["model=qwen3_4b", "topology=single"], "tokens_per_second", 2),
    ("inductor", ["model=qwen3_4b"], "tokens_per_second", 2),
    ("rccl", [], "bus_gb_s", 2),
    ("vllm", ["model=qwen3_4b", "topology=single"], "output_tokens_per_second", 2),
])  # fmt: skip
def test_tuning_writes_speedup_and_experiment(
    tmp_path, launch, tuning, overrides, figure, num_rows
):
    if tuning == "vllm" and importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")
    overrides = [*SMALL, f"method=tune/{tuning}", *overrides]
    if tuning == "rccl":
        stop_in_second_trial(tmp_path, *overrides)
    done = command(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result_file,) = tmp_path.glob("runs/*/[0-9]*/result.json")
    result = json.loads(result_file.read_text())
    assert [row["error"] for row in result["rows"]] == [None] * num_rows
    assert result["tuning"] == tuning
    assert result["figure"] == figure
    assert len(result["rows"]) == num_rows
    assert result["gain"] >= 1.0
    assert result["after"][figure] >= result["before"][figure] > 0
    assert result["command"] in done.stderr
    planned = launch(*shlex.split(result["command"])[2:], "mode=plan", "format=json")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    assert (plan["hardware"], plan["topology"] in ("single", "ddp")) == ("mi350x", True)
    if tuning == "vllm":
        generates = launch(*shlex.split(result["engine_command"])[2:], "mode=plan")
        assert generates.code == 0, generates.err
    for override in result["overrides"]:
        key, _, value = override.partition("=")
        if key == "method.args.per_device_train_batch_size":
            assert plan["trainer_args"]["per_device_train_batch_size"] == int(value)
        if key.startswith("user_env."):
            assert plan["processes"][0]["env"][key.removeprefix("user_env.")] == value


def stop_in_second_trial(folder: Path, *overrides: str) -> None:
    """Stop the launcher in the second trial, which the next start repeats."""
    launcher = started(*overrides, cwd=folder)
    # When the first trial has a row, the second is importing torch.
    wait_until(
        lambda: any(file.read_text() for file in folder.glob("runs/*/[0-9]*/metrics.jsonl")),
        launcher,
    )
    launcher.terminate()
    assert launcher.wait() == 75, (folder / "output").read_text()
