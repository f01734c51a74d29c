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
CHOOSES = "method=raft method.selection.metric=accuracy method.selection.patience=1".split()
RAFT = [f"'{override}'" for override in [*CHOOSES, *PARTS]]
PHASES = (
    "phases=[{name: sft, overrides: ['method=sft', 'method.args.max_steps=1']}, "
    "{name: raft, model_from: sft, overrides: [" + ", ".join(RAFT) + "]}, "
    "{name: last, model_from: raft, overrides: ['method=evaluate', "
    "'method.args.max_new_tokens=2', 'method.args.batch_size=8']}]"
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


def raft(root: Path) -> int:
    overrides = [*SMALL, PHASES, f"run_root={root}", "name=r"]
    return pipeline.run(compose(overrides), Request(overrides))


def test_the_chosen_cycle_is_evaluated_last(tmp_path, in_this_process, monkeypatch):
    """The last evaluation is killed before it writes; the same command resumes."""
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "write_rows", dying(evaluation.write_rows, 2))
        with pytest.raises(Killed):
            raft(tmp_path)
    assert raft(tmp_path) == EXIT_DONE
    [run_dir] = (tmp_path / "r").glob("[0-9]*")
    stored = json.loads((run_dir / "record.json").read_text())
    choice = stored["chosen"]["raft"]
    assert (choice["cycle"], choice["num_cycles"], choice["stopped_early"]) == (1, 1, True)
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
