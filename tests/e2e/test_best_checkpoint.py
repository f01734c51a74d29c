"""Test the selection of the best model by held-out rows.

16 rows are learnt by heart, so the held-out loss turns long before the last step.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from recipes.training import checkpoint, train_loop
from tests.e2e.test_resume import computed, run

BEST = """
method.selection.metric=eval_loss data.num_train=16 data.num_heldout=32
method.args.learning_rate=0.01 method.args.warmup_steps=4
""".split()
LENGTH = ["method.args.max_steps=24", "method.args.save_steps=2", "method.args.save_total_limit=1"]
BY_REWARD = ["method.selection.metric=eval_reward", "data.num_heldout=12"]
EARLY = ["method.selection.patience=2"]


def chosen(result: dict) -> dict:
    return {
        key: result[key]
        for key in ("steps", "best_step", "best_eval_loss", "stopped_early", "weights_sha256")
    }


def left(run_dir: Path) -> list[int]:
    return sorted(checkpoint.step_of(path) for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return (directory, result.json) of a run that stops early."""
    run_dir = tmp_path_factory.mktemp("stopped")
    code, result = run(run_dir, "sft", *BEST, *LENGTH, *EARLY)
    assert code == 0
    return run_dir, result


def test_the_best_model_is_saved_and_the_run_stops_early(stopped):
    run_dir, result = stopped
    measured = {row["step"]: row["eval_loss"] for row in computed(run_dir) if "eval_loss" in row}
    assert max(measured, key=measured.get) == 0  # before the first step
    best = min(measured, key=measured.get)
    assert (result["best_step"], result["best_eval_loss"]) == (best, measured[best])
    assert (result["steps"], result["stopped_early"]) == (best + 2 * 2, True)
    assert result["steps"] < 24
    assert [row["step"] for row in computed(run_dir)] == list(range(result["steps"] + 1)), (
        "one line a step"
    )
    assert left(run_dir) == [best, result["steps"]]
    model, saved = (
        load_file(run_dir / place / "model.safetensors")
        for place in ("model", f"checkpoints/checkpoint-{best}")
    )
    assert all(weight.equal(saved[name]) for name, weight in model.items())


def die_in(monkeypatch, step: int) -> None:
    """End the run in this step without saving, as SIGKILL would."""
    log = train_loop.Metrics.on_log

    def die(self, args, state, *rest, **kwargs):
        log(self, args, state, *rest, **kwargs)
        if state.global_step == step:
            raise RuntimeError("killed")

    monkeypatch.setattr(train_loop.Metrics, "on_log", die)


def test_a_killed_run_ends_with_the_same_best_step(tmp_path, stopped, monkeypatch):
    """Kill it three steps after the best one, before its patience is used up."""
    die_in(monkeypatch, stopped[1]["best_step"] + 3)
    assert run(tmp_path, "sft", *BEST, *LENGTH, *EARLY)[1]["error"] == "RuntimeError: killed"
    monkeypatch.undo()
    code, result = run(tmp_path, "sft", *BEST, *LENGTH, *EARLY)
    assert code == 0
    assert chosen(result) == chosen(stopped[1])
    assert computed(tmp_path)[-1]["eval_loss"] == computed(stopped[0])[-1]["eval_loss"]


def test_a_run_killed_before_its_first_checkpoint_measures_the_start_once(tmp_path, monkeypatch):
    steps = ["method.args.max_steps=4", "method.args.save_steps=2"]
    with monkeypatch.context() as patch:
        die_in(patch, 1)
        assert run(tmp_path, "sft", *BEST, *steps)[1]["error"] == "RuntimeError: killed"
    assert run(tmp_path, "sft", *BEST, *steps)[0] == 0
    assert [row["step"] for row in computed(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_run_that_had_stopped_early_does_not_train_again(tmp_path, stopped, monkeypatch):
    """Kill it after its last checkpoint and before its model is saved."""
    monkeypatch.setattr(train_loop, "save_model", None)
    assert "TypeError" in run(tmp_path, "sft", *BEST, *LENGTH, *EARLY)[1]["error"]
    monkeypatch.undo()
    code, result = run(tmp_path, "sft", *BEST, *LENGTH, *EARLY)
    assert code == 0
    assert chosen(result) == chosen(stopped[1])


@pytest.mark.parametrize(("method", "overrides", "metric"), [
    ("sft", ["method.selection.metric=eval_mean_token_accuracy", "adapter=lora", "adapter.rank=4"],
     "eval_mean_token_accuracy"),
    ("grpo", BY_REWARD, "eval_reward"),
])  # fmt: skip
def test_another_metric_and_an_adapter(tmp_path, method, overrides, metric):
    code, result = run(
        tmp_path, method, *BEST, "method.args.max_steps=6", "method.args.save_steps=2", *overrides
    )
    assert code == 0
    measured = {row["step"]: row[metric] for row in computed(tmp_path) if metric in row}
    assert list(measured) == [0, 2, 4, 6][method == "grpo" :]
    measured.pop(0, None)
    best = max(measured, key=measured.get)  # the first of equal ones
    assert (result["best_step"], result[f"best_{metric}"], result["stopped_early"]) == (
        best,
        measured[best],
        False,
    )
    if method == "sft":
        adapter, saved = (
            load_file(tmp_path / p / "adapter_model.safetensors")
            for p in ("adapter", f"checkpoints/checkpoint-{best}")
        )
        assert all(weight.equal(saved[name]) for name, weight in adapter.items())


def test_models_between_two_saves_are_evaluated_but_not_chosen(tmp_path):
    """The loss rises from the third step on, and only even steps are saved."""
    steps = ["method.args.max_steps=4", "method.args.save_steps=2", "method.args.eval_steps=1"]
    code, result = run(tmp_path, "sft", *BEST, *steps, "method.args.logging_steps=3")
    assert code == 0
    measured = {row["step"]: row["eval_loss"] for row in computed(tmp_path) if "eval_loss" in row}
    assert list(measured) == [0, 1, 2, 3, 4]
    best = min((2, 4), key=measured.get)
    assert (result["best_step"], result["best_eval_loss"]) == (best, measured[best])


def test_grpo_killed_after_a_measurement_ends_the_same(tmp_path, monkeypatch):
    """A resumed run samples the same answers to held-out prompts."""
    settings = [*BY_REWARD, "method.args.learning_rate=0.01"]
    assert run(tmp_path / "whole", "grpo", *settings)[0] == 0
    with monkeypatch.context() as patch:
        die_in(patch, 3)
        assert run(tmp_path / "killed", "grpo", *settings)[1]["error"] == "RuntimeError: killed"
    code, result = run(tmp_path / "killed", "grpo", *settings)
    assert code == 0
    assert computed(tmp_path / "killed") == computed(tmp_path / "whole")
    whole = json.loads((tmp_path / "whole/result.json").read_text())
    keys = ("best_step", "best_eval_reward", "weights_sha256")
    assert [result[key] for key in keys] == [whole[key] for key in keys]


def test_held_out_rows_that_the_reward_cannot_judge_are_rejected_before_training(tmp_path):
    (tmp_path / "train").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "heldout").write_text('{"prompt": "2+2="}\n')
    overrides = f"""
        data=jsonl data.path={tmp_path}/train data.heldout_path={tmp_path}/heldout
        data.num_train=null data.num_heldout=0 ~method.rewards.reasoning_gym
        +method.rewards.accuracy=1.0 method.selection.metric=eval_reward
    """
    code, result = run(tmp_path / "run", "grpo", *overrides.split())
    assert code == 2
    assert result["error"].startswith("method.rewards.accuracy reads column 'answer'")
    assert "held-out rows" in result["error"]
    assert not (tmp_path / "run/metrics.jsonl").exists()
