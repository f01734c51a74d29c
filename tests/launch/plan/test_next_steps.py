"""Plan every command that the end of a run offers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launch import chat
from launch.config.compose import compose
from launch.config.request import Request
from launch.core import json_files
from launch.plan import next_steps, rundir, show
from launch.plan.check_files import check_files
from launch.plan.planning import make_plan, prepare
from launch.reports.run_files import kind_of
from tests.conftest import ROOT, composed, host_with, leave_model, leave_record

ALL = ["report", "evaluate", "chat", "export"]
ROWS = "data=jsonl data.path={rows}"
DOCKER = "method=grpo hardware=mi300x model=qwen3_0_6b runtime=docker runtime.shm_gb=3"


@pytest.mark.parametrize(("words", "steps"), [
    ("method=sft smoke=true hardware=mi350x runtime=local", ALL),
    (DOCKER, ALL),
    ("method=sft hardware=cpu " + ROWS, ["report", "chat", "export"]),
    ("method=sft hardware=cpu data.heldout_path={rows} " + ROWS, ALL),
    ("method=grpo hardware=cpu data=jsonl data.path={questions} data.heldout_fraction=0.5"
     " ~method.rewards.reasoning_gym +method.rewards.length=1.0", ALL),
    ("method=sft hardware=cpu data.heldout_path={chats} " + ROWS, ["report", "chat", "export"]),
    ("method=sft hardware=cpu data=ultrachat", ["report", "chat", "export"]),
    ("method=sft hardware=cpu data=gsm8k", ALL),
    ("experiment=mi300x_sft_qwen3_4b", ["report", "chat", "export"]),
    ("experiment=mi300x_single_grpo_gsm8k hardware=mi350x", ALL),
])  # fmt: skip
def test_offered_commands_can_be_planned(tmp_path, monkeypatch, words, steps):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my rows.jsonl"
    file.write_text('{"prompt": "1+1", "completion": "2", "answer": "2"}\n')
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"prompt": "{n} + 1"}}\n' for n in range(8)))
    files = {"rows": file, "questions": questions, "chats": ROOT / "examples/chat.jsonl"}
    request = Request(word.format(**files) for word in words.split())
    config = composed(*request)
    folder = tmp_path / "my runs/sft/20260101-000000-aaaaaa"
    leave_record(folder, config, "done", overrides=[*request])
    leave_model(folder / "model")
    commands = next_steps.commands(config, folder, request)
    assert [*commands] == steps
    for step, command in commands.items():
        python, program, *arguments = shlex.split(command)
        assert (python, Path(program).is_file()) == ("python", True)
        if step == "report":
            assert kind_of(Path(*arguments)) == "run"
            continue
        keys = [argument.partition("=")[0] for argument in arguments]
        assert len({*keys}) == len(keys)
        planned, _ = prepare(compose(chat.overrides(arguments) if step == "chat" else arguments))
        check_files(planned, all_lines=True)
        model = str(folder / "model")
        assert (planned.method.name, planned.model.path) == (step, model)
        assert planned.hardware.name == config.hardware.name
        if step == "evaluate" and not config.smoke:
            assert planned.data == config.data


def test_a_run_without_a_model_offers_its_report(tmp_path):
    config = composed("hardware=cpu", "method=evaluate")
    leave_record(tmp_path / "run", config, "done")
    assert [*next_steps.commands(config, tmp_path / "run", Request())] == ["report"]


def test_a_run_ends_with_its_figures_in_one_line_and_its_warning(tmp_path, capfd):
    config = composed("hardware=cpu", "name=mine")
    folder = tmp_path / "20260101-000000-aaaaaa"
    rundir.make(folder)
    result = {"status": "done", "steps": 12000, "loss": 0.123456, "exit_code": 0}
    result |= {"tokens_per_second": 12345.678, "memory_peak_gb": 123.456, "accuracy": 0.98765}
    result |= {"warning": "nothing was learned"}
    json_files.write_json(folder / "result.json", result)
    plan = make_plan(config, host_with(0), folder)
    show.show_end(config, plan, 0)
    first, *others = capfd.readouterr().out.splitlines()
    assert first == (
        "mine: done (12,000 steps, loss 0.123, 12,346 tokens/s, peak 123 GB, accuracy 98.8%)"
    )
    assert others[0] == "! nothing was learned"
    assert others[2] == "Next: report"
