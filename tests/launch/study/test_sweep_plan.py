"""Test -m mode=plan, which writes nothing, and invalid sweeps, which are rejected."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import UserError
from launch.study import sweep_plan, sweep_report
from launch.study.trials import (
    Trial,
    check_metric,
    check_metric_early,
    plan_trial,
    run_metrics,
)
from tests.conftest import composed, host_with, leave_record
from tests.docs.test_commands import FILES

ONE_GPU = ["hardware=mi300x", "model=qwen3_4b", "topology=single"]


def sweep_commands() -> list[str]:
    """Return the sweeps in README, docs/ and conf/, which test_documented_commands skips."""
    found = set()
    for file in FILES:
        for line in file.read_text().splitlines():
            if "python launch/run.py -m " in line and "<" not in line:
                command = line.split("python launch/run.py ", 1)[1]
                found.add(re.split(r"`|  #| \| ", command)[0].strip())
    return sorted(found)


@pytest.mark.parametrize("text", sweep_commands())
def test_every_documented_sweep_plans(launch, tmp_path, text):
    done = launch(*shlex.split(text), "mode=plan")
    assert done.code == 0, done.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def planned(launch):
    def call(*overrides: str) -> dict:
        return json.loads(launch("-m", *overrides, "mode=plan", "format=json").out)

    return call


def test_the_plan_of_a_search(launch, planned, monkeypatch):
    done = launch("-m", "sweep=grpo", *ONE_GPU, "mode=plan")
    assert done.code == 0
    assert "method.args.num_generations, values [4, 8, 16]" in done.out
    assert "24 trials, to maximize reward, 8 in parallel, each on 1 GPU(s): 0; 1; 2; 3" in done.out
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3,6,7")
    two_gpus = ["hardware=mi300x", "model=qwen3_4b", "topology=ddp", "topology.num_gpus=2"]
    plan = planned("sweep=lora_rank", *two_gpus)
    assert (plan["at_once"], plan["gpu_sets"], plan["num_trials"]) == (2, [[2, 3], [6, 7]], 20)
    assert plan["space"]["rank"]["values"] == [8, 16, 32, 64, 128]
    assert plan["first"]["adapter"] == "lora"
    assert Path(plan["directory"]).parent.name == "sweeps"


def test_the_plan_of_a_grid_names_every_trial(planned):
    plan = planned("hardware=cpu", "seed=0,1", "model=tiny")
    assert [trial["varied"] for trial in plan["trials"]] == [["seed=0"], ["seed=1"]]
    assert (plan["at_once"], plan["gpu_sets"]) == (1, [])


def test_trials_that_cannot_run_are_named(launch, planned):
    grid = ["hardware=mi300x", "topology=ddp", "model=qwen3_4b,llama3_1_70b", "speed=off"]
    done = launch("-m", *grid, "mode=plan")
    assert done.code == 0  # as for a single plan that does not fit
    assert "! [1] trainers needs 1286.5 GB on each of its GPUs" in done.out
    plan = planned(*grid, "seed=1,x")
    assert (list(plan["refused"]), list(plan["lacking"])) == (["1", "3"], ["2"])
    refused = launch("-m", *grid, "seed=1,x", "mode=plan")
    assert refused.code == 2
    assert "[1] seed: Value 'x'" in refused.err


def test_equal_sweeps_share_a_directory_and_others_do_not(planned):
    def directory(*overrides: str) -> str:
        return planned("sweep=grpo", *ONE_GPU, *overrides)["directory"]

    same = directory("sweep.num_trials=99", "sweep.parallel=2", "verbose=true")
    others = map(directory, ("seed=1", "sweep.metric=kl", "sweep.space.kl.values=[0.0]"))
    assert directory() == same
    assert len({same, *others}) == 4


REFUSED = {
    "sweep=grpo": "launch/run.py -m ",
    "sweep.num_trials=5 hardware=cpu": "sweep.num_trials=5: ",
    "-m sweep=grpo hardware=mi300x model=qwen3_4b method=sft": "method.args.num_generations=8: ",
    "-m sweep=grpo seed=0,1": "seed=0, ...: ",
    "-m sweep=grpo method.args.beta=0.1": "'~sweep.space.kl'",
    "-m seed=0,1 hydra/launcher=submitit_slurm": "runtime=slurm submits",
    "-m sweep=grpo sweep.space.k.values=[1]": "Did you mean kl?",
    "-m sweep=grpo sweep.space.kl.key=method.args.betta": "Did you mean beta",
    "-m sweep=grpo sweep.num_trials=0": "sweep.num_trials=0: ",
    "-m seed=0,1 resume=there": "resume=there ",
    "-m seed=0,1 sweep.metric=accuracy": "Use sweep.direction=maximize",
    "-m +sweep.space={a:{key:seed,values:[0,1]}}": "sweep.name=<name>",
    "-m seed=0,1 data.preview=1": "data.preview ",
    "-m seed=0,1 format=text,json": "format=text, ...: ",
    "-m seed=interval(0,1)": "seed=interval(0,1): ",
}


@pytest.mark.parametrize(("overrides", "said"), REFUSED.items(), ids=REFUSED)
def test_invalid_sweeps_are_rejected_and_write_nothing(launch, tmp_path, overrides, said):
    done = launch(*overrides.split(), "mode=plan")
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_missing_gpus_are_reported_before_the_first_trial(launch, tmp_path):
    done = launch("-m", "seed=0,1", *ONE_GPU, "runtime=local")
    assert done.code == 3
    assert "GPU(s) needed" in done.err
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_a_cluster_need_no_gpu_here():
    on_slurm = [*ONE_GPU, "runtime=slurm"]
    planned = sweep_plan.plan_trials(
        [Trial(0, [])], on_slurm, host_with(0), plan_all=False, check_hosts=True
    )
    assert planned.first.num_gpus == 0


def test_figures_come_from_the_result_and_the_last_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3.0, "kl": 0.1}\n{"step": 2, "loss": null, "kl": 0.2}\n'
    )
    (tmp_path / "result.json").write_text(
        '{"status": "done", "loss": null, "accuracy": 0.5, "exit_code": 0, "model": "m"}'
    )
    assert run_metrics(tmp_path) == {"step": 2, "loss": None, "kl": 0.2, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("better", "name", "value"), [(True, "most_tflops", 9.5), (False, "least_tflops", 7.0)]
)
def test_a_grid_of_a_benchmark_is_shown_by_its_best_row(tmp_path, better, name, value):
    rows = [{"tflops": value} for value in (7.0, None, math.nan, 9.5)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "tflops": 9.5, "loss": 1.0}\n')
    content = {"figure": "tflops", "higher_is_better": better, "rows": rows, "benchmark": "gemm"}
    (tmp_path / "result.json").write_text(json.dumps(content))
    found = run_metrics(tmp_path)
    assert found[name] == value
    assert sweep_report.default_metric(found) == name
    assert sweep_report.less_is_better(name) is not better
    assert check_metric_early(name, tmp_path)  # the first steps do not log it


def test_a_missing_metric_is_reported_at_the_first_step(tmp_path):
    assert check_metric_early("rewrd", tmp_path) is False
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert check_metric_early("reward", tmp_path) is True
    assert check_metric_early("accuracy", tmp_path) is True  # logged only at the end
    with pytest.raises(UserError, match=r"sweep.metric=rewrd: .* Did you mean reward\?.* step"):
        check_metric_early("rewrd", tmp_path)
    with pytest.raises(UserError, match="sweep.metric="):
        check_metric("accuracy", {"loss": 1.0})


def test_different_metrics_are_shown_with_their_names(capsys, tmp_path):
    trials = [
        Trial(0, ["method=sft"], "done", "loss", 2.5, 0),
        Trial(1, ["method=bench/matmul"], "done", "most_tflops", 400.0, 0),
    ]
    config = composed("hardware=cpu")
    content = sweep_report.sweep_json(tmp_path, config.sweep, [], trials, 2)
    sweep_report.show_end(config, content, 0)
    shown = capsys.readouterr().out
    assert "most_tflops 400" in shown
    assert "sweep.metric=" not in shown


def test_a_trial_that_is_done_is_not_run_again_unless_its_record_was_edited(tmp_path):
    trial = plan_trial(Request(["hardware=cpu", f"run_root={tmp_path}", "name=n"]), host_with(0))
    leave_record(trial.home / "1", trial.config, "done")
    assert trial.done_run() == trial.home / "1"
    for edited in ({"data": [1]}, {"composition": "x"}):
        kept = json_files.read_json(trial.home / "1/record.json")
        json_files.write_json(trial.home / "1/record.json", {**kept, **edited})
        assert trial.done_run() is None
        leave_record(trial.home / "1", trial.config, "done")
