"""Plan every command that the end of a run offers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launch import chat, run
from launch.config.request import Request
from launch.core import json_files
from launch.plan import next_steps, rundir, show
from launch.plan.planning import make_plan
from launch.reports.run_files import kind_of
from tests.conftest import composed, host_with, leave_model, leave_record

ALL = ["report", "evaluate", "chat", "export"]
TRAINED = {
    "method=sft hardware=cpu": ALL,
    "method=sft hardware=mi300x model=qwen3_0_6b runtime=docker": ALL,
    "method=grpo hardware=mi300x model=qwen3_0_6b user_env.A=1": ALL,
    "method=sft smoke=true hardware=mi350x runtime=local": ALL,
    "method=sft hardware=cpu data=jsonl data.path={rows}": ["report", "chat", "export"],
    "method=sft hardware=cpu data=jsonl data.path={rows} data.heldout_path={rows}": ALL,
    "experiment=mi300x_sft_qwen3_4b": ALL,
    "method=dpo hardware=cpu data.tasks=[{{name: chain_sum, level: 0}}] seed=3": ALL,
}


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "my rows.jsonl"
    file.write_text('{"prompt": "1+1", "completion": "2", "answer": "2"}\n')
    return f"'{file}'"


@pytest.mark.parametrize(("words", "steps"), TRAINED.items(), ids=TRAINED)
def test_offered_commands_can_be_planned(tmp_path, monkeypatch, capfd, rows, words, steps):
    monkeypatch.chdir(tmp_path)
    request = Request(shlex.split(words.format(rows=rows), posix=False))
    request = Request(word.replace("'", "") if "rows" in word else word for word in request)
    request = Request(
        f"{k}='{v}'" if " " in v and "[" not in v else f"{k}={v}"
        for k, _, v in (w.partition("=") for w in request)
    )
    config = composed(*request)
    folder = tmp_path / "my runs/sft/20260101-000000-aaaaaa"
    leave_record(folder, config, "done", overrides=[*request])
    leave_model(folder / "model")
    commands = next_steps.commands(config, folder, request)
    assert [*commands] == steps
    mains = {"run.py": run.main, "chat.py": chat.main}
    for command in commands.values():
        python, program, *arguments = shlex.split(command)
        assert (python, Path(program).is_file()) == ("python", True)
        if Path(program).name == "report.py":
            assert kind_of(Path(arguments[0])) == "run"
        else:
            assert mains[Path(program).name]([*arguments, "mode=plan"]) == 0, capfd.readouterr()


def test_a_run_without_a_model_offers_its_report(tmp_path):
    config = composed("hardware=cpu", "method=evaluate")
    leave_record(tmp_path / "run", config, "done")
    assert [*next_steps.commands(config, tmp_path / "run", Request())] == ["report"]


def test_a_run_ends_with_one_line_of_rounded_figures(tmp_path, capfd):
    config = composed("hardware=cpu", "name=mine")
    folder = tmp_path / "20260101-000000-aaaaaa"
    rundir.make(folder)
    result = {"status": "done", "steps": 12000, "loss": 0.123456, "exit_code": 0}
    result |= {"tokens_per_second": 12345.678, "memory_peak_gb": 123.456, "accuracy": 0.98765}
    json_files.write_json(folder / "result.json", result)
    plan = make_plan(config, host_with(0), folder)
    show.show_end(config, plan, 0)
    first, *others = capfd.readouterr().out.splitlines()
    assert first == (
        "mine: done (12,000 steps, loss 0.123, 12,346 tokens/s, peak 123 GB, accuracy 98.8%)"
    )
    assert others[1] == "Next: report"
