"""-m mode=plan shows what would run and writes nothing; what no trial could do is refused."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from launch import sweep
from launch.compose import CONF
from launch.errors import UserError
from launch.files import rundir
from launch.sweeps import plan as sweep_plan
from launch.sweeps import report as sweep_report
from launch.sweeps.trials import Trial, check_metric, check_metric_early, done_run, figures, prepared
from tests.conftest import composed, host_with, leave_record
from tests.unit.test_documented_commands import FILES

ONE_GPU = ["hardware=mi300x", "model=qwen3_4b", "topology=single"]


def sweep_commands() -> list[str]:
    """Of the README, docs/ and conf/: what test_documented_commands leaves out."""
    found = set()
    for file in FILES:
        for line in file.read_text().splitlines():
            if "python launch/run.py -m " in line and "<" not in line:
                found.add(line.split("python launch/run.py ", 1)[1].split("  #")[0].split("`")[0].strip())
    return sorted(found)


@pytest.mark.parametrize("text", sweep_commands())
def test_every_documented_sweep_plans(launch, tmp_path, text):
    done = launch(*shlex.split(text), "mode=plan")
    assert done.code == 0, done.err
    assert list(tmp_path.iterdir()) == []


def test_every_sweep_has_its_command():
    names = {file.stem for file in (CONF / "sweep").glob("*.yaml")} - {"none"}
    assert names <= {word[len("sweep=") :] for text in sweep_commands() for word in shlex.split(text) if word.startswith("sweep=")}


def test_the_plan_of_a_search(launch):
    done = launch("-m", "sweep=grpo", *ONE_GPU, "mode=plan")
    assert done.code == 0
    for words in ("method.args.num_generations", "4, 8, 16", "24 trials, to maximize reward, 8 at once, each on 1 GPU(s): 0; 1; 2; 3"):
        assert words in done.out


def test_the_plan_of_a_search_as_json(launch, monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3,6,7")
    done = launch(
        "-m", "sweep=lora_rank", "hardware=mi300x", "model=qwen3_4b", "topology=ddp", "topology.num_gpus=2", "mode=plan", "format=json"
    )
    plan = json.loads(done.out)
    assert (plan["at_once"], plan["gpu_sets"], plan["num_trials"]) == (2, [[2, 3], [6, 7]], 20)
    assert plan["space"]["rank"]["values"] == [8, 16, 32, 64, 128]
    assert plan["first"]["adapter"] == "lora"
    assert Path(plan["directory"]).parent.name == "sweeps"


def test_the_plan_of_a_grid_names_every_trial(launch):
    plan = json.loads(launch("-m", "hardware=cpu", "seed=0,1", "model=tiny", "mode=plan", "format=json").out)
    assert [trial["varied"] for trial in plan["trials"]] == [["seed=0"], ["seed=1"]]
    assert (plan["at_once"], plan["gpu_sets"]) == (1, [])


def test_a_grid_says_of_every_trial_whether_it_fits(launch):
    done = launch("-m", "hardware=mi300x", "topology=ddp", "model=qwen3_4b,llama3_1_70b", "price_per_gpu_hour=2", "speed=off", "mode=plan")
    assert done.code == 0  # as of one plan that does not fit
    table = done.out[done.out.index("Trials") :]
    rows = [line for line in table.splitlines() if "model=" in line]
    assert [words in row for words, row in zip(("84.0 of 206.2 GB", "1417.5 of 206.2 GB"), rows, strict=True)] == [True, True]
    assert ["does not fit" in row for row in rows] == [False, True]
    assert "[1] trainers: 1417.5 GB needed on each of its GPUs" in table
    assert "topology=fsdp   (trains the same" in table
    assert "Training in all, 1 of 2 trials: 0.11 h; costs 1.77" in table  # the other one does not start


def test_a_grid_as_json_has_every_plan_in_short(launch):
    found = json.loads(launch("-m", *ONE_GPU, "seed=1,2,1,x", "mode=plan", "format=json").out)
    assert [one["verdict"] for one in found["planned"]] == ["fits", "fits", "the same as 0", "refused"]
    assert (found["not_planned"], found["advice"], list(found["refused"])) == (0, [], ["3"])
    assert found["hours"] == pytest.approx(2 * found["planned"][0]["hours"])


def test_equal_trials_are_named(launch):
    assert "Trials that are the same run: 1 as 0; they run once." in launch("-m", *ONE_GPU, "seed=1,1", "mode=plan").out
    again = launch("-m", *ONE_GPU, "seed=1,1", "resume=never", "mode=plan").out
    assert "1 as 0; resume=never runs each of them." in again
    assert "2 trials: " in again
    assert sweep_plan.equal([["seed=1"], ["seed=2"], ["seed=1"]]) == "Trials that stand twice in the lists: 2 as 0."
    assert sweep_plan.equal([["seed=1"], ["seed=2"]]) is None


def test_equal_trials_are_named_when_they_run(launch, monkeypatch):
    monkeypatch.setattr(sweep, "_check_ready", lambda command, host: None)
    monkeypatch.setattr(sweep.Loop, "run", lambda loop, stopping: 0)
    assert "Trials that stand twice in the lists: 1 as 0." in launch("-m", "hardware=cpu", "model=tiny", "seed=1,1").out


def test_a_long_grid_is_planned_and_shown_as_far_as_it_says(launch, monkeypatch):
    monkeypatch.setattr(sweep_plan, "CHECKED", 4)
    monkeypatch.setattr(sweep_plan, "SHOWN", 2)
    out = launch("-m", *ONE_GPU, "seed=range(6)", "mode=plan").out
    assert "4 more" in out
    assert "The first 4 trials were planned; the other 2 were not looked at." in out
    assert "Training in all, 4 of 6 trials" in out


def test_trials_that_lack_the_same_are_told_once_and_few_are_searched_for(launch, monkeypatch):
    monkeypatch.setattr(sweep_plan, "SEARCHED", 1)
    done = launch("-m", "hardware=mi210", "topology=ddp", "model=qwen3_4b,qwen3_8b", "seed=0,1", "mode=plan")
    assert done.err.count("looking for changes") == 1
    assert "! [0, 1] trainers: " in done.out
    assert re.search(r"! \[2, 3\] trainers: .* mode=plan of this trial alone looks for changes", done.out)


def test_a_phase_that_does_not_fit_is_named(launch):
    phases = "phases=[{name: a, overrides: ['method=sft', 'topology=ddp']}]"
    out = launch("-m", "hardware=mi300x", "model=llama3_1_70b", "seed=0,1", "speed=off", phases, "mode=plan").out
    assert "[0, 1] phase a: trainers: 1417.5 GB needed" in out


def test_a_trial_that_barely_fits_is_named(launch):
    out = launch("-m", "hardware=mi210", "topology=single", "model=qwen3_4b", "seed=0,1", "mode=plan").out
    assert "[0, 1] fit by less than the 5%" in out


def test_what_is_not_planned_has_no_verdict(launch):
    out = launch("-m", "hardware=mi300x", "method=bench/gemm", "seed=0,1", "mode=plan").out
    assert out.count("not planned") == 2
    assert "Training in all" not in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["runtime=slurm"], "one after another, each a Slurm job with 8 GPU(s) (sweep.parallel=N: N jobs at a time), in"),
        (
            ["runtime=slurm", "runtime.slurm.nodes=2", "runtime.slurm.interface=ib0", "sweep.parallel=2"],
            "2 at once, each a Slurm job with 2 nodes of 8 GPU(s), in",
        ),
        (["runtime=slurm", "hardware=cpu", "model=tiny"], "each a Slurm job with no GPU"),
        (["hydra/launcher=submitit_slurm"], "a job for each, all handed to hydra/launcher=submitit_slurm, in"),
        (["topology=single,ddp"], "4 trials, as many at once as there is room for, each on 1 or 8 GPU(s), in"),
        (["hardware=cpu", "model=tiny"], "one after another on the CPU, in"),
    ],
)
def test_where_trials_run_is_said(launch, given, said):
    assert said in launch("-m", "hardware=mi300x", "model=qwen3_4b", "seed=0,1", *given, "mode=plan").out


def test_the_same_sweep_has_the_same_directory_and_another_has_another(launch):
    def directory(*overrides: str) -> str:
        return json.loads(launch("-m", "sweep=grpo", *ONE_GPU, *overrides, "mode=plan", "format=json").out)["directory"]

    assert directory() == directory("sweep.num_trials=99", "sweep.parallel=2", "verbose=true")
    assert len({directory(), directory("seed=1"), directory("sweep.metric=kl"), directory("sweep.space.kl.values=[0.0]")}) == 4


def test_the_command_lines_own_value_wins_over_the_sweeps(launch):
    plan = json.loads(launch("-m", "sweep=grpo", *ONE_GPU, "method.args.per_device_train_batch_size=32", "mode=plan", "format=json").out)
    assert plan["first"]["trainer_args"]["per_device_train_batch_size"] == 32


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["-m", "sweep=grop"], "sweep=grop: no such sweep. Did you mean grpo?"),
        (["sweep=grpo"], "Put -m before it"),
        (["sweep.num_trials=5", "hardware=cpu"], "sweep.num_trials=5: of a search or a grid, and this is one run. Put -m before it"),
        (["-m", "sweep=grpo", *ONE_GPU, "method=sft"], "Use: method=grpo, which sweep=grpo is of."),
        (["-m", "sweep=grpo", "sweep.overrides=[]", "method=sft"], "Use: another method, or '~sweep.space.group_size' beside it."),
        (["-m", "sweep=grpo", "seed=0,1"], "has a space of its own"),
        (["-m", "sweep=grpo", "method.args.beta=0.1"], "'~sweep.space.kl' beside it"),
        (["-m", "sweep=grpo", "hydra/launcher=submitit_local"], "for a grid"),
        (["-m", "sweep=grpo", "sweep.space.k.values=[1]"], "no parameter 'k' in sweep.space. Did you mean kl?"),
        (["-m", "sweep=grpo", "sweep.space.kl.valeus=[1]"], "no key 'valeus' in sweep.space.kl. Did you mean sweep.space.kl.values"),
        (["-m", "sweep=grpo", "sweep.space.kl.key=method.args.betta"], "no such argument. Did you mean beta"),
        (["-m", "sweep=grpo", "sweep.direction=up"], "sweep.direction: Invalid value 'up'"),
        (["-m", "seed=0,1", "sweep.parallel=0"], "sweep.parallel=0: out of range"),
        (["-m", "seed=0,1", "resume=there"], "resume=there: of one run"),
        (["-m", "seed=0,1", "hydra/sweeper=optuna"], "sweeps are our own here"),
        (["-m", "seed=0,1", "sweep.metric=accuracy"], "sweep.direction=maximize beside it"),
        (["-m", "sweep=grpo", "sweep.metric=eval_loss"], "sweep.direction=minimize beside it"),
        (["-m", "seed=0,1", "data.preview=1"], "data.preview: of one run"),
        (["-m", "seed=0,1", "find=largest_batch"], "find=largest_batch: of one run"),
        (["-m", "seed=0,1", "format=text,json"], "format=text, ...: several values of format"),
        (["-m", "seed=0,1", "sweep.parallel=1,2"], "several values of sweep.parallel"),
        (["-m", "seed=interval(0,1)"], "a range has no end of values"),
        (["-m", "seed=0,1", "--config-dir=x"], "--config-dir=x: not together with -m"),
        (["-m", "seed=0,1", "model=qwen3_4b", "hardware=mi300x", "method.args.max_lenght=3"], "Did you mean max_length"),
    ],
)
def test_refused_before_anything_is_made(launch, tmp_path, overrides, said):
    done = launch(*overrides, "mode=plan")
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_the_gpus_is_said_before_the_first_trial(launch, tmp_path):
    done = launch("-m", "seed=0,1", *ONE_GPU, "runtime=local")
    assert done.code == 3
    assert "GPU(s) needed" in done.err
    assert list(tmp_path.iterdir()) == []


def test_figures_are_those_of_the_end_and_of_the_last_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "kl": 0.1}\n{"step": 2, "loss": null, "kl": 0.2}\n')
    (tmp_path / "result.json").write_text('{"status": "done", "loss": null, "accuracy": 0.5, "exit_code": 0, "model": "m"}')
    assert figures(tmp_path) == {"step": 2, "loss": None, "kl": 0.2, "accuracy": 0.5}


@pytest.mark.parametrize(("better", "name", "value"), [(True, "most_tflops", 9.5), (False, "least_tflops", 7.0)])
def test_a_grid_of_a_benchmark_is_shown_by_its_best_row(tmp_path, better, name, value):
    rows = [{"tflops": 7.0}, {"tflops": None, "error": "no memory"}, {"tflops": math.nan}, {"tflops": 9.5}]
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "tflops": 9.5, "loss": 1.0}\n')
    content = {"figure": "tflops", "higher_is_better": better, "rows": rows, "benchmark": "gemm"}
    (tmp_path / "result.json").write_text(json.dumps(content))
    found = figures(tmp_path)
    assert found[name] == value
    assert sweep_report.usual(found) == name
    assert sweep_report.less_is_better(name) is not better
    assert check_metric_early(name, tmp_path)  # no line of the first steps holds it


def test_a_metric_that_no_run_writes_is_said_at_the_first_step(tmp_path):
    assert check_metric_early("rewrd", tmp_path) is False
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert check_metric_early("reward", tmp_path) is True
    assert check_metric_early("accuracy", tmp_path) is True  # of the end
    with pytest.raises(UserError, match=r"sweep.metric=rewrd: .* Did you mean reward\? It wrote: reward, step"):
        check_metric_early("rewrd", tmp_path)
    with pytest.raises(UserError, match="wrote no such figure"):
        check_metric("accuracy", {"loss": 1.0})


def test_unlike_figures_stand_under_their_own_names(capsys, tmp_path):
    found = [Trial(0, ["method=sft"], "done", "loss", 2.5, 0), Trial(1, ["method=bench/matmul"], "done", "most_tflops", 400.0, 0)]
    config = composed("hardware=cpu")
    for trials, head, hint in ((found, "figure", False), (found[:1] * 2, "loss", True)):
        content = sweep_report.as_object(tmp_path, config.sweep, [], trials, 2)
        sweep_report.show_end(config, content, 0)
        said = capsys.readouterr().out
        assert f" {head} " in said
        assert ("400 most_tflops" in said) is not hint
        assert ("The same with sweep.metric=loss names the best" in said) is hint


def test_a_trial_that_is_done_is_not_run_again_unless_its_record_was_edited(tmp_path):
    trial = prepared(["hardware=cpu", f"run_root={tmp_path}", "name=n"], host_with(0))
    leave_record(trial.home / "1", trial.config, "done")
    assert done_run(trial) == trial.home / "1"
    for edited in ({"data": [1]}, {"composition": "x"}):
        kept = rundir.read_json(trial.home / "1/record.json")
        rundir.write_json(trial.home / "1/record.json", {**kept, **edited})
        assert done_run(trial) is None
        leave_record(trial.home / "1", trial.config, "done")
