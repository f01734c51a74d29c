"""Test what every benchmark does around its measurements."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import series, timing
from recipes.bench.series import Column, SeriesConfig, Table, measure
from recipes.rank import program
from recipes.rank.program import Failed, Interrupted

TABLE = Table(
    "gemm", figure="tflops", columns=[Column("shape", "m n k"), Column("tflops", "TFLOPS", 1)]
)
CASES = [
    {"shape": shape, "dtype": "bf16", "op": "matmul", "values": "normal", "padding": 0}
    for shape in ("8192 8192 8192", "1 1 1")
]


@pytest.fixture
def config(tmp_path):
    return OmegaConf.create(
        {"run_dir": str(tmp_path), "hardware": {"name": "mi350x"}, "profile": "none"}
    )


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

    actual = measure(config, args(), TABLE, CASES, work)
    assert seen == [0, 1]
    assert [row["step"] for row in lines(config)] == [1, 2]
    assert [row["tflops"] for row in actual["rows"]] == [552.0, 1.0]
    # The MI350X report has 1,104 TFLOPS.
    assert [row["ratio"] for row in actual["rows"]] == [pytest.approx(0.5), None]
    assert "8192 8192 8192" in capsys.readouterr().out


@pytest.mark.parametrize(
    "problem", [torch.OutOfMemoryError("64 GiB"), UserError("no such back end here")]
)
def test_a_case_that_fails_is_a_row_and_the_series_continues(config, capsys, problem):
    def work(case):
        if case is CASES[0]:
            raise problem
        return {"tflops": 1.0}

    actual = measure(config, args(), TABLE, CASES, work)
    assert [bool(row["error"]) for row in actual["rows"]] == [True, False]
    assert actual["rows"][0]["error"] in ("out of memory", "no such back end here")
    assert actual["rows"][0]["error"] in capsys.readouterr().out


def test_a_series_without_any_figure_fails(config):
    def work(case):
        raise UserError("no such back end here")

    with pytest.raises(
        Failed, match=r"no row could be measured; the first: 8192 8192 8192: no such back end here"
    ) as caught:
        measure(config, args(), TABLE, CASES, work)
    assert len(caught.value.result["rows"]) == 2


def test_infinite_figures_are_left_out_and_noted(config):
    actual = measure(
        config, args(), TABLE, CASES, lambda case: {"tflops": 1.0, "loss": float("nan")}
    )
    assert [row["loss"] for row in lines(config)] == [None, None]
    assert "8192 8192 8192: loss came out as inf or nan." in actual["notes"]


def test_an_error_of_torch_is_a_reason_but_not_out_of_memory():
    with pytest.raises(UserError, match="^fp8: no kernel$"), series.refusals("fp8"):
        raise RuntimeError("no kernel\nException raised from ...")
    with pytest.raises(torch.OutOfMemoryError), series.refusals("fp8"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    "bad", [b"\0" * 10, b"5", b'{"shape": "\xff"}', json.dumps(CASES[0]).encode()]
)
def test_a_corrupt_line_is_measured_again_with_all_after_it(config, capsys, bad):
    measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    with open(f"{config.run_dir}/metrics.jsonl", "rb+") as file:
        after = file.readlines()[1:]
        file.seek(0)
        file.writelines([bad + b"\n", *after])
        file.truncate()
    actual = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 2.0})
    assert [row["tflops"] for row in actual["rows"]] == [2.0, 2.0]
    assert "metrics.jsonl: line 1 " in capsys.readouterr().out


def test_time_continues_after_an_interruption(config):
    measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    kept = [{**lines(config)[0], "time_s": 100.0}]
    with open(f"{config.run_dir}/metrics.jsonl", "w") as file:
        file.write(json.dumps(kept[0]) + "\n")
    actual = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    assert actual["rows"][1]["time_s"] >= 100


def test_an_error_of_the_benchmark_itself_is_raised(config):
    with pytest.raises(ZeroDivisionError):
        measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1 / 0})


def test_below_the_gate_fails_with_the_rows(config):
    with pytest.raises(
        Failed, match=r"below method.args.fail_below=0.9 .*8192 8192 8192"
    ) as caught:
        measure(config, args(fail_below=0.9), TABLE, CASES, lambda case: {"tflops": 552.0})
    assert len(caught.value.result["rows"]) == 2
    assert len(caught.value.result["below"]) == 1
    above = measure(config, args(fail_below=0.4), TABLE, CASES, lambda case: {"tflops": 552.0})
    assert above["below"] == []


def test_a_stopped_series_resumes(config, monkeypatch):
    monkeypatch.setattr(
        series,
        "stop_asked",
        lambda: (len(lines(config)) if (config.run_dir and measured) else 0) >= 1,
    )
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
    actual = measure(config, args(), TABLE, CASES, work)
    assert measured == ["8192 8192 8192", "1 1 1"]
    assert len(actual["rows"]) == len(lines(config)) == 2


@pytest.mark.parametrize("broken_off", [0, 1])
def test_an_interrupted_case_is_measured_at_the_next_start(config, monkeypatch, broken_off):
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
    actual = measure(config, args(), TABLE, CASES, lambda case: {"tflops": 2.0})
    assert len(lines(config)) == 2
    expected = [1.0] * broken_off + [2.0] * (2 - broken_off)
    assert [row["tflops"] for row in actual["rows"]] == expected


def test_a_failed_case_is_tried_again_unless_out_of_memory(config, monkeypatch, capsys):
    problems = {"8192 8192 8192": UserError("fp8 needs torchao"), "1 1 1": torch.OutOfMemoryError()}

    def work(case):
        if case["shape"] in problems:
            raise problems[case["shape"]]
        return {"tflops": 1.0}

    cases = [*CASES, {**CASES[0], "shape": "2 2 2"}]
    measure(config, args(), TABLE, cases, work)
    problems.pop("8192 8192 8192")  # torchao was installed
    problems["2 2 2"] = UserError("measured before")
    actual = measure(config, args(), TABLE, cases, work)
    assert [row["error"] for row in actual["rows"]] == [None, "out of memory", None]
    assert [(line["step"], line["error"]) for line in lines(config)] == [
        (1, None),
        (2, "out of memory"),
        (3, None),
    ]
    assert "8192 8192 8192, which failed: fp8 needs torchao" in capsys.readouterr().out


def test_rows_of_other_cases_are_replaced(config):
    measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1.0})
    actual = measure(config, args(), TABLE, CASES[1:], lambda case: {"tflops": 2.0})
    assert [row["tflops"] for row in actual["rows"]] == [2.0]
    assert len(lines(config)) == 1


@pytest.mark.parametrize(("cases", "word"), [(CASES[1:], "fail_below=0.9"), ([], "left out")])
def test_a_series_in_vain_is_rejected_before_anything_is_measured(config, cases, word):
    table = dataclasses.replace(TABLE, notes=["all left out"])
    with pytest.raises(UserError, match=word):
        measure(config, args(fail_below=0.9), table, cases, lambda case: pytest.fail("measured"))


def test_columns_that_follow_from_all_rows_are_completed_before_the_comparison(config):
    def complete(rows):
        rows[0]["tflops"] = 1104.0
        return {"best": 0}

    result = measure(config, args(fail_below=0.9), TABLE, CASES, lambda case: {}, complete)
    assert (result["best"], result["rows"][0]["ratio"]) == (0, 1.0)


def test_a_key_that_published_rows_match_may_be_measured(config):
    bare = {key: value for key, value in CASES[0].items() if key != "dtype"}
    actual = measure(
        config, args(fail_below=0.4), TABLE, [bare], lambda case: {"dtype": "bf16", "tflops": 552.0}
    )
    assert actual["below"] == []


def test_a_smoke_runs_figures_are_compared_with_nothing(config):
    smoke = OmegaConf.merge(config, {"smoke": True})
    (actual,) = measure(smoke, args(), TABLE, CASES[:1], lambda case: {"tflops": 552.0})["rows"]
    assert actual["published"] is None


def test_a_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="smoke=true"):
        series.device_of(SeriesConfig("out"))


def test_the_number_of_timed_calls():
    calls = []
    assert (
        timing.median_ms(lambda: calls.append(1), torch.device("cpu"), warmup=2, repetitions=5) >= 0
    )
    assert len(calls) == 7
    timing.steps_ms(lambda: calls.append(1), torch.device("cpu"), warmup=1, steps=3)
    assert len(calls) == 11
