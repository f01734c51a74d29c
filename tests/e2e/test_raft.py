"""RAFT as the launcher plans it, its phases run in this process: killed anywhere and started again it ends with the same weights, and
nothing that was sampled for other work is taken."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch import pipeline
from launch.compose import compose
from launch.plan import make_plan, prepare, rank_config
from recipes import sample as recipe
from recipes.common import batches, program, training
from recipes.sample import sample
from recipes.sft import sft
from tests.conftest import host_with

WORK = {"sft": sft, "sample": sample}
SMALL = ["hardware=cpu", "model=tiny", "model.num_layers=1", "data.num_train=48", "data.num_heldout=0", "tracking=none"]
RAFT = [
    *SMALL,
    "method=raft",
    "method.args.cycles=1",
    # Random weights get nothing right and end nowhere: all that they say is kept, once for each prompt.
    "method.args.sample={num_prompts: 12, batch_size: 4, samples_per_prompt: 2, threshold: 0.0, finished_only: false, per_prompt: 1}",
    "method.args.start={max_steps: 2, per_device_train_batch_size: 8}",
    "method.args.train={num_train_epochs: 1, per_device_train_batch_size: 4}",
]


class Killed(BaseException):
    """As a kill: nothing of the program catches it, and no result is written."""


def raft(run_dir: Path, *overrides: str) -> dict[str, dict]:
    """Every phase that has not ended yet; phase -> result.json."""
    arguments = [*RAFT, *overrides]
    plans = pipeline.make_plans(compose(arguments), arguments, host_with(0), run_dir)
    results = {}
    for name, plan in plans.items():
        result = plan.run_dir / "result.json"
        if not (result.is_file() and json.loads(result.read_text())["status"] == "done"):
            plan.run_dir.mkdir(parents=True, exist_ok=True)
            (plan.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
            code = program.run(WORK[plan.config.method.name], ["--config", str(plan.run_dir / "config.yaml")])
            results[name] = {**json.loads(result.read_text()), "code": code}
            if code:
                return results
        results[name] = json.loads(result.read_text())
    return results


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, raft(run_dir)


@pytest.fixture
def begun(tmp_path, whole):
    """A directory in which the first phase, random weights trained by SFT, is done."""
    shutil.copytree(whole[0] / "1_start", tmp_path / "1_start")
    return tmp_path


def same(run_dir: Path, found: dict[str, dict], whole) -> None:
    selected = "2_cycle1_sample/selected.jsonl"
    assert (run_dir / selected).read_bytes() == (whole[0] / selected).read_bytes()
    assert found["cycle1_train"]["weights_sha256"] == whole[1]["cycle1_train"]["weights_sha256"]
    assert found["cycle1_train"]["weights_sha256"] != whole[1]["start"]["weights_sha256"]


def dying(function, at: int):
    """`function`, in whose call number `at` the process is killed."""
    calls = []

    def killed(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            raise Killed
        return function(*args, **kwargs)

    return killed


@pytest.mark.parametrize(
    ("where", "what", "at", "kept"),
    [
        (batches.Store, "put", 3, 1),  # while the second batch is sampled
        (batches.Store, "put", 4, 2),  # it is sampled and not judged
        (recipe, "write_rows", 1, 3),  # all is judged, nothing selected
        (training, "save_model", 1, 3),  # of the training that follows: its last step is done, and its model not saved
    ],
)
def test_killed_and_started_again_it_ends_the_same(begun, whole, monkeypatch, where, what, at, kept):
    monkeypatch.setattr(where, what, dying(getattr(where, what), at))
    with pytest.raises(Killed):
        raft(begun)
    monkeypatch.undo()
    files = sorted(begun.glob("2_cycle1_sample/samples/*/*.jsonl"))
    assert len(files) == kept
    written = [file.stat().st_mtime_ns for file in files]
    same(begun, raft(begun), whole)
    assert [file.stat().st_mtime_ns for file in files] == written, "no batch is sampled again"


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
    lines = [json.loads(line) for line in (begun / "2_cycle1_sample/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def work(run_dir: Path, *overrides: str) -> tuple[str, str]:
    """The hashes under which a composition's samples and verdicts lie."""
    arguments = [*SMALL, "method=sample", "method.args.num_prompts=12", f"model.path={run_dir / '1_start/model'}", *overrides]
    config, _ = prepare(compose(arguments))
    content = rank_config(make_plan(config, host_with(0), run_dir))
    content = OmegaConf.create(content)
    args = recipe.SampleConfig(**content.trainer_args)
    sampled, judged = batches.stores(content, args, recipe.prompts(content, args))
    return sampled.folder.name, judged.folder.name


CHANGES = {  # override -> whether samples, and verdicts, are made again
    "seed=1": (True, True),
    "method.args.temperature=0.9": (True, True),
    "method.args.top_p=0.9": (True, True),
    "method.args.max_new_tokens=9": (True, True),
    "method.args.samples_per_prompt=3": (True, True),
    "method.args.batch_size=5": (True, True),
    "method.args.num_prompts=11": (True, True),
    "data.seed=1": (True, True),
    "hardware.attention=eager": (True, True),
    "+method.rewards.length=0.5": (False, True),
    "method.rewards.reasoning_gym=0.5": (False, True),
    "method.args.threshold=0.5": (False, False),
    "method.args.per_prompt=1": (False, False),
}


def test_a_change_reuses_nothing_that_it_touches(begun, monkeypatch):
    before = work(begun)
    assert work(begun) == before
    for override, again in CHANGES.items():
        assert tuple(a != b for a, b in zip(work(begun, override), before, strict=True)) == again, override
    weights = begun / "1_start/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert all(a != b for a, b in zip(work(begun), before, strict=True)), "another model at the same path"
    monkeypatch.setattr(batches.importlib.metadata, "version", lambda name: f"a newer {name}")
    assert work(begun)[0] not in (before[0], None)


def test_nothing_kept_says_what_to_loosen_and_the_samples_serve_again(begun, whole, monkeypatch):
    refused = raft(begun, "method.args.sample.threshold=0.9")["cycle1_sample"]
    assert (refused["code"], refused["status"]) == (2, "failed")
    reuse = f"reuse={begun}/2_cycle1_sample"
    for words in ("none of 24 samples is kept: 0 reach threshold=0.9", "best scores: 0", "better model", "method.args.sample", reuse):
        assert words in refused["error"]
    other = begun / "other"
    shutil.copytree(begun / "1_start", other / "1_start")
    monkeypatch.setattr(batches, "build_generator", dying(batches.build_generator, 1))
    same(other, raft(other, f"method.args.sample.reuse={begun}"), whole)
