"""Put stand-ins for Slurm's commands first on the PATH, and let phases end as they begin."""

from __future__ import annotations

import copy
import os

import pytest

from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_FAILED
from launch.execution import record
from launch.plan import rundir
from launch.study import pipeline
from tests.helpers.slurm_examples import Tools


@pytest.fixture
def tools(tmp_path_factory, monkeypatch):
    found = Tools(tmp_path_factory.mktemp("tools") / "bin")
    found.add("sbatch", "echo 12")
    found.add("squeue", "echo PENDING")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    return found


def remembered(function):
    """Return a copy of what the function returned for the same arguments before."""
    results = {}

    def call(*args, **kwargs):
        key = repr((args, kwargs))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return copy.deepcopy(results[key])

    return call


@pytest.fixture
def phases_that_end(monkeypatch):
    """Let phases end as they begin, with the files that real ones leave.

    Returns the phases that were started, and `asked`: signals that arrive while one ends, and under
    `accuracy of <phase>` what an evaluation finds. Once only, under `signal`, `dies` and `removes
    <phase>`: it is signalled, it fails before it begins, it deletes the file that is the value.
    """
    started, asked = [], {}

    def execute(plan, host, image, parent, stopping):
        name = plan.run_dir.name.partition("_")[2]
        if asked.pop(f"dies {name}", False):
            return EXIT_FAILED
        started.append(plan.run_dir.name)
        rundir.make(plan.run_dir)
        left = {
            "trainer": ["model/model.safetensors"],
            "evaluator": ["selected.jsonl", "scored.jsonl"],
        }
        for file in left.get(plan.config.method.kind, []):
            json_files.write_text(plan.run_dir / file, f"of {plan.run_dir}")
        kept = record.begin(plan, host, image, parent)
        json_files.write_json(
            plan.run_dir / "record.json", record.finish(kept, plan.run_dir, "done", 0, [], {})
        )
        accuracy = asked.get(f"accuracy of {name}")
        found = {} if accuracy is None else {"accuracy": accuracy}
        json_files.write_json(plan.run_dir / "result.json", {"status": "done", **found})
        if file := asked.pop(f"removes {name}", None):
            file.unlink()
        if number := asked.pop(f"signal {name}", asked.get(plan.run_dir.name)):
            os.kill(os.getpid(), number)
        return EXIT_DONE

    # Runs of one test compose the same phases again, which takes most of their time.
    monkeypatch.setattr(pipeline, "compose", remembered(pipeline.compose))
    monkeypatch.setattr(
        record, "packages", dict
    )  # reading what is installed takes most of the time of what ends at once
    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.setattr(pipeline, "check_host", lambda plan, host: None)
    return started, asked
