"""Test smoke runs of benchmarks of one rank on the CPU; test_two_ranks.py has the others."""

from __future__ import annotations

import pytest

from tests.e2e import phases

# benchmark -> (overrides, figure, keys that identify a row, number of rows)
SMOKE = {
    "attention": ([], "tflops", ("backend", "pass"), 20),
    "dataloader": ([], "samples_per_second", ("num_workers", "with_step"), 4),
    "batch_size": (["model=qwen3_4b", "adapter=lora"], "tokens_per_second", ("batch_size",), 3),
    "precision": (["model=qwen3_0_6b"], "slowdown", ("precision",), 5),
    "checkpointing": (["model=qwen3_4b"], "slowdown", ("mode",), 3),
}


@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_run_measures_every_row(name, tmp_path):
    overrides, figure, keys, count = SMOKE[name]
    result, lines = phases.benchmark(tmp_path, name, *overrides)
    keys_of_result = ("status", "benchmark", "figure", "device")
    assert [result[key] for key in keys_of_result] == ["done", name, figure, "CPU"]
    rows = result["rows"]
    assert len({tuple(row[key] for key in keys) for row in rows}) == len(rows) == count
    measured = [row for row in result["rows"] if row["error"] is None]
    assert measured
    assert all(row[figure] > 0 for row in measured)
    assert [line["step"] for line in lines] == list(range(1, count + 1))
    assert {column["key"] for column in result["columns"]} <= {
        key for row in measured for key in row
    }


CASES = {"matmul": ([], 2), "mlp_loop": ([], 1), "transformer": (["precision.weights=bf16"], 1)}


@pytest.mark.parametrize("name", CASES)
def test_a_training_benchmark_of_one_rank(name, tmp_path):
    overrides, num_rows = CASES[name]
    phases.check_rows(name, num_rows, *phases.benchmark(tmp_path, name, *overrides))
