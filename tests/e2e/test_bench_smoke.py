"""Test smoke runs of attention, data loader and training benchmarks on the CPU."""

from __future__ import annotations

import pytest

from tests.e2e import phases

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
    result, lines = phases.benchmark(tmp_path, name, *overrides)
    assert (result["status"], result["benchmark"], result["figure"], result["device"]) == (
        "done",
        name,
        figure,
        "CPU",
    )
    assert (
        len({tuple(row[key] for key in keys) for row in result["rows"]})
        == len(result["rows"])
        == count
    )
    measured = [row for row in result["rows"] if row["error"] is None]
    assert measured
    assert all(row[figure] > 0 for row in measured)
    assert [line["step"] for line in lines] == list(range(1, count + 1))
    assert {column["key"] for column in result["columns"]} <= {
        key for row in measured for key in row
    }


def test_an_adapter_is_refused_where_none_is_trained(launch):
    done = launch(
        "hardware=mi350x", "method=bench/precision", "model=qwen3_0_6b", "adapter=lora", "mode=plan"
    )
    assert done.code == 2
    assert "adapter=lora takes no effect" in done.err
