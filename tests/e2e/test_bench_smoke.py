"""Benchmarks of attention, the data loader and training steps, started as a person starts them, on the CPU."""

from __future__ import annotations

import json

import pytest

from tests.conftest import command

# benchmark -> (overrides, figure, keys of its rows whose values tell them apart, number of rows)
SMOKE = {
    "attention": ([], "tflops", ("backend", "pass"), 18),
    "dataloader": ([], "samples_per_second", ("num_workers", "with_step"), 4),
    "batch_size": (["model=qwen3_4b", "adapter=lora"], "tokens_per_second", ("batch_size",), 3),
    "precision": (["model=qwen3_0_6b"], "slowdown", ("precision",), 5),
    "checkpointing": (["model=qwen3_4b"], "slowdown", ("mode",), 3),
}


@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_run_measures_every_row(name, tmp_path):
    overrides, figure, keys, count = SMOKE[name]
    done = command("hardware=mi350x", f"method=bench/{name}", "smoke=true", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("runs/*/*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["benchmark"], result["figure"], result["device"]) == ("done", name, figure, "CPU")
    assert len({tuple(row[key] for key in keys) for row in result["rows"]}) == len(result["rows"]) == count
    measured = [row for row in result["rows"] if row["error"] is None]
    assert measured
    assert all(row[figure] > 0 for row in measured)
    lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, count + 1))
    assert {column["key"] for column in result["columns"]} <= {key for row in measured for key in row}


def test_an_adapter_is_refused_where_none_is_trained(tmp_path):
    done = command("hardware=mi350x", "method=bench/precision", "model=qwen3_0_6b", "adapter=lora", "mode=plan", cwd=tmp_path)
    assert done.returncode == 2
    assert "adapter=lora with method=bench/precision: it trains none" in done.stderr
