"""Test the plan of method=export and the inputs that it rejects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.config.compose import compose
from launch.plan.planning import make_plan
from tests.conftest import composed, host_with, leave_model
from tests.helpers.exports import write_model
from tests.launch.execution.test_provenance import files_of


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("source"))


def test_an_export_gets_no_gpu_and_mounts_the_converter():
    converter = "/opt/llama.cpp/convert_hf_to_gguf.py"
    config = composed(
        *"hardware=mi300x method=export model.path=/models/m/it runtime=docker".split(),
        *("method.args.formats=[gguf]", f"method.args.gguf_converter={converter}"),
    )
    plan = make_plan(config, host_with(8), Path("/runs/export/1"))
    (process,) = plan.processes
    assert (process.kind, process.gpus, plan.memory) == ("exporter", [], [])
    spec = plan.containers["exporter"]
    assert (spec.devices, spec.environment["HIP_VISIBLE_DEVICES"]) == ({}, "-1")
    assert "/opt/llama.cpp" in [mount.source for mount in spec.mounts]


@pytest.mark.parametrize(("dtype", "more", "warns"), [
    ("float32", "", True), ("float32", "method.args.weights=bf16", False), ("bfloat16", "", False),
])  # fmt: skip
def test_an_export_warns_of_32_bits(tmp_path, dtype, more, warns):
    leave_model(tmp_path)
    shape = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32}
    shape |= {"model_type": "qwen3", "vocab_size": 151936, "dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = composed("method=export", f"model.path={tmp_path}", *more.split())
    plan = make_plan(config, host_with(0), Path("/runs/export/1"))
    assert any("method.args.weights=bf16" in warning for warning in plan.warnings) == warns


# (composition of the evaluation's record, message about it as results_from)
EVALUATIONS = [
    ({"model": {"path": "/another", "hub_id": None}}, "evaluated /another, but"),
    ({"model": {"name": "another"}}, "evaluated random weights, but"),
    ({"seed": 0}, "not a finished evaluation"),
    (None, "not a finished evaluation"),
]


@pytest.fixture
def error_of(launch):
    def run(*overrides: str) -> str:
        done = launch("hardware=cpu", "method=export", *overrides, "mode=plan")
        assert (done.code, "Traceback" in done.err) == (2, False), done.out
        return done.err

    return run


def test_results_of_a_commit_need_an_export_of_it(error_of, launch, tmp_path):
    evaluated = {"path": None, "hub_id": "Qwen/Qwen3-4B", "revision": "a" * 40}
    done = {"status": "done", "accuracy": 1.0, "interval": [0.5, 1.0]}
    files_of(tmp_path, result=done, record={"composition": {"model": evaluated}})
    words = ["model=qwen3_4b", f"method.args.results_from={tmp_path}"]
    message = error_of(*words)
    remedy = message.rpartition("Use: ")[2].strip().rstrip(".")
    assert launch("hardware=cpu", "method=export", *words, remedy, "mode=plan").code == 0


@pytest.mark.parametrize(("composition", "message"), EVALUATIONS)
def test_results_of_another_model_are_rejected(error_of, tmp_path, source, composition, message):
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    if composition is not None:
        done = {"status": "done", "accuracy": 1.0, "interval": [0.5, 1.0]}
        files_of(evaluation, result=done, record={"composition": composition})
    assert message in error_of(f"model.path={source}", f"method.args.results_from={evaluation}")


def test_unusable_arguments_are_rejected(error_of, tmp_path, source, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    model = f"model.path={source}"
    assert "Did you mean fp8" in error_of(model, "method.args.weights=fp9")
    assert "Did you mean gguf" in error_of(model, "method.args.formats=[ggfu]")
    assert "HF_TOKEN is not set in your shell" in error_of(model, "method.args.push_to=me/model")
    (tmp_path / "convert_hf_to_gguf.py").touch()
    converter = f"method.args.gguf_converter={tmp_path}/convert_hf_to_guf.py"
    message = error_of(model, "method.args.formats=[gguf]", converter)
    assert "no such file. Did you mean convert_hf_to_gguf.py" in message


def test_the_error_for_a_run_without_a_model_offers_others(error_of, tmp_path):
    unfinished = files_of(tmp_path / "unfinished", record={"status": "interrupted"})
    assert "(status interrupted). Use: the command of that run again" in error_of(
        f"model.path={unfinished}"
    )
    newest = files_of(unfinished / "checkpoints/checkpoint-10", manifest={}, config={})
    files_of(unfinished / "checkpoints/checkpoint-9", manifest={}, config={})
    assert f"or model.path={newest}" in error_of(f"model.path={unfinished}")
    done = files_of(tmp_path / "done", record={"status": "done"})
    assert "Use: model.path=<the run that trained the model>." in error_of(f"model.path={done}")
    adapter = files_of(tmp_path / "adapter", adapter_config={})
    assert "is an adapter, not a model" in error_of(f"model.path={adapter}")
    (files_of(adapter, config={}) / "model.safetensors").touch()
    assert "also has an adapter" in error_of(f"model.path={adapter}")
    phases = {"one": "1_one", "two": "2_two"}
    chosen = {"raft": {"model": "2_two", "evaluation": "3_three", "last_evaluation": "3_three"}}
    pipeline = files_of(tmp_path / "chosen", record={"phases": phases, "chosen": chosen})
    for folder in phases.values():
        (pipeline / folder / "model").mkdir(parents=True)
    message = error_of(f"model.path={pipeline}")  # RAFT's own result first
    assert f"Use: model.path={pipeline}/2_two or model.path={pipeline}/1_one." in message


def test_an_evaluation_of_the_same_directory_by_another_name(launch, tmp_path, source):
    (tmp_path / "link").symlink_to(source)
    for measured, exported in (
        (f"{tmp_path}/link", source),
        (f"{source}/", f"{tmp_path}/../{tmp_path.name}/link/"),
    ):
        record = {"composition": {"model": {"path": str(measured), "hub_id": None}}}
        evaluation = files_of(
            tmp_path / "evaluation",
            result={"status": "done", "accuracy": 1.0, "interval": [0.5, 1.0]},
            record=record,
        )
        overrides = [f"model.path={exported}", f"method.args.results_from={evaluation}"]
        done = launch("hardware=cpu", "method=export", *overrides, "mode=plan")
        assert done.code == 0, done.err


def test_a_run_directory_stands_for_its_model(launch, tmp_path, source):
    run = files_of(tmp_path / "run", record={"status": "done"})
    (run / "model").symlink_to(source)
    done = launch("hardware=cpu", "method=export", f"model.path={run}", "mode=plan", "format=json")
    assert done.code == 0, done.err
    config = compose(["hardware=cpu", "method=evaluate", f"model.path={run}"])
    assert config.model.path == str(run / "model")
