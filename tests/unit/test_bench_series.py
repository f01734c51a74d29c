"""What every benchmark does around its measurements."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf

from recipes.bench import series, timing
from recipes.bench.series import Column, SeriesConfig, Table, measure
from recipes.common import program
from recipes.common.errors import UserError
from recipes.common.program import Failed, Interrupted

TABLE = Table("gemm", figure="tflops", columns=[Column("shape", "m n k"), Column("tflops", "TFLOPS", 1)])
CASES = [{"shape": shape, "dtype": "bf16", "op": "matmul", "values": "normal", "padding": 0} for shape in ("8192 8192 8192", "1 1 1")]


@pytest.fixture
def config(tmp_path):
    return OmegaConf.create({"run_dir": str(tmp_path), "hardware": {"name": "mi350x"}, "profile": "none"})


def args(**given) -> SeriesConfig:
    return SeriesConfig("out", use_cpu=True, **given)


def lines(config) -> list[dict]:
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def test_a_row_for_each_case_as_soon_as_it_is_measured(config, capsys):
    seen = []

    def work(case):
        seen.append(len(lines(config)) if seen else 0)
        return {"tflops": 552.0 if case is CASES[0] else 1.0}

    found = measure(config, args(), TABLE, CASES, work)
    assert seen == [0, 1]
    assert [row["step"] for row in lines(config)] == [1, 2]
    assert [row["tflops"] for row in found["rows"]] == [552.0, 1.0]
    assert [row["ratio"] for row in found["rows"]] == [pytest.approx(0.5), None]  # 1,104 TFLOPS in the MI350X report
    assert "8192 8192 8192" in capsys.readouterr().out


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("64 GiB"), UserError("no such back end here")])
def test_a_case_that_fails_is_a_row_and_the_series_goes_on(config, capsys, problem):
    def work(case):
        if case is CASES[0]:
            raise problem
        return {"tflops": 1.0}

    found = measure(config, args(), TABLE, CASES, work)
    assert [bool(row["error"]) for row in found["rows"]] == [True, False]
    assert found["rows"][0]["error"] in ("out of memory", "no such back end here")
    assert found["rows"][0]["error"] in capsys.readouterr().out


def test_a_series_without_any_figure_fails(config):
    def work(case):
        raise UserError("no such back end here")

    with pytest.raises(Failed, match=r"no row could be measured; the first: 8192 8192 8192: no such back end here") as caught:
        measure(config, args(), TABLE, CASES, work)
    assert len(caught.value.result["rows"]) == 2


def test_figures_that_are_no_numbers_are_left_out_and_said(config):
    found = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0, "loss": float("nan")})
    assert [row["loss"] for row in lines(config)] == [None, None]
    assert "8192 8192 8192: loss came out as inf or nan." in found["notes"]


def test_what_torch_refuses_is_a_reason_and_what_memory_lacks_is_not():
    with pytest.raises(UserError, match="^fp8: no kernel$"), series.refusals("fp8"):
        raise RuntimeError("no kernel\nException raised from ...")
    with pytest.raises(torch.OutOfMemoryError), series.refusals("fp8"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("bad", [b"\0" * 10, b"5", b"[1]", b"null", b'{"shape": "\xff"}', json.dumps(CASES[0]).encode()])
def test_a_corrupt_line_is_measured_anew_with_all_after_it(config, capsys, bad):
    measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    with open(f"{config.run_dir}/metrics.jsonl", "rb+") as file:
        after = file.readlines()[1:]
        file.seek(0)
        file.writelines([bad + b"\n", *after])
        file.truncate()
    found = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 2.0})
    assert [row["tflops"] for row in found["rows"]] == [2.0, 2.0]
    assert "line 1 is no row: measured anew from there" in capsys.readouterr().out


def test_time_goes_on_after_an_interruption(config):
    measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    kept = [{**lines(config)[0], "time_s": 100.0}]
    with open(f"{config.run_dir}/metrics.jsonl", "w") as file:
        file.write(json.dumps(kept[0]) + "\n")
    found = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    assert found["rows"][1]["time_s"] >= 100


def test_an_error_of_the_benchmark_itself_is_no_row(config):
    with pytest.raises(ZeroDivisionError):
        measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1 / 0})


def test_below_the_gate_fails_with_the_rows(config):
    with pytest.raises(Failed, match=r"below method.args.fail_below=0.9 .*8192 8192 8192") as caught:
        measure(config, args(fail_below=0.9), TABLE, CASES, lambda case: {"tflops": 552.0})
    assert len(caught.value.result["rows"]) == 2
    assert len(caught.value.result["below"]) == 1
    above = measure(config, args(fail_below=0.4), TABLE, CASES, lambda case: {"tflops": 552.0})
    assert above["below"] == []


def test_a_stopped_series_goes_on_where_it_was(config, monkeypatch):
    monkeypatch.setattr(series, "stop_asked", lambda: (len(lines(config)) if (config.run_dir and measured) else 0) >= 1)
    measured: list[str] = []

    def work(case):
        measured.append(case["shape"])
        return {"tflops": 1.0}

    with pytest.raises(Interrupted):
        measure(config, args(), TABLE, CASES, work)
    assert measured == ["8192 8192 8192"]
    with open(f"{config.run_dir}/metrics.jsonl", "a") as file:
        file.write('{"step": 2, "num')  # a line cut off by a crash
    monkeypatch.setattr(series, "stop_asked", program.stop_asked)
    found = measure(config, args(), TABLE, CASES, work)
    assert measured == ["8192 8192 8192", "1 1 1"]
    assert len(found["rows"]) == len(lines(config)) == 2


@pytest.mark.parametrize("broken_off", [0, 1])
def test_a_row_that_a_stop_broke_off_is_none_and_is_measured_the_next_time(config, monkeypatch, broken_off):
    def work(case):
        if case is CASES[broken_off]:
            monkeypatch.setattr(program, "_stop_asked", True)
            raise UserError("its process ended with exit code -15")
        return {"tflops": 1.0}

    with pytest.raises(Interrupted) as stopped:
        measure(config, args(), TABLE, CASES, work)
    assert [row["tflops"] for row in stopped.value.result["rows"]] == [1.0] * broken_off
    if broken_off:
        assert len(lines(config)) == 1
    monkeypatch.setattr(program, "_stop_asked", False)
    found = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 2.0})
    assert len(lines(config)) == 2
    assert [row["tflops"] for row in found["rows"]] == [1.0] * broken_off + [2.0] * (2 - broken_off)


def test_what_failed_for_another_reason_than_memory_is_tried_again(config, monkeypatch, capsys):
    problems = {"8192 8192 8192": UserError("fp8 needs torchao"), "1 1 1": torch.OutOfMemoryError()}

    def work(case):
        if case["shape"] in problems:
            raise problems[case["shape"]]
        return {"tflops": 1.0}

    cases = [*CASES, {**CASES[0], "shape": "2 2 2"}]
    measure(config, args(), TABLE, cases, work)
    problems.pop("8192 8192 8192")  # torchao was installed
    problems["2 2 2"] = UserError("measured before")
    found = measure(config, args(), TABLE, cases, work)
    assert [row["error"] for row in found["rows"]] == [None, "out of memory", None]
    assert [(line["step"], line["error"]) for line in lines(config)] == [(1, None), (2, "out of memory"), (3, None)]
    assert "tried again: 8192 8192 8192, which failed: fp8 needs torchao" in capsys.readouterr().out


def test_rows_of_other_cases_are_measured_anew(config):
    measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    found = measure(config, args(), TABLE, CASES[1:], lambda case: {"tflops": 2.0})
    assert [row["tflops"] for row in found["rows"]] == [2.0]
    assert len(lines(config)) == 1


def test_a_gate_with_nothing_to_compare_is_refused_before_anything_is_measured(config):
    config.hardware.name = "mi50"
    with pytest.raises(UserError, match="fail_below=0.9"):
        measure(config, args(fail_below=0.9), TABLE, CASES, lambda case: pytest.fail("measured"))


def test_a_gate_over_sizes_that_nobody_published_is_refused_before_anything_is_measured(config):
    with pytest.raises(UserError, match=r"fail_below=0.9: .* of no row measured here"):
        measure(config, args(fail_below=0.9), TABLE, CASES[1:], lambda case: pytest.fail("measured"))


def test_what_a_row_is_compared_by_may_be_measured_first(config):
    bare = {key: value for key, value in CASES[0].items() if key != "dtype"}
    found = measure(config, args(fail_below=0.4), TABLE, [bare], lambda case: {"dtype": "bf16", "tflops": 552.0})
    assert found["below"] == []


def test_a_smoke_runs_figures_are_compared_with_nothing(config):
    smoke = OmegaConf.merge(config, {"smoke": True})
    (found,) = measure(smoke, args(), TABLE, CASES[:1], lambda case: {"tflops": 552.0})["rows"]
    assert found["published"] is None


def test_fail_below_is_a_ratio():
    with pytest.raises(UserError, match="fail_below=0"):
        args(fail_below=0)


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="smoke=true"):
        series.device_of(SeriesConfig("out"))


def test_a_call_is_timed_as_often_as_asked():
    calls = []
    assert timing.median_ms(lambda: calls.append(1), torch.device("cpu"), warmup=2, repetitions=5) >= 0
    assert len(calls) == 7
    timing.steps_ms(lambda: calls.append(1), torch.device("cpu"), warmup=1, steps=3)
    assert len(calls) == 11
