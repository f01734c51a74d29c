"""Test tests/gpu/learning.py: pipelines, rows, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.config.request import Request
from launch.study import pipeline
from tests.conftest import composed, host_with, leave_model
from tests.gpu import learning
from tests.gpu.learning import Pipeline
from tests.gpu.learning_report import METHODS, MODES, interval, report


def row(method, seed, right, **more):
    accuracy = right.count("1") / len(right)
    known = {
        "hardware": "h200",
        "start": "qwen3_76m",
        "seed": seed,
        "method": method,
        "accuracy": accuracy,
    }
    known |= {"interval": [0.4, 0.6], "right": right, "by_level": {"0": 0.5, "1": 0.25}}
    known |= {"data_sha256": "d", "smoke": False, "commit": "abcdef0123456789"}
    return known | {"packages": {"torch": "2.11.0"}} | more


def of_seed(seed, shift=0):
    """Return rows for 20 problems. SFT solves 10, RAFT 13 + `shift`, GRPO 15 and DPO 9."""
    grpo = {"rewards": [[1, 0.4], [2, 0.6]], "samples": 1024, "gpus": 1, "logp_gap": [0.0012, 0.25]}
    return [
        row("sft", seed, "1" * 10 + "0" * 10),
        row("raft", seed, f"{'1' * (13 + shift):0<20}", cycles=[0.5, 0.6, 0.65], samples=1024),
        row("grpo", seed, "1" * 15 + "0" * 5, **grpo),
        row("dpo", seed, "1" * 9 + "0" * 11, samples=1000),
    ]


def test_the_page_shows_gains_over_the_sft_of_each_seed(tmp_path):
    page = report([*of_seed(0), *of_seed(1, 1), *of_seed(2, -1)], tmp_path)
    raft = next(line for line in page.splitlines() if line.startswith("| RAFT | 65.0%"))
    assert raft == "| RAFT | 65.0% | 70.0% | 60.0% | 65.0% | +15.0 (+2.6 to +27.4) | 1,024 |"
    assert "| DPO | 45.0%" in page
    assert "-5.0 (-5.0 to -5.0)" in page
    assert "RAFT reached its target" in page
    assert "GRPO reached its target" in page
    assert "measure hardware=h200 --gpus 1" in page
    assert "GRPO's server and trainer shared one GPU" in page
    assert "0.0012 on average, 0.250 at most" in page
    assert (tmp_path / "learning_qwen3_76m.png").read_bytes()[:4] == b"\x89PNG"
    assert "smoke" not in page


def test_modes_of_grpo_are_compared_at_equal_samples(tmp_path):
    def run(method, seed, last):
        rewards = [[step, 0.5 + (last - 0.5) * step / 40] for step in range(1, 41)]
        more = {"rewards": rewards, "time_s": list(range(40)), "samples": 400, "gpus": 2}
        return row(method, seed, "10", **more)

    rows = [run("grpo", 0, 0.8), run("grpo", 1, 0.9), run("overlap", 0, 0.88)]
    rows += [run("overlap", 1, 0.81), run("stream", 0, 0.6), run("stream", 1, 0.7)]
    page = report([*rows, run("grpo", 2, 0.1)], tmp_path)  # a seed that other modes do not have
    compared = [line for line in page.splitlines() if line.startswith("| GRPO")][-3:]
    assert [line.split(" | ")[-1] for line in compared] == ["yes |", "yes |", "no |"]
    assert compared[0].split(" | ")[1:6] == ["0.583", "0.671", "0.758", "0.846", "310"]
    assert compared[2].split(" | ")[5] == "not reached"
    assert (tmp_path / "learning_qwen3_76m_modes.png").read_bytes()[:4] == b"\x89PNG"


def test_the_interval_uses_students_t():
    low, high = interval([10.0, 20.0, 30.0])  # 4.303 * 10 / sqrt(3)
    assert (low, high) == pytest.approx((20 - 24.844, 20 + 24.844), abs=1e-3)


@pytest.mark.parametrize(
    ("experiment", "samples"),
    [("learning", 409_600), ("learning_cups", 102_400), ("learning_smollm2", 61_440)],
)
def test_each_method_has_the_same_samples_and_the_same_start(experiment, samples):
    overrides = ["hardware=h200", f"experiment={experiment}"]
    plans = pipeline.make_plans(
        composed(*overrides), Request(overrides), host_with(8), Path("/runs/learning/1")
    )
    sampled = {
        name: plan.trainer_args["num_prompts"] * plan.trainer_args["samples_per_prompt"]
        for name, plan in plans.items()
        if "sample" in name
    }
    grpo = plans["grpo"].trainer_args
    batch = grpo["per_device_train_batch_size"] * grpo["gradient_accumulation_steps"]
    raft = {f"raft_cycle{cycle}_sample": samples / 2 for cycle in (1, 2)}
    assert sampled == {**raft, "dpo_samples": samples}
    assert grpo["max_steps"] * batch == samples
    assert {plan.config.topology.num_gpus for name, plan in plans.items() if name != "grpo"} == {
        1
    }, "with two of eight GPUs"
    starts = {
        Path(str(plans[name].config.model.path)).parent.name
        for name in ("raft_cycle0_evaluate", "raft_cycle1_train", "grpo", "dpo")
    }
    assert starts == {"1_sft"}
    assert plans["grpo"].config.topology.name == "split"
    longest = {
        plan.trainer_args.get("max_new_tokens", plan.trainer_args.get("max_completion_length"))
        for plan in plans.values()
    } - {None}
    assert len(longest) == 1  # samples, rewards and evaluations have the same limit


def settings(tmp_path, *arguments):
    rows = tmp_path / "rows.jsonl"
    options = ["measure", "hardware=h200", f"--folder={tmp_path}", f"--rows={rows}", *arguments]
    return learning.parse(options)


def leave_run(folder, name, phases):
    """Write a run directory with the results of these phases, like the launcher."""
    run = folder / "runs" / name / "20260101-000000-aaaaaa"
    for phase, result in phases.items():
        (run / phase).mkdir(parents=True)
        (run / phase / "result.json").write_text(json.dumps(result))
        args = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
        record = {
            "code": {"commit": "abc"},
            "packages": {"torch": "2", "numpy": "1"},
            "composition": {"smoke": False, "method": {"args": args}, "topology": {"num_gpus": 2}},
        }
        (run / phase / "record.json").write_text(json.dumps(record))
    (run / "record.json").write_text(json.dumps({"phases": {phase: phase for phase in phases}}))
    return run


def evaluated(right):
    level = {"0": {"accuracy": 0.5}}
    result = {"status": "done", "accuracy": sum(right) / len(right), "interval": [0.1, 0.9]}
    return result | {"right_per_problem": right, "by_level": level, "data_sha256": "d"}


def test_rows_contain_the_results_of_finished_phases(tmp_path):
    one = Pipeline("learning-qwen3_76m-1", 2, [], "qwen3_76m", 1)
    assert learning.row_of(one, "sft", tmp_path, "h200") is None
    phases = {"raft_cycle0_evaluate": evaluated([1, 0]), "raft_cycle1_sample": {"num_samples": 16}}
    phases |= {"raft_cycle1_evaluate": evaluated([1, 1]), "grpo": {}}
    phases |= {"grpo_evaluated": evaluated([0, 1]), "dpo_evaluated": {"status": "interrupted"}}
    run = leave_run(tmp_path, one.name, phases)
    step = {"reward": 0.25, "time_s": 7.0, f"{learning.GAP}/mean": 0.5, f"{learning.GAP}/max": 0.75}
    (run / "grpo/metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, **step}) + "\n" for n in (1, 2))
    )
    raft = learning.row_of(one, "raft", tmp_path, "h200")
    figures = [raft[key] for key in ("cycles", "accuracy", "samples", "right", "packages")]
    assert figures == [[0.5, 1.0], 1.0, 16, "11", {"torch": "2"}]
    grpo = learning.row_of(one, "grpo", tmp_path, "h200")
    figures = [grpo[key] for key in ("samples", "gpus", "logp_gap", "rewards")]
    assert figures == [32, 2, [0.5, 0.75], [[1, 0.25], [2, 0.25]]]
    assert learning.row_of(one, "sft", tmp_path, "h200")["accuracy"] == 0.5
    assert learning.row_of(one, "dpo", tmp_path, "h200") is None


def leave_sft(folder, name, status="done"):
    run = leave_run(folder, name, {"sft": {"status": status}})
    leave_model(run / "sft/model")
    (run / "sft/model/config.json").write_text('{"model_type": "qwen3"}')  # any of the models
    return run


def test_sfts_run_first_and_each_pipeline_runs_once(tmp_path, monkeypatch, capsys):
    """Reuse the rows of earlier runs, and start GRPO first among the missing pipelines."""
    started = []
    monkeypatch.setattr(
        learning, "start", lambda one, mask, folder: started.append((one.name, mask)) or finished()
    )
    options = settings(
        tmp_path, *"--only qwen3_76m- --seeds 0,1,2 --gpus 2 --share 2 --seconds 60".split()
    )
    rows = [row(method, 0, "10") for method in METHODS]
    options.rows.write_text("".join(json.dumps(one) + "\n" for one in rows))
    leave_sft(tmp_path, "learning-qwen3_76m-1")
    leave_sft(tmp_path, "learning-qwen3_76m-2", "failed")
    leave_run(
        tmp_path,
        "learning-qwen3_76m-1-raft",
        {"raft_cycle0_evaluate": evaluated([1, 0]), "raft_cycle1_evaluate": {}},
    )
    learning.measure(options)
    learning.measure(options)
    kept = [(one["seed"], one["method"]) for one in learning.read_rows(options.rows)]
    assert kept == [*((0, method) for method in METHODS), (1, "sft")]
    sft = ("learning-qwen3_76m-2", [0])
    own = [
        (f"learning-qwen3_76m-1-{method}", mask)
        for method, mask in zip(learning.BRANCHES, [[0, 1], [1, 0]] * 3, strict=False)
    ]
    assert started == [sft, *own] * 2
    assert "learning-qwen3_76m-1-raft: sft 50.0%" in capsys.readouterr().out


@pytest.mark.parametrize("start", learning.EXPERIMENTS)
def test_pipelines_after_an_sft_equal_the_experiment(tmp_path, start):
    model = leave_sft(tmp_path, f"learning-{start}-0") / "sft/model"
    options = settings(tmp_path, "--seeds", "0", "--smollm2", str(model))
    (sft,) = (one for one in learning.sfts(options) if one.start == start)
    plans = pipeline.make_plans(
        composed(*sft.overrides), Request(sft.overrides), host_with(8), tmp_path
    )
    whole = [
        "hardware=h200",
        f"experiment={learning.EXPERIMENTS[start]}",
        f"model.path={model}",
        "tracking=none",
    ]
    expected = pipeline.make_plans(composed(*whole), Request(whole), host_with(8), tmp_path)
    found = {"sft": plans["sft"]}
    for one in learning.branches(options, sft):
        found |= pipeline.make_plans(
            composed(*one.overrides), Request(one.overrides), host_with(8), tmp_path
        )
    for mode in MODES:
        for name in (f"{mode}_evaluated", mode):
            plan, same = found.pop(name), found[name.replace(mode, "grpo")]
            assert plan.config.model.path == same.config.model.path or name != mode
            assert plan.config.method.args == same.config.method.args
        assert str(plan.config.topology.overlap).lower() == MODES[mode]
    assert sorted(found) == sorted(expected)
    for name, plan in found.items():
        # Keys whose values are paths and ports.
        own = {key for key in plan.trainer_args if key == "output_dir" or key.startswith("vllm_")}
        args, wanted = (
            {key: value for key, value in one.trainer_args.items() if key not in own}
            for one in (plan, expected[name])
        )
        assert args == wanted, name
        assert plan.config.topology == expected[name].config.topology, name
    from_sft = {name for name, plan in found.items() if plan.config.model.path == str(model)}
    assert from_sft >= {"raft_cycle0_evaluate", "raft_cycle1_train", "grpo", "dpo_samples", "dpo"}
    assert str(found["dpo"].config.data.path).startswith(str(tmp_path / "1_dpo_samples"))


class finished:
    """A launcher process that has ended."""

    def __init__(self, code=0):
        self.code = code

    def poll(self):
        return self.code


@pytest.mark.parametrize(("code", "times"), [(4, 2), (2, 1), (75, 1)])
def test_a_failed_pipeline_is_retried_once_unless_its_configuration_is_wrong(
    tmp_path, monkeypatch, capsys, code, times
):
    started = []
    monkeypatch.setattr(
        learning, "start", lambda one, mask, folder: started.append(one.name) or finished(code)
    )
    learning.measure(settings(tmp_path, "--only", "qwen3_76m-", "--seeds", "0"))
    assert len(started) == times
    assert (
        f"reason: see the end of {tmp_path / 'learning-qwen3_76m-0'}.log" in capsys.readouterr().out
    ) == (code != 75)
