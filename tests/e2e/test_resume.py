"""Test that a resumed run equals one that was not interrupted, and the files of a run.

Recipes run in this process as the launcher configures them.
"""

import contextlib
import functools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import GenerationMixin

from launch.config.compose import compose
from launch.core.json_files import plain
from launch.plan.planning import prepare
from launch.reproduce import NOT_COMPARED
from launch.schema.trainer_args import complete
from recipes.dpo import dpo
from recipes.evaluate import evaluate
from recipes.grpo import grpo
from recipes.rank import files, program
from recipes.sampling import generation
from recipes.sft import sft
from recipes.training import checkpoint, train_loop

WORK = {"sft": sft, "dpo": dpo, "grpo": grpo, "evaluate": evaluate}
SMALL = """
hardware=cpu model=tiny model.num_layers=1 data.num_train=64 data.num_heldout=8 tracking=none
""".split()
STEPS = [
    "method.args.max_steps=4",
    "method.args.save_steps=2",
    "method.args.per_device_train_batch_size=8",
]
FP16 = ("hardware.precisions=[fp16]", "precision=fp16")
OWN = {
    "grpo":["method.args.num_generations=4", "method.args.max_completion_length=6",
        "+method.rewards.length=0.1"],
}  # fmt: skip


def configure(run_dir: Path, method: str, *overrides: str) -> Path:
    run_dir.mkdir(exist_ok=True)
    training_only = [] if method == "evaluate" else STEPS
    composed = compose(
        [*SMALL, f"method={method}", *training_only, *OWN.get(method, []), *overrides]
    )
    settings, _ = prepare(composed)
    content = {
        **plain(settings),
        "run_dir": str(run_dir),
        "trainer_args": complete(settings, run_dir, (8000, 8001)),
    }
    path = run_dir / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
    return path


def run(run_dir: Path, method: str, *overrides: str) -> tuple[int, dict]:
    code = program.run(WORK[method], ["--config", str(configure(run_dir, method, *overrides))])
    return code, json.loads((run_dir / "result.json").read_text())


def computed(run_dir: Path) -> list[dict]:
    """Return metrics.jsonl without values that depend on time."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in NOT_COMPARED} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return `whole(method)`, the directory of an uninterrupted run."""

    @functools.cache
    def once(method: str, *overrides: str) -> Path:
        run_dir = tmp_path_factory.mktemp(method)
        assert run(run_dir, method, *overrides)[0] == 0
        return run_dir

    return once


def assert_equal(run_dir: Path, other: Path) -> None:
    assert computed(run_dir) == computed(other)
    results = [json.loads((d / "result.json").read_text()) for d in (run_dir, other)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


@contextlib.contextmanager
def signal_in_step_2(monkeypatch):
    """Send SIGTERM when step 2 is logged, so that step 3 sees it between two checkpoints."""
    log = train_loop.Metrics.on_log

    def on_log(self, args, state, *rest, **kwargs):
        log(self, args, state, *rest, **kwargs)
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(train_loop.Metrics, "on_log", on_log)
        yield


@pytest.mark.parametrize(
    ("method", "overrides"), [("sft", ()), ("dpo", ()), ("grpo", ()), ("sft", FP16)]
)
def test_a_run_interrupted_and_resumed_equals_one_that_was_not(
    tmp_path, whole, method, overrides, monkeypatch
):
    with signal_in_step_2(monkeypatch):
        code, result = run(tmp_path, method, *overrides)
    assert (code, result["status"], result["steps"]) == (75, "interrupted", 3)
    assert run(tmp_path, method, *overrides)[0] == 0
    assert_equal(tmp_path, whole(method, *overrides))
    assert len(computed(tmp_path)) == 4


def test_fp16_casts_and_scales_the_loss_without_a_gpu(whole):
    halves, floats = (computed(whole("sft", *overrides)) for overrides in (FP16, ()))
    assert halves[0]["loss"] != floats[0]["loss"]
    assert halves[0]["loss"] == pytest.approx(floats[0]["loss"], rel=1e-3)
    scaler = torch.load(whole("sft", *FP16) / "checkpoints/checkpoint-4/scaler.pt")
    assert scaler["scale"] == 2.0**16, (
        "torch.amp's first, which no gradient of this model overflows"
    )
    assert scaler["_growth_tracker"] == 4


def test_a_finished_run_does_not_train_again_and_a_truncated_checkpoint_is_skipped(
    tmp_path, whole, capfd, monkeypatch
):
    """The heartbeat is renewed while files are hashed."""
    heartbeats = []

    def noted(path, heartbeat=None):
        heartbeats.append(heartbeat)
        return sha256(path, heartbeat)

    sha256 = files.sha256
    monkeypatch.setattr(files, "sha256", noted)
    monkeypatch.setattr(checkpoint, "sha256", noted)
    for _ in range(2):
        assert run(tmp_path, "sft")[0] == 0
        assert_equal(tmp_path, whole("sft"))
    assert set(heartbeats) == {tmp_path / "heartbeat"}

    weights = tmp_path / "checkpoints/checkpoint-4/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    capfd.readouterr()
    assert run(tmp_path, "sft")[0] == 0
    rejected, resumed = capfd.readouterr().out.split("resuming from")
    assert "checkpoint-4" in rejected
    assert "model.safetensors" in rejected
    assert "checkpoint-2" in resumed
    assert_equal(tmp_path, whole("sft"))


def test_a_run_whose_rewards_are_all_equal_has_a_warning(tmp_path, whole):
    assert "warning" not in json.loads((whole("grpo") / "result.json").read_text())
    code, result = run(tmp_path, "grpo", "method.rewards.length=0.0")
    assert code == 0
    assert result["warning"].startswith("As expected of random weights")
    assert "last 4 step(s)" in result["warning"]


def test_the_heartbeat_is_renewed_while_transformers_generates(tmp_path, monkeypatch):
    """The heartbeat is renewed before a step has ended."""
    heartbeat, beats, generate = tmp_path / "heartbeat", [], GenerationMixin.generate

    def watched(*args, **kwargs):
        heartbeat.touch()
        os.utime(heartbeat, (0, 0))
        answers = generate(*args, **kwargs)
        beats.append(heartbeat.stat().st_mtime > 0)
        return answers

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    monkeypatch.setattr(generation, "BEAT_EVERY_S", 0.0)
    # An adapter wraps the model that generates.
    assert run(tmp_path, "grpo", "adapter=lora")[0] == 0
    assert beats
    assert all(beats)


@pytest.mark.parametrize("method", ["sft", "grpo", "evaluate"])
def test_a_profile_of_each_recipe(tmp_path, whole, method):
    """Profiling two of four steps does not change the results."""
    overrides = (
        ["method.args.batch_size=2", "method.args.max_new_tokens=2"] if method == "evaluate" else []
    )
    assert run(tmp_path, method, "profile=torch", *overrides)[0] == 0
    assert (tmp_path / "profile/trace-rank0.json.gz").is_file()
    profile = json.loads((tmp_path / "profile/kernels.json").read_text())
    assert profile["steps"] == 2
    assert profile["shares"]["gemm"] > 0
    assert {row["kind"] for row in profile["kernels"]} >= {"gemm", "memory_bound"}
    if method == "sft":
        assert_equal(tmp_path, whole("sft"))


def test_evaluation_is_deterministic_and_can_sample(tmp_path, whole):
    asked = [f"model.path={whole('sft') / 'model'}", "method.args.max_new_tokens=4"]
    first, second = (run(tmp_path / name, "evaluate", *asked)[1] for name in ("a", "b"))
    assert first["samples"] == second["samples"]
    sampling = ["method.args.temperature=1", "method.args.samples_per_prompt=2"]
    sampled = run(tmp_path / "c", "evaluate", *asked, *sampling)[1]
    assert sampled["by_task"]["basic_arithmetic"]["num_samples"] == 16
    assert 0.0 <= sampled["accuracy"] <= 1.0
