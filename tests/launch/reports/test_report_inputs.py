"""Test launch/report.py with hostile strings, values of any type, large runs and bad arguments."""

from __future__ import annotations

import shutil

import pytest

from launch import report
from launch.core import json_files
from launch.reports import html_page
from tests.helpers.report_examples import HOSTILE, a_benchmark, a_run, a_sweep, change, log, steps
from tests.helpers.report_reader import Outline, made


def test_hostile_strings_are_text(tmp_path):
    hostile = f'"{HOSTILE}"\x00\x1b[31m'
    folder = a_run(
        tmp_path / HOSTILE.replace("/", "∕"),
        benchmark=hostile,
        rows=[{hostile: hostile}],
        notes=[hostile],
        by_task={hostile: {hostile: 1}},
    )
    log(folder, {"step": 1, hostile: 1.0}, {"step": 2, hostile: 2.0})
    change(
        folder / "plan.json",
        warnings=[hostile],
        speed={"basis": hostile, "step_s": 1.0},
        targets={hostile: {"value": 1, "source": hostile}},
    )
    html = html_page.render(report.build(report.parse([str(folder)])))
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "\x00" not in html
    assert "49" not in Outline(html).text.split()
    assert HOSTILE in made(folder).text


def test_a_page_of_a_config_alone(tmp_path):
    folder = tmp_path / "r"
    json_files.write_text(folder / "config.yaml", "method: {name: sft}\n")
    assert "There is no record of how the run ended." in made(folder).text
    json_files.write_text(folder / "config.yaml", "a: [")
    json_files.write_text(folder / "record.json", "{")
    json_files.write_json(folder / "plan.json", {"processes": 3, "warnings": ["w"]})
    text = made(folder).text
    assert "record.json: cannot be read" in text
    assert "config.yaml: cannot be read" in text
    assert "Cannot be shown" in text


@pytest.mark.parametrize("odd", [None, "x", [[1]], {"a": {"b": [1]}}])
@pytest.mark.parametrize("name", ["record", "plan", "result"])
def test_values_of_any_type_are_rendered(tmp_path, name, odd):
    folder = log(a_benchmark(tmp_path / "b"), *steps(3))
    file = folder / f"{name}.json"
    content = json_files.read_json(file)
    for key, value in content.items():
        inner = (
            [{**value, k: odd} for k in value]
            if isinstance(value, dict) and key not in ("packages", "locks")
            else []
        )
        for changed in (odd, *inner):
            json_files.write_json(file, {**content, key: changed})
            assert report.build(report.parse([str(folder)])).sections
    assert html_page.render(report.build(report.parse([str(folder)])))


def test_many_lines_keep_the_page_small(tmp_path):
    folder = a_run(tmp_path / "r")
    lines = [
        {"step": n, "num_steps": 20_000, "time_s": n * 0.1, "loss": n % 7, "reward": n % 5}
        for n in range(20_000)
    ]
    lines[10_001]["loss"] = 99
    log(folder, *lines)
    html = html_page.render(report.build(report.parse([str(folder)])))
    assert len(html) < 1_000_000
    assert (
        "99" in html.partition("data-chart")[2].partition("</figure>")[0]
    )  # the one spike is among them


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "Name one sweep, or one or more runs"),
    (["runz"], "Did you mean runs?"),
    (["runs/x/1/config.yaml"], "runs/x/1/config.yaml is not the directory of a run"),
    (["runs"], "runs is not the directory of a run"),
    (["runs/x"], "/runs/x/1."),
    (["runs/x/1", "outptu=a.html"], "Did you mean output?"),
    (["runs/x/1", "output=a.html", "output=b.html"], "output=a.html, b.html: "),
    (["runs/x/1", "output=a.pdf"], "output=a.pdf: "),
    (["x" * 5000], "is not the directory of a run"),
    (["runs/x/1", "output=" + "x" * 300 + ".html"], "File name too long"),
    (["runs/x/1", "output=d.html"], "d.html: cannot be written"),
    (["runs/x/1", "output=file/a.html"], "file/a.html: cannot be written"),
    (["--open", "runs/x/1"], "--open"),
    (["runs/sweeps/s", "runs/x/1"], "sweep"),
    (["bad"], "bad/sweep.json"),
    (["cut"], "cut/sweep.json is damaged"),
])  # fmt: skip
def test_bad_input_is_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    log(a_run(tmp_path / "runs/x/1"), *steps(1))
    a_sweep(tmp_path / "other", [])
    shutil.move(tmp_path / "other/runs/sweeps", tmp_path / "runs/sweeps")
    (tmp_path / "d.html").mkdir()
    (tmp_path / "file").write_text("")
    json_files.write_text(tmp_path / "bad/sweep.json", "[]")
    json_files.write_text(tmp_path / "cut/sweep.json", '{"trials": [{"number": 0}]}')
    assert report.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("output", ["report.html", "compared.html"])
def test_an_existing_page_is_replaced(tmp_path, output):
    for name in ("1", "2"):
        log(a_run(tmp_path / "x" / name), *steps(3))
    for _ in range(2):
        paths = sorted(str(path) for path in (tmp_path / "x").iterdir())
        assert report.main([*paths, paths[0], f"output={tmp_path / 'x' / output}"]) == 0
    assert "2 runs" in (tmp_path / "x" / output).read_text()
    (tmp_path / "x/other.html").write_text("")  # of another program
    assert report.main([str(tmp_path / "x/1"), str(tmp_path / "x/other.html")]) == 2
    assert report.main([str(tmp_path / "x" / output)]) == 2
