"""Test the pages of launch/report.py for runs in any state, comparisons, pipelines and sweeps."""

from __future__ import annotations

import shutil

import pytest

from launch import report
from launch.core import json_files
from launch.core.json_files import plain
from launch.plan import rundir
from launch.reports import run_tables
from launch.reports.run_files import read, read_metrics
from launch.study.optuna_study import Search, importances
from tests.conftest import composed
from tests.helpers.report_examples import (
    GRPO_STEP,
    HOSTILE,
    a_benchmark,
    a_pipeline,
    a_run,
    a_sweep,
    change,
    log,
    steps,
)
from tests.helpers.report_reader import made


def test_a_run_that_is_done(tmp_path, capsys):
    folder = log(
        a_run(
            tmp_path / "r",
            "method.args.max_steps=9",
            loss=0.8889,
            tokens_per_second=950.0,
            warning="Nothing was learned.",
        ),
        *steps(9, mfu=0.25),
    )
    assert report.main([str(folder)]) == 0
    assert f"Report: {folder / 'report.html'}" in capsys.readouterr().out
    outline = made(folder)
    predicted = json_files.read_json(folder / "plan.json")["speed"]["step_s"]
    for words in (
        "status done exit code 0",
        "loss 0.8889 from 8",
        "python launch/run.py method.args.max_steps=9",
        "sft of tiny",
        f"commit {json_files.read_json(folder / 'record.json')['code']['commit']}",
        "trl 1.16.0",
        "none: runtime=local",
        "Speed, predicted and measured",
        f"seconds per step {predicted:.4g} 2 {2 / predicted:.1%}",
        "The mean of all steps is 950 tokens/s",
        "8 → 0.8889 (lowest 0.8889, highest 8)",
        "trainers weights 0.004",
        "reproduce.py",
        "Nothing was learned.",
    ):
        assert words in outline.text, words


def test_invalid_lines_of_metrics_are_skipped_and_listed(tmp_path):
    bad = ['{"step": 4, "lo', "[1]", '"x"', '{"loss": 1}', "", "{" * 3, '{"step": true}']
    folder = log(
        a_run(tmp_path / "r"),
        *steps(3),
        *bad,
        {"step": 5, "loss": float("nan")},
        {"step": 6, "loss": 10**400},
    )
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "x": "\xff"}\n{"step": 8')
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics.rows] == [1, 2, 3, 5, 6]
    assert metrics.points("loss")[0] == [1, 2, 3]
    assert [problem.partition(":")[0] for problem in metrics.problems] == [
        f"line {n}" for n in (4, 5, 6, 7, 8, 9, 10, 13, 14)
    ]
    text = made(folder).text
    assert "metrics.jsonl: 9 of 14 lines skipped: line 4: " in text
    assert "and 4 more." in text


def test_an_incomplete_last_line_of_a_running_run_is_not_a_problem(tmp_path):
    folder = log(a_run(tmp_path / "r", exit_code=None), *steps(2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with rundir.locked(folder):
        assert read(folder).status == "running"
        text = made(folder).text
    assert "Still running" in text
    assert "skipped" not in text
    assert "steps 2 of 2" in text
    assert read(folder).status == "lost"
    text = made(folder).text
    assert "no launcher on this machine executes it" in text
    assert "1 of 3 lines skipped: line 3" in text


def test_a_crash_shows_the_log_of_the_failed_rank(tmp_path):
    folder = a_run(tmp_path / "r", exit_code=4, error="torch.OutOfMemoryError: HIP out of memory")
    (folder / "logs/trainers.log").write_text("".join(f"line {n}\n" for n in range(90)))
    (folder / "logs/rank1.log").write_text(
        f"torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB {HOSTILE}\n"
    )
    json_files.write_json(
        folder / "failures/rank1.json",
        {"rank": 1, "time": 1.0, "error": "torch.OutOfMemoryError", "exit_code": 1},
    )
    text = made(folder).text
    assert "Failed. Exit code 4. torch.OutOfMemoryError: HIP out of memory" in text
    assert "Last lines of logs/rank1.log (torch.OutOfMemoryError)" in text
    assert f"Tried to allocate 2 GiB {HOSTILE}" in text
    assert "This usually means: the GPU's memory is full" in text
    assert "metrics.jsonl has no lines" in text
    assert "line 89" not in text
    shutil.rmtree(folder / "failures")
    text = made(folder).text
    assert "line 70 line 71" in text
    assert "line 69 " not in text


def test_a_benchmark_next_to_published_figures(tmp_path):
    text = made(a_benchmark(tmp_path / "b")).text
    for words in (
        "gemm on some GPU",
        "16384 8192 1280 bf16 1,011.0 1,104 somebody, 2024-12-22 0.92",
        "fp8: this GPU has none",
        "Below the gate fail_below=0.9: 16384 1024 8192 bf16: 0.79 of 1104.",
        "rows 4 1 failed",
        "Below its gate. Exit code 4.",
        "One sentence.",
    ):
        assert words in text, words


TRAINERS = ("training", "generation", "weight sync", "rewards", "waiting")


def parts_of_a_step(folder) -> dict[tuple[str, str], str]:
    table = run_tables.step_parts(read(folder))
    return {(row[0].text, row[1].text): f"{row[2].text} {row[3].text}" for row in table.rows}


def test_a_step_of_grpo_and_its_server(tmp_path):
    folder = log(a_run(tmp_path / "g", "method=grpo"), *steps(8, **GRPO_STEP))
    values = ["1.2 60.0%", "0 0.00%", "0.1 5.0%", "0.3 15.0%", "0.4 20.0%"]
    trainers = {("trainers", name): v for name, v in zip(TRAINERS, values, strict=True)}
    server = {"generation": "1.2 60.0%", "weight sync": "0.1 5.0%", "idle": "0.7 35.0%"}
    server_parts = {("generation server", name): value for name, value in server.items()}
    assert parts_of_a_step(folder) == trainers | server_parts
    assert "0.8 s of generation overlap with training" in made(folder).text


def test_telemetry_profile_targets_and_energy(tmp_path):
    folder = log(
        a_run(tmp_path / "r", reward=0.9, energy_kwh_per_million_tokens=0.25),
        *steps(4, gpu_power_w=600.0, gpu_utilization=0.8),
    )
    change(
        folder / "plan.json",
        targets={
            "reward": {"value": 0.6, "source": "a table"},
            "accuracy": {"value": 1.0, "source": "another"},
            "loss@2": {"value": 2.0, "source": "a curve"},
            "loss@9": {"value": 2.0, "source": "a curve"},
        },
    )
    kernels = [
        {"name": "Cijk_" + "A" * 300, "kind": "gemm", "calls": 12, "time_s": 0.3, "share": 0.25}
    ]
    shares = {"gemm": 0.6, "idle": 0.4, "communication_hidden": 0.02}
    json_files.write_json(
        folder / "profile/kernels.json",
        {"time_s": 1.2, "steps": 2, "shares": shares, "kernels": kernels},
    )
    modules = [
        {"name": "model.norm", "class": "RMSNorm", "calls": 4, "time_s": 0.01, "share": 0.008}
    ]
    json_files.write_json(folder / "profile/fp32_modules.json", {"modules": modules, "share": 0.03})
    text = made(folder).text
    for words in (
        "reward 0.9 0.6 150.0% a table",
        "accuracy not measured 1 another",
        "loss@2 4 2 200.0% a curve",
        "loss@9 not measured 2 a curve",
        "energy 0.25 kWh per million tokens",
        "Power W",
        "600 → 600 W",
        "GPU utilization %",
        "80 → 80 %",
        "gemm 12 0.3 25.0%",
        "Modules that compute in fp32, 3.0% of the time",
        "Communication that overlaps with computation: 2.0%",
        "idle 40.0%",
    ):
        assert words in text, words


def test_several_runs_begin_with_their_differences(tmp_path):
    a = log(a_run(tmp_path / "runs/a", "method.args.learning_rate=1e-3"), *steps(4))
    b = log(a_run(tmp_path / "runs/b", "seed=7"), *steps(6))
    outline = made(a, b)
    text = outline.text
    parts = ("Differences in configuration", "Curves Loss", "Results run status")
    assert sorted(parts, key=text.index) == list(parts)
    assert "seed 0 7" in text
    assert "method.args.learning_rate" in text
    assert "No difference in code, image, packages and host." in text
    assert "A done 4 2 1,000" in text
    assert "B done 6 1.333 1,000" in text
    assert report.parse([str(a), str(b)]).output == tmp_path / "runs/report.html"


def test_runs_are_compared_within_each_method(tmp_path):
    """Nearly every key differs between methods, so such a comparison would be useless."""
    runs = {"a": ["seed=1"], "b": ["seed=2"], "c": ["method=grpo"], "d": ["method=evaluate"]}
    runs |= {"e": ["method=evaluate", "method.args.batch_size=7"], "f": ["method=dpo"]}
    folders = {
        name: log(a_run(tmp_path / name, *overrides), *steps(4)) for name, overrides in runs.items()
    }
    text = made(*(folders[name] for name in "abcde")).text
    assert "Differences in configuration, sft key A B seed 1 2 Differences" in text
    assert "Differences in configuration, evaluate key D E" in text
    assert "method.args.batch_size" in text
    assert "method.program" not in text
    text = made(folders["a"], folders["f"]).text
    assert "Differences in configuration key A B" in text
    assert "method.name sft dpo" in text


def test_benchmarks_side_by_side(tmp_path):
    text = made(a_benchmark(tmp_path / "a"), a_benchmark(tmp_path / "b", tflops=1213.2)).text
    assert "16384 8192 1280 bf16 1,011 1,213 1.200" in text
    assert "8192 8192 8192 fp8 fp8: this GPU has none" in text


def test_a_pipeline(tmp_path):
    folder = a_pipeline(tmp_path / "p", ("base", "evaluate"), ("sft", "sft"), ("after", "evaluate"))
    text = made(folder).text
    assert "3_after 1_base 25.0% 75.0% +50.0" in text
    assert "1_base evaluate done" in text
    assert "step, counted from the pipeline's first model" in text
    shutil.rmtree(folder / "3_after")
    change(folder / "record.json", status="failed", exit_code=4)
    assert "3_after waiting" in made(folder).text
    both = made(folder, log(a_run(tmp_path / "r"), *steps(2))).text
    assert "p/2_sft" in both


GRID = [
    {"varied": [f"method.args.learning_rate={rate}", f"seed={seed}"], "value": value}
    for rate, seed, value in (
        ("1e-4", 0, 5.0),
        ("1e-4", 1, 5.2),
        ("1e-3", 0, 2.0),
        ("1e-3", 1, 2.2),
    )
]


def test_a_grid(tmp_path):
    varied = ["method.args.learning_rate=fast", "seed=0"]
    failed = {"varied": varied, "status": "failed", "why": HOSTILE}
    folder = a_sweep(tmp_path, [*GRID, failed])
    (tmp_path / "runs/x/4").mkdir()  # it failed before it wrote a file
    text = made(folder).text
    assert "best loss 2 trial 2" in text
    assert "2 (best) 1e-3 0 2 done 2" in text
    assert "method.args.learning_rate 99.6% seed 0.44%" in text
    assert "2: learning_rate=1e-3 seed=0" in text  # its run is next to the sweep, not in /gone
    assert HOSTILE in text


def test_the_importance_of_a_search_is_from_optuna(tmp_path):
    config = composed("hardware=cpu", "sweep=batch").sweep
    search = Search(config, 0)
    for _ in range(12):
        trial = search.next()
        rate = float(dict(o.partition("=")[::2] for o in trial.varied)["method.args.learning_rate"])
        trial.status, trial.value = "done", rate
    folder = a_sweep(tmp_path, [], metric="loss", space=plain(config.space))
    rows = [vars(trial) for trial in search.trials]
    change(folder / "sweep.json", trials=rows)
    shares = importances(json_files.read_json(folder / "sweep.json"))
    assert shares["learning_rate"] > 0.5
    assert sum(shares.values()) == pytest.approx(1)
    assert "PED-ANOVA over 12 finished trials" in made(folder).text
    change(folder / "sweep.json", trials=rows[:5])
    assert "5 trials are finished, and a search needs 10" in made(folder).text
