"""The benchmarks of training as a person starts them, on a CPU: alone, and on two ranks."""

from __future__ import annotations

import json

import pytest

from tests.conftest import command

CASES = {
    "matmul": (["method=bench/matmul"], 2),
    "mlp_loop": (["method=bench/mlp_loop"], 1),
    "transformer": (["method=bench/transformer", "precision.weights=bf16"], 1),
    "scaling": (["method=bench/scaling"], 3),
    "finetune": (["method=bench/finetune", "model=qwen3_8b", "topology=ddp"], 3),
}


@pytest.mark.parametrize("name", CASES)
def test_smoke(name, tmp_path):
    overrides, num_rows = CASES[name]
    done = command("hardware=mi350x", "smoke=true", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = next(tmp_path.glob("runs/*/*/"))
    result = json.loads((run / "result.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert result["benchmark"] == name
    assert len(result["rows"]) == len(rows) == num_rows
    for row in result["rows"]:
        if row.get("precision") == "fp8":
            assert "no fp8" in row["error"]
        else:
            assert row["error"] is None
            assert row[result["figure"]] > 0
    if name == "scaling":
        one, ddp, fsdp = result["rows"]
        assert (one["num_gpus"], one["efficiency"]) == (1, 1.0)
        assert ddp["global_batch"] == fsdp["global_batch"] == 2 * one["batch"]
        assert ddp["loss"] == pytest.approx(fsdp["loss"], rel=1e-5)  # the same training, held differently
        assert any("4, 8 GPUs are left out" in note for note in result["notes"])


def test_a_benchmark_of_several_gpus_on_one(tmp_path):
    done = command("hardware=mi350x", "method=bench/scaling", "topology=single", "mode=plan", cwd=tmp_path)
    assert done.returncode == 2
    assert "it runs under ddp" in done.stderr
