"""Provide fixtures: stubs of Slurm's commands, and pipeline phases that end immediately."""

from __future__ import annotations

import copy
import functools
import json
import os

import pytest
from huggingface_hub import constants

from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_FAILED
from launch.execution import record
from launch.inputs import model_config
from launch.plan import rundir
from launch.study import pipeline
from tests.helpers.slurm_examples import Tools

COMMIT = "c" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a function that adds a repository, at its newest commit, to the Hub's offline cache.

    `content` is the config.json of a model.
    """
    model_config.hub_file.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def add(hub_id, kind="models", commit=COMMIT, **content):
        model_config.hub_file.cache_clear()
        folder = tmp_path / f"{kind}--{hub_id.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs/main").write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "README.md").write_text("")
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps(content))

    yield add
    model_config.hub_file.cache_clear()


@pytest.fixture
def tools(tmp_path_factory, monkeypatch):
    """Return stubs of Slurm's commands, which are first on the PATH."""
    stubs = Tools(tmp_path_factory.mktemp("tools") / "bin")
    stubs.add("sbatch", "echo 12")
    stubs.add("squeue", "echo PENDING")
    monkeypatch.setenv("PATH", f"{stubs.folder}:{os.environ['PATH']}")
    return stubs


def cached(function):
    """Cache a function whose results are modified; each call returns a copy."""
    results = {}

    def call(*args, **kwargs):
        key = repr((os.getcwd(), args, kwargs))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return copy.deepcopy(results[key])

    return call


state_of_the_code = functools.cache(record.code)
compose_once = cached(pipeline.compose)


@pytest.fixture
def phases_that_end(monkeypatch):
    """Replace the execution of phases: each ends immediately with the files of a real phase.

    Return the names of the started phases, and a dict of events that a test sets:
    - `<run directory>`: a signal to send at the end of a phase;
    - `accuracy of <phase>`: the result of an evaluation;
    - once only, `signal <phase>`: likewise a signal; `dies <phase>`: the phase fails before it
      starts; `removes <phase>`: a file to delete.
    """
    started, events = [], {}

    def execute(plan, host, image, parent, stop_signals):
        name = plan.run_dir.name.partition("_")[2]
        if events.pop(f"dies {name}", False):
            return EXIT_FAILED
        started.append(plan.run_dir.name)
        rundir.make(plan.run_dir)
        files = {
            "trainer": ["model/model.safetensors"],
            "evaluator": ["selected.jsonl", "scored.jsonl"],
        }
        for file in files.get(plan.config.method.kind, []):
            json_files.write_text(plan.run_dir / file, f"of {plan.run_dir}")
        started_record = record.begin(plan, host, image, parent)
        json_files.write_json(
            plan.run_dir / "record.json",
            record.finish(started_record, plan.run_dir, "done", 0, [], {}),
        )
        accuracy = events.get(f"accuracy of {name}")
        metrics = {} if accuracy is None else {"accuracy": accuracy}
        json_files.write_json(plan.run_dir / "result.json", {"status": "done", **metrics})
        if file := events.pop(f"removes {name}", None):
            file.unlink()
        if number := events.pop(f"signal {name}", events.get(plan.run_dir.name)):
            os.kill(os.getpid(), number)
        return EXIT_DONE

    # Repeated compositions, git and the list of installed packages would take most of the time.
    monkeypatch.setattr(pipeline, "compose", compose_once)
    monkeypatch.setattr(record, "packages", dict)
    monkeypatch.setattr(record, "code", state_of_the_code)
    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.setattr(pipeline, "check_host", lambda plan, host: None)
    return started, events
