"""Test RAFT's phases in this process, as the launcher plans them.

A run that is killed at any point and started again ends with the same weights. It does not use
samples of another configuration.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from launch.config.compose import compose
from launch.config.request import Request
from launch.plan.planning import make_plan, prepare, rank_config
from launch.schema.plan import Plan
from launch.study import pipeline
from recipes import preview
from recipes import sample as recipe
from recipes.data.data_load import load
from recipes.sampling import batches, sample_keys
from recipes.training import train_loop
from tests.conftest import host_with
from tests.e2e import phases

SMALL = """
hardware=cpu model=tiny model.num_layers=1 data.num_train=48 data.num_heldout=8 tracking=none
""".split()
RAFT = [
    *SMALL,
    "method=raft",
    "method.args.cycles=1",
    # Random weights solve no problem and never finish, so keep one answer to each prompt.
    "method.args.sample={num_prompts: 12, batch_size: 4, samples_per_prompt: 2, threshold: 0.0, "
    "finished_only: false, per_prompt: 1}",
    "method.args.start={max_steps: 2, per_device_train_batch_size: 8, save_steps: 1}",
    # Three steps.
    "method.args.train={num_train_epochs: 1, per_device_train_batch_size: 4, save_steps: 1}",
    "method.args.evaluate={batch_size: 4}",
]
PHASES = ["start", "cycle0_evaluate", "cycle1_sample", "cycle1_train", "cycle1_evaluate"]
SAMPLE = "3_cycle1_sample"


class Killed(BaseException):
    """Simulate a kill. The program does not catch it and writes no result."""


@functools.cache
def planned(run_dir: Path, *overrides: str) -> dict[str, Plan]:
    arguments = [*RAFT, *overrides]
    return pipeline.make_plans(compose(arguments), Request(arguments), host_with(0), run_dir)


def raft(run_dir: Path, *overrides: str) -> dict[str, dict]:
    """Run the phases that are not done, up to the first failure; return each result.json."""
    return dict(phases.run(planned(run_dir, *overrides)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, raft(run_dir)


@pytest.fixture
def begun(tmp_path, whole):
    """Return a directory in which SFT of random weights and its evaluation are done."""
    begin(tmp_path, whole, "cycle1_sample")
    return tmp_path


def check_adapter_is_trained_and_merged(run_dir: Path, *overrides: str) -> None:
    """Run RAFT with an adapter, and assert that the next phase uses the merged model."""
    results = raft(run_dir, *overrides)
    assert list(results) == PHASES
    assert {result["status"] for result in results.values()} == {"done"}
    adapter, merged = (
        run_dir / folder("cycle1_train") / name
        for name in ("adapter/adapter_model.safetensors", "model")
    )
    assert adapter.is_file()
    assert results["cycle1_train"]["weights_sha256"] != results["start"]["weights_sha256"]
    assert not (merged / "adapter_config.json").exists()
    assert Path(planned(run_dir, *overrides)["cycle1_evaluate"].config.model.path) == merged


def test_an_adapter_is_trained_and_merged_for_the_next_phase(tmp_path):
    check_adapter_is_trained_and_merged(
        tmp_path, "adapter=dora", "adapter.rslora=true", "adapter.rank=4"
    )


def begin(run_dir: Path, whole, phase: str) -> None:
    """Copy the phases before `phase` from the complete run."""
    for name in PHASES[: PHASES.index(phase)]:
        shutil.copytree(whole[0] / folder(name), run_dir / folder(name))


def folder(phase: str) -> str:
    return f"{PHASES.index(phase) + 1}_{phase}"


def same(run_dir: Path, results: dict[str, dict], whole) -> None:
    """Assert that rows, weights and held-out answers equal those of the complete run."""
    assert list(results) == list(whole[1]) == PHASES
    for file in (
        f"{SAMPLE}/selected.jsonl",
        *(f"{folder(name)}/samples.jsonl" for name in PHASES if name.endswith("evaluate")),
    ):
        assert (run_dir / file).read_bytes() == (whole[0] / file).read_bytes(), file
    for name in ("start", "cycle1_train"):
        assert results[name]["weights_sha256"] == whole[1][name]["weights_sha256"], name
    assert results["cycle1_train"]["weights_sha256"] != results["start"]["weights_sha256"]
    for name in ("cycle0_evaluate", "cycle1_evaluate"):
        assert results[name]["right_per_problem"] == whole[1][name]["right_per_problem"], name


def dying(function, at: int):
    """Return `function` with a kill in call number `at`."""
    calls = []

    def killed(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            raise Killed
        return function(*args, **kwargs)

    return killed


KILLS = [  # phase, function and call in which it is killed, and the files written before
    # In the second batch.
    ("cycle0_evaluate", batches.Store, "put", 4, {"samples/*/*.jsonl": 2, "verdicts/*/*.jsonl": 1}),
    # Between judging and selecting.
    ("cycle1_sample", recipe, "write_rows", 1, {"samples/*/*.jsonl": 3, "verdicts/*/*.jsonl": 3}),
    # After the last checkpoint.
    ("cycle1_train", train_loop, "save_model", 1, {"checkpoints/checkpoint-3": 1, "model": 0}),
]


@pytest.mark.parametrize(("phase", "where", "what", "at", "left"), KILLS)
def test_killed_and_started_again_it_ends_the_same(
    tmp_path, whole, monkeypatch, phase, where, what, at, left
):
    begin(tmp_path, whole, phase)
    monkeypatch.setattr(where, what, dying(getattr(where, what), at))
    with pytest.raises(Killed):
        raft(tmp_path)
    monkeypatch.undo()
    killed = tmp_path / folder(phase)
    assert [path.name for path in sorted(tmp_path.iterdir())][-1] == killed.name
    assert not (killed / "result.json").exists()
    assert {pattern: len(list(killed.glob(pattern))) for pattern in left} == left
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/samples/*/*.jsonl")}
    same(tmp_path, raft(tmp_path), whole)
    assert {file: file.stat().st_mtime_ns for file in written} == written, (
        "no batch is sampled again"
    )


def test_a_truncated_sample_is_trained_without_an_end_token(whole, tmp_path):
    """The rows are streamed conversations, one complete and one truncated."""
    tokenizer = AutoTokenizer.from_pretrained(whole[0] / "1_start/model")
    rows = [
        {
            "prompt": [{"role": "user", "content": "1 + 1 = "}],
            "completion": [{"role": "assistant", "content": digit}],
            "finished": finished,
        }
        for digit, finished in (("2", True), ("3", False))
    ]
    path = tmp_path / "selected.jsonl"
    # TRL reads 1000 rows ahead, and would read a shorter file again and again.
    batches.write_rows(path, rows * 500)
    small = [override for override in SMALL if not override.startswith("data.num_")]
    streamed = "data=jsonl data.streaming=true data.shuffle_buffer=2 method.args.max_steps=1"
    arguments = [*small, *streamed.split(), f"data.path={path}"]
    plan = make_plan(prepare(compose(arguments))[0], host_with(0), tmp_path)
    cache = {"directory": str(tmp_path / "cache"), "key": "k"}
    config = OmegaConf.create({**rank_config(plan), "data_cache": cache})
    trainer = preview.make_trainer(config, load(config.data, "sft"), tokenizer)
    labels = {
        tuple(label for label in row["labels"] if label != -100)
        for row in itertools.islice(trainer.train_dataset, 20)
    }
    cut, (*ended, last) = sorted(labels, key=len)
    assert (tokenizer.decode(cut), tokenizer.decode(ended)) == ("3", "2")
    assert last == tokenizer.eos_token_id


def test_a_signal_stops_between_batches(begun, whole, monkeypatch):
    def asked(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, *args)

    batch = batches.Log.batch
    monkeypatch.setattr(batches.Log, "batch", asked)
    stopped = raft(begun)["cycle1_sample"]
    assert (stopped["code"], stopped["status"], stopped["batches"]) == (75, "interrupted", 1)
    monkeypatch.undo()
    same(begun, raft(begun), whole)
    lines = [
        json.loads(line) for line in (begun / SAMPLE / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3]


def work(run_dir: Path, *overrides: str) -> tuple[str, str]:
    """Return the hashes in the file names of samples and verdicts."""
    arguments = [
        *SMALL,
        "method=sample",
        "method.args.num_prompts=12",
        f"model.path={run_dir / '1_start/model'}",
        *overrides,
    ]
    config, _ = prepare(compose(arguments))
    content = rank_config(make_plan(config, host_with(0), run_dir))
    content = OmegaConf.create(content)
    args = recipe.SampleConfig(**content.trainer_args)
    sampled, judged = batches.open_stores(content, args, recipe.prompts(content, args))
    return sampled.folder.name, judged.folder.name


CHANGES = {  # override -> whether samples and verdicts are computed again
    "seed=1": (True, True),
    "method.args.temperature=0.9": (True, True),
    "method.args.samples_per_prompt=3": (True, True),
    "method.args.batch_size=5": (True, True),
    "hardware.attention=eager": (True, True),
    "+method.rewards.length=0.5": (False, True),
    "method.rewards.reasoning_gym=0.5": (False, True),
    "method.args.threshold=0.5": (False, False),
    "method.args.per_prompt=1": (False, False),
}


def test_a_change_recomputes_everything_that_it_affects(begun, monkeypatch):
    before = work(begun)
    assert work(begun) == before
    for override, again in CHANGES.items():
        assert tuple(a != b for a, b in zip(work(begun, override), before, strict=True)) == again, (
            override
        )
    weights = begun / "1_start/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert all(a != b for a, b in zip(work(begun), before, strict=True)), (
        "another model at the same path"
    )
    monkeypatch.setattr(sample_keys.importlib.metadata, "version", lambda name: f"a newer {name}")
    assert work(begun)[0] not in (before[0], None)


def test_an_empty_selection_is_explained_and_its_samples_are_reused(begun, whole, monkeypatch):
    refused = raft(begun, "method.args.sample.threshold=0.9")["cycle1_sample"]
    assert (refused["code"], refused["status"]) == (2, "failed")
    reuse = f"reuse={begun / SAMPLE}"
    for words in (
        "none of 24 samples is selected: 0 reach threshold=0.9",
        "best score is 0",
        "better model",
        "method.args.sample",
        reuse,
    ):
        assert words in refused["error"]
    other = begun / "other"
    begin(other, whole, "cycle1_sample")
    loaded = []

    def build(config, sampling):
        loaded.append(Path(config.run_dir).name)
        return build_generator(config, sampling)

    build_generator = batches.build_generator
    monkeypatch.setattr(batches, "build_generator", build)
    same(other, raft(other, f"method.args.sample.reuse={begun}"), whole)
    assert loaded == [folder("cycle1_evaluate")], "no model is loaded for samples that are there"
