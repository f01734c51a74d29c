"""Add a method to a copy of the repository: one YAML, one program, and its class in the lock."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from launch.config.choose import BATCH_KEYS
from launch.config.identity import PROPERTIES, composition, identity
from launch.plan.resuming import recorded_config
from launch.schema.trainer_args import lock
from tests.conftest import ROOT, composed

METHOD = """
name: kto
program: recipes.kto
kind: trainer
config_class: trl.KTOConfig
rows: dpo
examples_per_row: 2
reference: always
held_out_metrics: {eval_loss: false}
args:
  beta: 0.1
  learning_rate: 1.0e-6
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  max_length: 1024
  gradient_checkpointing: true
  logging_steps: 1
"""
PROGRAM = """
from trl import KTOConfig, KTOTrainer

from recipes.data.data_load import load, texts
from recipes.measure.metrics import Metrics
from recipes.models.layers import CompiledLayers
from recipes.models.model_build import adapter_config, build_model, build_tokenizer
from recipes.rank.program import main
from recipes.training.checkpoint import AtomicCheckpoints
from recipes.training.selection import heldout
from recipes.training.train_loop import build_arguments, train
from recipes.training.trainer_errors import ReportedRejections


class Trainer(CompiledLayers, AtomicCheckpoints, ReportedRejections, KTOTrainer):
    pass


def kto(config):
    loaded = load(config.data, config.method.rows)
    trainer = Trainer(
        model=build_model(config),
        ref_model=None if config.adapter.rank else build_model(config),
        args=build_arguments(KTOConfig, config),
        train_dataset=loaded.rows,
        eval_dataset=heldout(config),
        processing_class=build_tokenizer(config, texts(loaded.rows)),
        peft_config=adapter_config(config),
    )
    return train(config, trainer, Metrics(config))


if __name__ == "__main__":
    main(kto)
"""
ON_MI300X = ("hardware=mi300x", "model=qwen3_4b", "topology=single", "data.num_train=64")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a copy of the repository with the two files added."""
    folder = tmp_path_factory.mktemp("added")
    for name in ("conf", "launch", "recipes", "containers"):
        ignored = shutil.ignore_patterns("__pycache__", "local")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "conf/method/kto.yaml").write_text(METHOD)
    (folder / "recipes/kto.py").write_text(PROGRAM)
    script = ROOT / "containers/lock_trainer_args.py"
    spec = importlib.util.spec_from_file_location("lock_trainer_args", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    added = {"trl.KTOConfig": module.arguments("trl.KTOConfig")}  # all classes take a minute
    content = {**lock(), "arguments": {**lock()["arguments"], **added}}
    (folder / "containers/trainer_args.lock.json").write_text(json.dumps(content))
    return folder


def launched(repository, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "launch/run.py", "method=kto", *overrides],
        cwd=repository,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def plan(repository, *overrides: str) -> dict:
    done = launched(repository, *ON_MI300X, "mode=plan", "format=json", *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_includes_the_reference_and_the_batch(repository):
    planned = plan(repository)
    parts = planned["memory"][0]["parts_gb"]
    assert parts["reference"] == parts["weights"] > 0
    chosen = {choice["key"]: choice["value"] for choice in planned["chosen"]}
    assert chosen["step.rows"] == "padded"  # row_layouts is empty
    assert not chosen.keys() & {*BATCH_KEYS}  # batch_invariant is false
    assert "reference" not in plan(repository, "adapter=lora")["memory"][0]["parts_gb"]
    steps = planned["speed"]["run_hours"] * 3600 / planned["speed"]["step_s"]
    assert round(steps) == 3 * 64 * 2 // (4 * 2)


def test_rules_apply(repository):
    remedies = {
        "topology=split": "topology=single or topology=ddp",
        "step.rows=packed": "step.rows=padded",
        "data.curriculum=mixed": "method=sft, grpo",
        "data.preview=5": "method=sft, dpo",
        "+method.rewards.accuracy=1.0": "method=grpo",
        "method.selection.metric=eval_reward": "method.selection.metric=eval_loss",
    }
    done = launched(repository, *ON_MI300X[:2], "mode=plan", *remedies)
    assert done.returncode == 2
    for remedy in remedies.values():
        assert f"Use: {remedy}" in done.stderr


def test_trains_two_steps_on_a_cpu(repository, tmp_path):
    done = launched(repository, "smoke=true", f"run_root={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("*/[0-9]*/result.json")
    assert json.loads(result.read_text())["steps"] == 2


def test_a_record_without_properties_gets_those_of_its_method():
    config = composed("hardware=cpu", "method=dpo")
    record = json.loads(json.dumps(composition(config)))
    for name in PROPERTIES:
        del record["method"][name]
    restored = recorded_config(record)
    assert restored.method == config.method
    assert identity(composition(restored)) == identity(record) == identity(composition(config))
