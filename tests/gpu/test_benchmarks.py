"""Test the list of benchmarks for a GPU session, and the page of its results."""

from __future__ import annotations

import json
import re
import time

import pytest

from launch.config.compose import groups
from launch.core.errors import UserError
from launch.plan.planning import prepare
from tests.conftest import composed
from tests.gpu import benchmarks, jobs
from tests.gpu.jobs import ROOT, Job

AMD_ONLY = {"tune/tunableop", "tune/miopen", "tune/hipblaslt"}


def test_every_benchmark_and_tuning_is_in_the_list():
    listed = {benchmarks.job(name).overrides[0].partition("=")[2] for name in benchmarks.BENCHMARKS}
    assert (
        listed
        == {name for name in groups()["method"] if name.startswith(("bench/", "tune/"))} - AMD_ONLY
    )


@pytest.mark.parametrize("name", sorted(AMD_ONLY))
def test_tunings_for_amd_are_rejected_on_other_gpus(name):
    with pytest.raises(UserError, match="AMD"):
        prepare(composed("hardware=h200", "topology=single", f"method={name}"))


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_each_can_run_on_an_h200(name):
    job = benchmarks.job(name)
    config, _ = prepare(composed("hardware=h200", *job.overrides))
    assert (config.topology.num_gpus or 1) == job.gpus


def test_the_page_shows_published_figures_and_failures(tmp_path):
    row = {"shape": "8192 8192 8192", "dtype": "bf16", "op": "matmul", "values": "normal"}
    row |= {"padding": 0, "error": None}
    columns = [
        {"key": "shape", "title": "m n k", "digits": None},
        {"key": "tflops", "title": "TFLOPS", "digits": 1},
    ]
    result = {
        "benchmark": "gemm",
        "figure": "tflops",
        "columns": columns,
        "device": "a GPU",
        "notes": ["One sentence."],
    }
    result["rows"] = [
        {**row, "tflops": 700.0, "published": 1720.0, "ratio": 0.407},
        {**row, "shape": "1 1 1", "error": "out of memory"},
    ]
    (tmp_path / "runs/gemm/1").mkdir(parents=True)
    (tmp_path / "runs/gemm/1/result.json").write_text(json.dumps(result))
    page = benchmarks.report("h200", [tmp_path])
    assert "python launch/run.py hardware=h200 method=bench/gemm" in page
    assert "| m n k | TFLOPS | h200 published | ratio | mi350x published |" in page
    # The MI350X report has 1,104 TFLOPS.
    assert "| 8192 8192 8192 | 700.0 | 1,720 | 0.41 | 1,104 |" in page
    assert "| 1 1 1 | out of memory |  |  |  |" in page
    assert "One sentence." in page
    assert page.index("Not measured: matmul, mlp_loop, transformer") < page.index("## gemm")
    assert "| m n k | TFLOPS | mi350x published | ratio |" in benchmarks.report(
        "mi350x", [tmp_path]
    )
    result["rows"] = [{**row, "error": "out of memory"}]
    (tmp_path / "runs/gemm/1/result.json").write_text(json.dumps(result))
    assert "| 8192 8192 8192 | out of memory | 1,104 |" in benchmarks.report("h200", [tmp_path])


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_every_recorded_run_is_shown(hardware):
    folder = ROOT / "docs/results" / hardware
    page = benchmarks.report(hardware, [folder])
    assert {run.name for run in (folder / "runs").iterdir()} == set(
        re.findall(r"^## (\w+)", page, re.MULTILINE)
    )


def test_a_job_is_stopped_at_the_end_of_a_call(tmp_path, monkeypatch):
    (tmp_path / "long.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    began = time.monotonic()
    job = Job("long", 1, [], "none", 30, "long.py")
    jobs.run([job], "hardware=h200", tmp_path, 1, began + 1)
    assert time.monotonic() - began < 20
    assert jobs.rows_of(job, tmp_path) is None
