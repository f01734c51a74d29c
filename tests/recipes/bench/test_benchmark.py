"""Test the parts that all benchmarks share: rows, failures, resuming and the gate."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench.benchmark import OUT_OF_MEMORY, SeriesConfig, Table, measure
from recipes.rank import program
from recipes.rank.program import Failed, Interrupted

TABLE = Table("gemm", "shape tflops", figure="tflops")
CASES = [
    {"shape": shape, "dtype": "bf16", "op": "matmul", "values": "normal", "padding": 0}
    for shape in ("8192 8192 8192", "1 1 1")
]


@pytest.fixture
def config(tmp_path):
    return OmegaConf.create(
        {"run_dir": str(tmp_path), "hardware": {"name": "mi350x"}, "profile": "none"}
    )


def args(**changes) -> SeriesConfig:
    return SeriesConfig("out", use_cpu=True, **changes)


def lines(config) -> list[dict]:
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def constant_tflops(tflops):
    return lambda case: {"tflops": tflops}


def column(result, key: str) -> list:
    return [row[key] for row in result["rows"]]


def test_each_row_is_written_before_the_next_case(config, capsys):
    written = []

    def work(case):
        written.append(len(lines(config)) if written else 0)
        return {"tflops": 552.0 if case is CASES[0] else 1.0}

    result = measure(config, args(), TABLE, CASES, work)
    assert written == [0, 1]
    assert [row["step"] for row in lines(config)] == [1, 2]
    assert column(result, "tflops") == [552.0, 1.0]
    # The MI350X report has 1,104 TFLOPS.
    assert column(result, "ratio") == [pytest.approx(0.5), None]
    assert "8192 8192 8192" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "text"), [
    (torch.OutOfMemoryError("64 GiB"), OUT_OF_MEMORY),
    (UserError("unknown back end"), "unknown back end"),
    (RuntimeError("no kernel\nException raised from ..."), "no kernel"),
])  # fmt: skip
def test_a_failed_case_is_a_row_and_the_series_continues(config, capsys, error, text):
    def work(case):
        if case is CASES[0]:
            raise error
        return {"tflops": 1.0}

    result = measure(config, args(), TABLE, CASES, work)
    assert column(result, "error") == [text, None]
    assert text in capsys.readouterr().out


def test_a_bug_ends_the_series(config):
    with pytest.raises(ZeroDivisionError):
        measure(config, args(), TABLE, CASES, lambda case: {"tflops": 1 / 0})


def test_skipped_cases_are_rows_and_a_series_without_any_figure_fails(config):
    def skip(case, rows):
        return f"{len(rows)} earlier rows"

    with pytest.raises(Failed, match="8192 8192 8192: not measured: 0 earlier rows") as failure:
        measure(config, args(), TABLE, CASES, lambda case: {}, skip=skip)
    assert column(failure.value.result, "error")[1] == "not measured: 1 earlier rows"


@pytest.mark.parametrize(
    "line", [b"\0" * 10, b"5", json.dumps(CASES[0]).encode(), json.dumps(CASES[1]).encode()]
)
def test_cases_after_an_invalid_line_are_measured_again(config, line):
    measure(config, args(), TABLE, CASES, constant_tflops(1.0))
    with open(f"{config.run_dir}/metrics.jsonl", "rb+") as file:
        following = file.readlines()[1:]
        file.seek(0)
        file.writelines([line + b"\n", *following])
        file.truncate()
    assert column(measure(config, args(), TABLE, CASES, constant_tflops(2.0)), "tflops") == [
        2.0,
        2.0,
    ]


def test_below_the_gate_fails_with_the_rows(config):
    with pytest.raises(Failed, match="method.args.fail_below=0.9") as failure:
        measure(config, args(fail_below=0.9), TABLE, CASES, constant_tflops(552.0))
    assert len(failure.value.result["rows"]) == 2
    assert len(failure.value.result["below"]) == 1
    above = measure(config, args(fail_below=0.4), TABLE, CASES, constant_tflops(552.0))
    assert above["below"] == []


def test_a_stopped_series_resumes_with_its_time(config, monkeypatch):
    measured: list[str] = []

    def work(case):
        monkeypatch.setattr(program, "_stop_requested", not measured)
        measured.append(case["shape"])
        return {"tflops": 1.0}

    with pytest.raises(Interrupted):
        measure(config, args(), TABLE, CASES, work)
    (row,) = lines(config)
    with open(f"{config.run_dir}/metrics.jsonl", "w") as file:
        file.write(json.dumps({**row, "time_s": 100.0}) + "\n")
        file.write('{"step": 2, "num')  # a line that a crash truncated
    monkeypatch.setattr(program, "_stop_requested", False)
    result = measure(config, args(), TABLE, CASES, work)
    assert measured == ["8192 8192 8192", "1 1 1"]
    assert len(result["rows"]) == len(lines(config)) == 2
    assert result["rows"][1]["time_s"] >= 100


def test_a_case_that_a_signal_interrupts_is_measured_again(config, monkeypatch):
    def work(case):
        if case is CASES[1]:
            monkeypatch.setattr(program, "_stop_requested", True)
            raise UserError("exit code -15")
        return {"tflops": 1.0}

    with pytest.raises(Interrupted) as stopped:
        measure(config, args(), TABLE, CASES, work)
    assert column(stopped.value.result, "tflops") == [1.0]
    monkeypatch.setattr(program, "_stop_requested", False)
    assert column(measure(config, args(), TABLE, CASES, constant_tflops(2.0)), "tflops") == [
        1.0,
        2.0,
    ]


def test_a_resumed_series_retries_failures_except_out_of_memory(config, capsys):
    errors = {"8192 8192 8192": UserError("fp8 needs torchao"), "1 1 1": torch.OutOfMemoryError()}

    def work(case):
        if case["shape"] in errors:
            raise errors[case["shape"]]
        return {"tflops": 1.0}

    cases = [*CASES, {**CASES[0], "shape": "2 2 2"}]
    measure(config, args(), TABLE, cases, work)
    errors.pop("8192 8192 8192")  # torchao was installed
    errors["2 2 2"] = UserError("measured twice")
    measure(config, args(), TABLE, cases, work)
    expected = [(1, None), (2, "out of memory"), (3, None)]
    assert [(line["step"], line["error"]) for line in lines(config)] == expected
    assert "8192 8192 8192, which failed: fp8 needs torchao" in capsys.readouterr().out


@pytest.mark.parametrize(("cases", "word"), [(CASES[1:], "fail_below=0.9"), ([], "left out")])
def test_a_useless_series_is_rejected_before_the_first_case(config, cases, word):
    table = dataclasses.replace(TABLE, notes=["all left out"])
    with pytest.raises(UserError, match=word):
        measure(config, args(fail_below=0.9), table, cases, lambda case: pytest.fail("measured"))


def test_smoke_runs_are_not_compared_with_published_figures(config):
    smoke = OmegaConf.merge(config, {"smoke": True})
    assert column(
        measure(smoke, args(), TABLE, CASES[:1], constant_tflops(552.0)), "published"
    ) == [None]
