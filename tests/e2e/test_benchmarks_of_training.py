"""Test smoke runs of the training benchmarks of one rank; test_two_ranks.py has the others."""

from __future__ import annotations

import pytest

from tests.e2e import phases

CASES = {
    "matmul": ([], 2),
    "mlp_loop": ([], 1),
    "transformer": (["precision.weights=bf16"], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_smoke(name, tmp_path):
    overrides, num_rows = CASES[name]
    phases.check_rows(name, num_rows, *phases.benchmark(tmp_path, name, *overrides))


def test_a_benchmark_of_several_gpus_on_one(launch):
    done = launch("hardware=mi350x", "method=bench/scaling", "topology=single", "mode=plan")
    assert done.code == 2
    assert "Use: topology=ddp" in done.err
