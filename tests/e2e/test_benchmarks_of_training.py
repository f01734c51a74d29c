"""The benchmarks of training on a CPU: alone, and on two ranks as a person starts them."""

from __future__ import annotations

import json

import pytest

from tests.conftest import command
from tests.e2e import phases

CASES = {
    "matmul": ([], 2),
    "mlp_loop": ([], 1),
    "transformer": (["precision.weights=bf16"], 1),
    "scaling": ([], 3),
    "finetune": (["model=qwen3_8b", "topology=ddp"], 3),
}
ON_TWO_RANKS = ("scaling", "finetune")  # as a person starts them


@pytest.mark.parametrize("name", CASES)
def test_smoke(name, tmp_path):
    overrides, num_rows = CASES[name]
    if name in ON_TWO_RANKS:
        done = command("hardware=mi350x", "smoke=true", f"method=bench/{name}", *overrides, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        run = next(tmp_path.glob("runs/*/*/"))
        result = json.loads((run / "result.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    else:
        result, rows = phases.benchmark(tmp_path, name, *overrides)
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


def test_a_benchmark_of_several_gpus_on_one(launch):
    done = launch("hardware=mi350x", "method=bench/scaling", "topology=single", "mode=plan")
    assert done.code == 2
    assert "it runs under ddp" in done.err
