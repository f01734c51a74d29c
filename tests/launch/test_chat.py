"""Test which run a chat continues, and how its command line is translated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import chat
from launch.plan import rundir
from tests.conftest import composed, leave_model, leave_record

NAMES = ("20260101-000000-aaaaaa", "20260102-000000-bbbbbb")


def a_run(folder: Path, *overrides: str, **more) -> Path:
    """Leave a run on hardware=cpu, whose directory `latest` points to."""
    leave_record(folder, composed(*overrides), "done", overrides=[*overrides], **more)
    rundir.make(folder)
    return folder


def planned(arguments: list[str], capfd) -> dict:
    assert chat.main([*arguments, "mode=plan", "format=json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("inner", ["", "model", "checkpoints/checkpoint-2"])
def test_a_chat_uses_the_place_and_model_of_a_run(tmp_path, capfd, inner):
    words = ["hardware=mi300x", "runtime=docker", "runtime.shm_gb=3", "model=qwen3_0_6b"]
    run = a_run(tmp_path / NAMES[0], *words, "method=sft", "method.args.learning_rate=1e-3")
    for folder in ("model", "checkpoints/checkpoint-2"):
        leave_model(run / folder)
    plan = planned([str(tmp_path / "latest" / inner), "temperature=0", "runtime.shm_gb=4"], capfd)
    (process,) = plan["processes"]
    assert [plan[key] for key in ("hardware", "runtime", "model", "method", "topology")] == [
        *("mi300x", "docker", "qwen3_0_6b", "chat", "single")
    ]
    assert process["container"]["shm_size"] == "4g"
    sources = [mount["source"] for mount in process["container"]["mounts"]]
    assert str(run / (inner or "model")) in sources
    assert plan["trainer_args"]["temperature"] == 0


def test_a_pipeline_offers_the_model_of_its_last_phase(tmp_path, capfd):
    phases = {"sft": "1_sft", "grpo": "2_grpo", "evaluate": "3_evaluate"}
    run = a_run(tmp_path / NAMES[0], "hardware=cpu", phases=phases)
    for name in ("1_sft", "2_grpo"):
        leave_model(a_run(run / name, "hardware=cpu") / "model")
    assert planned([str(run)], capfd)["method"] == "chat"
    assert f"model.path={run}/2_grpo" in chat.overrides([str(run)])


def test_other_models(tmp_path, capfd):
    leave_model(tmp_path / "mine")
    here, hub = ["hardware=cpu", str(tmp_path / "mine")], ["model=qwen3_0_6b", "hardware=mi300x"]
    assert planned(here, capfd)["method"] == planned(hub, capfd)["method"] == "chat"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["{tmp}/nothing", "hardware=cpu"], "model.path={tmp}/nothing: "),
        (["{tmp}", "hardware=cpu"], "model.path={tmp}: "),
        (["{tmp}", "{tmp}"], "{tmp} {tmp}: "),
        (["{tmp}/latest", "temprature=0"], "temprature=0: "),
        (["{tmp}/latest", "engine=vlm"], "method.args.engine=vlm: "),
        (["{tmp}/latest", "temperature=-1"], "method.args.temperature=-1: "),
        (["{tmp}/latest", "method=sft"], "method=sft: "),
        (["{tmp}/latest", "data=jsonl"], "data=jsonl "),
        (["model=qwen3_4bb", "hardware=cpu"], "model=qwen3_4bb: "),
    ],
)
def test_wrong_commands_are_rejected(tmp_path, capfd, arguments, key):
    leave_model(a_run(tmp_path / NAMES[0], "hardware=cpu") / "model")
    assert chat.main([word.format(tmp=tmp_path) for word in arguments]) == 2
    assert capfd.readouterr().err.startswith(key.format(tmp=tmp_path))


def test_without_arguments_it_explains_itself(capfd):
    assert (chat.main([]), chat.main(["--help"])) == (2, 0)
    assert "MODEL" in capfd.readouterr().out
