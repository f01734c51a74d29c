"""The list of benchmarks that a session with GPUs measures, and the page it makes of them."""

from __future__ import annotations

import json

import pytest

from launch.compose import groups
from launch.plan import prepare
from tests.conftest import composed
from tests.gpu import benchmarks


def test_every_benchmark_is_in_the_list():
    listed = {benchmarks.job(name).overrides[0].partition("=")[2] for name in benchmarks.BENCHMARKS}
    assert listed == {name for name in groups()["method"] if name.startswith("bench/")}


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_each_can_run_on_an_h200(name):
    job = benchmarks.job(name)
    config, _ = prepare(composed("hardware=h200", "model.init=random", *job.overrides))
    assert (config.topology.num_gpus or 1) == job.gpus


def test_the_page_shows_ours_beside_the_other_gpu_and_what_failed(tmp_path):
    row = {"shape": "8192 8192 8192", "dtype": "bf16", "op": "matmul", "values": "normal", "padding": 0, "error": None}
    columns = [{"key": "shape", "title": "m n k", "digits": None}, {"key": "tflops", "title": "TFLOPS", "digits": 1}]
    result = {"benchmark": "gemm", "figure": "tflops", "columns": columns, "device": "a GPU", "notes": ["One sentence."]}
    result["rows"] = [{**row, "tflops": 700.0}, {**row, "shape": "1 1 1", "error": "out of memory"}]
    (tmp_path / "runs/gemm/one").mkdir(parents=True)
    (tmp_path / "runs/gemm/one/result.json").write_text(json.dumps(result))
    page = benchmarks.report("h200", tmp_path)
    assert "python launch/run.py hardware=h200 method=bench/gemm" in page
    assert "| 8192 8192 8192 | 700.0 | 1,104 |" in page  # of the MI350X report
    assert "| 1 1 1 | out of memory |  |" in page
    assert "One sentence." in page
