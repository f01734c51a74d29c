"""What tests of runtime=slurm share: a folder of stand-ins for Slurm's commands, first on the PATH. And phases that end as they begin."""

from __future__ import annotations

import os

import pytest

from launch import pipeline, record
from launch.errors import EXIT_DONE
from launch.files import rundir
from tests.unit.slurm_examples import Tools


@pytest.fixture
def tools(tmp_path_factory, monkeypatch):
    found = Tools(tmp_path_factory.mktemp("tools") / "bin")
    found.add("sbatch", "echo 12")
    found.add("squeue", "echo PENDING")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    return found


@pytest.fixture
def phases_that_end(monkeypatch):
    """Phases end as they begin, and leave what theirs leave. `asked` are signals that come while one ends, and under
    `accuracy of <phase>` what an evaluation finds.

    Returns the phases that were started, and `asked`."""
    started, asked = [], {}

    def execute(plan, host, image, overrides, parent, stopping):
        started.append(plan.run_dir.name)
        rundir.make(plan.run_dir)
        left = {"trainer": ["model/model.safetensors"], "evaluator": ["selected.jsonl", "scored.jsonl"]}
        for name in left.get(plan.config.method.kind, []):
            rundir.write_text(plan.run_dir / name, f"of {plan.run_dir}")
        kept = record.begin(plan, host, image, overrides, parent)
        rundir.write_json(plan.run_dir / "record.json", record.finish(kept, plan.run_dir, "done", 0, [], {}))
        accuracy = asked.get(f"accuracy of {plan.run_dir.name.partition('_')[2]}")
        found = {} if accuracy is None else {"accuracy": accuracy}
        rundir.write_json(plan.run_dir / "result.json", {"status": "done", **found})
        if plan.run_dir.name in asked:
            os.kill(os.getpid(), asked[plan.run_dir.name])
        return EXIT_DONE

    monkeypatch.setattr(record, "packages", dict)  # reading what is installed takes most of the time of what ends at once
    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.setattr(pipeline, "check_host", lambda plan, host: None)
    return started, asked
