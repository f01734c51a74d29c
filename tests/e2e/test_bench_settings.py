"""Test collectives on two gloo ranks: results, settings in their own processes, failed rows.

Also test the product in fp8 that torch compiles; the one in fp32 takes a minute to tune.
"""

from __future__ import annotations

import json

import torch

from recipes.bench import gemm
from tests.conftest import command

SMALL = ["hardware=mi350x", "method=bench/collectives", "smoke=true", "method.smoke.max_bytes=8192"]


def test_settings_and_one_that_fails(tmp_path):
    # Without PYTHONPATH, a process cannot import its program.
    settings = "method.smoke.settings=[{PYTHONPATH: null}]"
    done = command(*SMALL, settings, "method.args.ranks=[2,4]", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.glob("runs/*/[0-9]*/")
    result = json.loads((run / "result.json").read_text())
    rows = result["rows"]
    assert len(rows) == 2 * 5 * 2
    by_setting = {
        row["setting"]: [other for other in rows if other["setting"] == row["setting"]]
        for row in rows
    }
    assert list(by_setting) == ["as configured", "PYTHONPATH unset"]
    for row in by_setting["as configured"]:
        assert row["error"] is None
        assert min(row["us"], row["algorithm_gb_s"], row["bus_gb_s"]) > 0
    first, *others = by_setting["PYTHONPATH unset"]
    assert "process ended with exit code 1" in first["error"]
    assert all(
        row["error"].startswith("not measured: rank 1: the measuring process ended")
        for row in others
    )
    assert any(note.startswith("4 ranks are left out") for note in result["notes"])


def test_a_compiled_product_in_fp8_equals_the_eager_one():
    # Sums of integers do not depend on the order.
    case = {"dtype": "fp8", "op": "compiled", "values": "integers", "padding": 0}
    products = []
    for op in ("compiled", "matmul"):
        torch.manual_seed(0)
        products.append(gemm.product(32, 16, 48, {**case, "op": op}, torch.device("cpu"))())
    assert products[0].count_nonzero() > 0
    assert torch.equal(products[0], products[1])
