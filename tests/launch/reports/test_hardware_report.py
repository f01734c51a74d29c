"""Test hardware_report.json: figures next to their predictions, and stages that failed."""

from __future__ import annotations

import importlib.util
import json

import pytest

from launch.core import json_files
from launch.reports import hardware_report
from tests.conftest import ROOT
from tests.helpers.report_examples import a_benchmark, a_run, change, log, steps
from tests.helpers.report_reader import made

STAGES = {"sft": "1_sft", "gemm": "2_gemm", "broken": "3_broken", "grpo": "4_grpo"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return a pipeline: a training, a benchmark, a failure, and two phases that cannot run."""
    folder = tmp_path_factory.mktemp("hardware_report") / "1"
    place = ("hardware=mi300x", "runtime=local", "topology=single")
    log(a_run(folder / "1_sft", *place, loss=1.0), *steps(5))
    a_benchmark(folder / "2_gemm")
    record = json_files.read_json(folder / "2_gemm/record.json")
    peaks = {"peak_tflops": {"bf16": 1307.0}, "healthy": {"gemm": 0.5}}
    record["composition"]["hardware"] |= peaks
    json_files.write_json(folder / "2_gemm/record.json", record)
    a_run(folder / "3_broken", exit_code=4)
    failure = "trainers failed: HIP error: invalid device\nLast lines of ..."
    change(folder / "3_broken/record.json", failure=failure)
    not_run = {"grpo": "2 GPUs needed", "fp8": "no fp8 here"}
    change(folder / "record.json", phases=STAGES, not_run=not_run, status="failed", exit_code=4)
    return folder


def test_figures_stand_next_to_predictions_and_failures_next_to_reasons(run_dir):
    content = hardware_report.collect(run_dir)
    stages = {stage["stage"]: stage for stage in content["stages"]}
    assert {name: (stage["status"], stage["why"]) for name, stage in stages.items()} == {
        "sft": ("done", None),
        "gemm": ("failed", None),
        "broken": ("failed", "trainers failed: HIP error: invalid device"),
        "grpo": ("not run", "2 GPUs needed"),
        "fp8": ("not run", "no fp8 here"),
    }
    planned = json_files.read_json(run_dir / "1_sft/plan.json")
    [memory] = planned["memory"]
    figures = {f["figure"]: (f["measured"], f["predicted"]) for f in stages["sft"]["figures"]}
    assert figures["tokens/s"] == (1000.0, planned["speed"]["tokens_per_second"])
    assert figures["s per step"] == (2.0, planned["speed"]["step_s"])
    without_context = memory["total_gb"] - memory["parts_gb"]["context"]
    assert figures["peak memory, GB"] == (0.5, pytest.approx(without_context))
    first = stages["gemm"]["figures"][0]
    assert first["figure"] == "16384 8192 1280 bf16: TFLOPS"
    assert (first["measured"], first["predicted"], first["published"]) == (1011.0, 653.5, 1104.0)
    assert stages["gemm"]["figures"][2]["error"] == "fp8: this GPU has none"
    assert str(run_dir) not in json.dumps(content)


def test_the_page_shows_the_report_even_if_the_doctor_failed(run_dir):
    content = hardware_report.collect(run_dir) | {"doctor": {"error": "still running after 300 s"}}
    json_files.write_json(run_dir / hardware_report.FILE, content)
    shown = made(run_dir).text
    for words in ("HIP error: invalid device", "2 GPUs needed", "653.5", "still running"):
        assert words in shown


def test_the_table_of_the_documentation_has_a_row_per_report(run_dir, tmp_path):
    path = ROOT / "docs/hardware_reports.py"
    spec = importlib.util.spec_from_file_location("hardware_reports", path)
    reports = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reports)
    assert reports.page() == reports.PAGE.read_text(), "run: python docs/hardware_reports.py"
    file = tmp_path / "mi300x.json"
    json_files.write_json(file, hardware_report.collect(run_dir))
    cells = reports.table([file]).splitlines()[2].split(" | ")
    assert cells[3] == "1,011 (155%)"
    assert "broken: failed, grpo: not run" in cells[8]
    assert "(../results/reports/mi300x.json)" in cells[9]


def test_a_cpu_needs_a_smoke_run(launch):
    done = launch("hardware=cpu", "experiment=hardware_report")
    assert (done.code, done.out) == (2, "")
    assert "smoke=true" in done.err
    alone = launch("hardware=cpu", "hardware_report=true")
    assert (alone.code, alone.err.split()[0]) == (2, "hardware_report")
