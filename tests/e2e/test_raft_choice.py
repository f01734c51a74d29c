"""Test RAFT with a choice of its cycle, and a kill in an evaluation, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE
from launch.execution import record
from launch.plan import rundir
from launch.plan.planning import rank_config
from launch.study import pipeline
from recipes import evaluate as evaluation
from recipes.rank import program
from tests.e2e.phases import WORK
from tests.e2e.test_raft import SMALL, Killed, dying

# Random weights solve no problem, so all cycles are equal and the first one is chosen.
PARTS = [
    "method.args.sample={num_prompts: 8, batch_size: 4, samples_per_prompt: 1, threshold: 0.0, "
    "finished_only: false}",
    "method.args.train={num_train_epochs: 1, per_device_train_batch_size: 4}",
    "method.args.evaluate={batch_size: 8, max_new_tokens: 2}",
]
LAST = "method=evaluate method.args.max_new_tokens=2 method.args.batch_size=8".split()
# what the evaluations measure -> the rewards
REWARDS = {
    "accuracy": ["method.rewards={reasoning_gym: 1.0}"],
    "reward": ["method.rewards={length: 1.0}"],
}


def phases_of(metric: str) -> str:
    chooses = ["method=raft", f"method.selection.metric={metric}", "method.selection.patience=1"]
    replaced = ["~method.rewards.reasoning_gym"] if metric == "reward" else []
    rewards = REWARDS[metric]
    raft, last = (
        ", ".join(f"'{override}'" for override in overrides)
        for overrides in ([*chooses, *PARTS, *replaced, *rewards], [*LAST, *rewards])
    )
    return (
        "phases=[{name: sft, overrides: ['method=sft', 'method.args.max_steps=1']}, "
        f"{{name: raft, model_from: sft, overrides: [{raft}]}}, "
        f"{{name: last, model_from: raft, overrides: [{last}]}}]"
    )


@pytest.fixture
def in_this_process(monkeypatch):
    def execute(plan, host, image, parent, stopping):
        rundir.make(plan.run_dir)
        stored = record.begin(plan, host, image, parent)
        json_files.write_json(plan.run_dir / "record.json", stored)
        path = plan.run_dir / "config.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
        code = program.run(WORK[plan.config.method.name], ["--config", str(path)])
        json_files.write_json(
            plan.run_dir / "record.json",
            record.finish(stored, plan.run_dir, "done" if code == 0 else "failed", code, [], {}),
        )
        return code

    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.setattr(pipeline, "check_host", lambda plan, host: None)


def raft(root: Path, metric: str) -> int:
    overrides = [*SMALL, phases_of(metric), f"run_root={root}", "name=r"]
    return pipeline.run(compose(overrides), Request(overrides))


@pytest.mark.parametrize("metric", REWARDS)
def test_the_chosen_cycle_is_evaluated_last(tmp_path, in_this_process, monkeypatch, metric):
    """The last evaluation is killed before it writes; the same command resumes."""
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "write_rows", dying(evaluation.write_rows, 2))
        with pytest.raises(Killed):
            raft(tmp_path, metric)
    assert raft(tmp_path, metric) == EXIT_DONE
    [run_dir] = (tmp_path / "r").glob("[0-9]*")
    stored = json.loads((run_dir / "record.json").read_text())
    choice = stored["chosen"]["raft"]
    assert (choice["cycle"], choice["num_cycles"], choice["stopped_early"]) == (1, 1, True)
    result = json.loads((run_dir / stored["phases"]["last"] / "result.json").read_text())
    assert result[metric] == choice["accuracy"]
    folders = sorted(path.parent.name for path in run_dir.glob("*/record.json"))
    assert folders == sorted(stored["phases"].values())
    assert not list(run_dir.glob("*cycle2*"))
    last = json.loads((run_dir / stored["phases"]["last"] / "record.json").read_text())
    assert last["composition"]["model"]["path"] == str(run_dir / choice["model"] / "model")
    answers = [
        (run_dir / folder / "samples.jsonl").read_text()
        for folder in (choice["evaluation"], stored["phases"]["last"])
    ]
    assert answers[0] == answers[1], "of the same model"
