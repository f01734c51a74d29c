"""The run directory and its record.

Which run is continued, what cannot be trusted, what is kept secret.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.config.identity import composition_hash
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import UserError
from launch.execution import record
from launch.plan import rundir, sealed
from launch.plan.planning import make_plan
from launch.reproduce import compare_metrics, load_record
from launch.reproduce import main as reproduce
from tests.conftest import composed, host_with, leave_record


def a_run(root: Path, name: str, status: str, *overrides: str) -> Path:
    config = composed("hardware=cpu", *overrides)
    folder = root / "runs" / "sft-tiny-cpu" / name
    leave_record(folder, config, status)
    return folder


def choose(root: Path, *overrides: str):
    return rundir.choose(composed("hardware=cpu", f"run_root={root / 'runs'}", *overrides))


def test_auto_continues_the_newest_unfinished_run_of_the_same_composition(tmp_path):
    a_run(tmp_path, "1", "failed")
    wanted = a_run(tmp_path, "2", "interrupted")
    a_run(tmp_path, "3", "done")
    a_run(tmp_path, "4", "failed", "seed=9")
    assert choose(tmp_path) == (wanted, True)


@pytest.mark.parametrize("given", ["tracking=tensorboard", "tracking.package=tensorboard"])
def test_a_run_whose_record_names_the_package_of_its_tracker_is_continued(tmp_path, given):
    """As those of earlier versions do: conf/tracking named it."""
    before = a_run(tmp_path, "1", "failed", "tracking.package=tensorboard")
    assert choose(tmp_path, given) == (before, True)
    a_run(tmp_path, "2", "failed", "tracking=none")
    assert choose(tmp_path, given) == (before, True)


def test_a_run_whose_record_has_a_key_that_the_schema_lost_is_continued(tmp_path):
    before = a_run(tmp_path, "1", "interrupted")
    record = json_files.read_json(before / "record.json")
    record["composition"]["precision"]["loss_scaling"] = False
    record["composition_hash"] = "as an earlier version computed it"
    json_files.write_json(before / "record.json", sealed.seal(record))
    assert choose(tmp_path) == (before, True)


def test_a_reproduction_is_not_continued_in_place_of_the_run(tmp_path):
    a_run(tmp_path, "1-again-2", "failed")
    assert choose(tmp_path)[1] is False


def test_a_run_whose_data_changed_is_not_continued(tmp_path):
    folder, file = a_run(tmp_path, "1", "failed"), tmp_path / "train.jsonl"
    file.write_text("old")
    kept = json_files.read_json(folder / "record.json")
    json_files.write_json(
        folder / "record.json",
        sealed.seal({**kept, "data": {"files": {str(file): json_files.sha256(file)}}}),
    )
    assert choose(tmp_path) == (folder, True)
    file.write_text("new")
    assert choose(tmp_path)[1] is False
    with pytest.raises(UserError, match=r"train\.jsonl changed since that run began"):
        choose(tmp_path, f"resume={folder}")


def test_a_run_that_is_running_is_left_alone(tmp_path):
    folder = a_run(tmp_path, "1", "running")
    with rundir.locked(folder):
        assert choose(tmp_path)[1] is False
        with pytest.raises(UserError, match="another launcher"), rundir.locked(folder):
            pass
        with pytest.raises(UserError, match="still running"):
            choose(tmp_path, f"resume={folder}")
    assert choose(tmp_path) == (folder, True)  # its launcher is gone


def made(tmp_path, *overrides, **environ):
    config = composed("hardware=cpu", *overrides)
    host = host_with(0, **environ)
    plan = make_plan(config, host, tmp_path / "run", request=Request(overrides))
    return record.begin(plan, host, None)


def test_record_holds_what_reproduction_needs(tmp_path):
    kept = made(tmp_path)
    assert [name for name in sealed.REQUIRED if name not in kept] == []
    assert sealed.faults(kept) == []
    assert kept["packages"]["trl"] == "1.16.0"
    assert kept["locks"]["containers/cpu/requirements.lock"]
    assert kept["composition"]["model"]["name"] == "tiny"


def test_secrets_stand_by_name_only(tmp_path):
    kept = made(
        tmp_path,
        HF_TOKEN="sentinel1",
        WANDB_API_KEY="sentinel2",
        NCCL_DEBUG="INFO",
        VLLM_API_KEY="sentinel3",
    )
    text = json.dumps(kept)
    assert "sentinel" not in text
    assert kept["secrets"] == ["HF_TOKEN", "VLLM_API_KEY", "WANDB_API_KEY"]
    assert kept["environment"]["trainers"]["NCCL_DEBUG"] == "INFO"


def test_reproduce_needs_a_run(capsys, tmp_path):
    assert reproduce([str(tmp_path)]) == 2
    assert f"{tmp_path}: it has no record.json" in capsys.readouterr().err
    assert reproduce([]) == 2


def test_reproduce_refuses_a_run_that_is_not_done(capsys, tmp_path):
    json_files.write_json(tmp_path / "record.json", made(tmp_path))
    assert reproduce([str(tmp_path)]) == 2
    assert "Only a run with status done" in capsys.readouterr().err


def test_metrics_are_compared_to_the_last_digit():
    then = [{"step": 1, "loss": 0.1, "time_s": 3.0}]
    assert compare_metrics(then, [{"step": 1, "loss": 0.1, "time_s": 9.0}]) == []
    assert compare_metrics(then, [{"step": 1, "loss": 0.1 + 2e-17}]) == [
        "step 1, loss: 0.1 -> 0.10000000000000002"
    ]
    assert compare_metrics(then, []) == ["1 lines of metrics then, 0 now"]
    assert compare_metrics(then, [{"step": 1}]) == ["step 1, loss: 0.1 -> None"]


@pytest.mark.parametrize(("given", "same"), [
    (["runtime.max_restarts=3", "runtime.hang_timeout_s=60", "runtime.stop_timeout_s=30"], True),
    (["runtime=slurm", "runtime.slurm.nodes=2", "topology=ddp"], False),
    (["seed=1"], False),
])  # fmt: skip
def test_which_settings_make_another_run(given, same):
    assert (
        composition_hash(composed("hardware=cpu", *given))
        == composition_hash(composed("hardware=cpu"))
    ) is same


def test_a_folder_of_runs_given_for_a_run(launch, tmp_path):
    for name in ("20261121-101500-aaaaaa", "20261122-101500-000000"):
        (tmp_path / "runs/quick" / name).mkdir(parents=True)
        (tmp_path / "runs/quick" / name / "record.json").write_text("{}")
    newest = f"It holds runs, the newest is {tmp_path}/runs/quick/20261122-101500-000000."
    for given in ("resume=runs/quick", "model.path=runs/quick"):
        done = launch(given, "mode=plan")
        assert (done.code, newest in done.err) == (2, True), done.err
    assert "It holds" not in launch("resume=runs").err
    with pytest.raises(
        UserError, match="no record.json. It holds runs, the newest is .*/20261122-101500-000000"
    ):
        load_record(tmp_path / "runs/quick")


@pytest.mark.parametrize(("changed", "said"), [
    ({"data": [1]}, "sha256: the content was changed after it was written"),
    ({"composition": "seed=1"}, "sha256: the content was changed after it was written"),
    ({"composition_hash": None}, "sha256: the content was changed after it was written"),
    ({"model": ...}, "model: missing"),
])  # fmt: skip
def test_a_run_whose_record_was_changed_by_hand_does_not_go_on(tmp_path, changed, said):
    folder = a_run(tmp_path, "1", "failed")
    kept = {**json_files.read_json(folder / "record.json"), **changed}
    json_files.write_json(
        folder / "record.json", {key: value for key, value in kept.items() if value is not ...}
    )
    with pytest.raises(
        UserError,
        match=rf"its record.json cannot be trusted \({said}\). resume=never starts afresh.",
    ):
        choose(tmp_path, f"resume={folder}")
    assert choose(tmp_path)[1] is False
    if "composition_hash" not in changed:  # by which auto knows a run
        assert rundir.left(composed("hardware=cpu", f"run_root={tmp_path / 'runs'}"), tmp_path) == [
            f"Not resuming {folder}: its record.json cannot be trusted ({said})."
        ]


def test_of_what_cannot_go_on_only_the_newest_is_said_and_only_under_auto(tmp_path):
    config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
    gone = {"files": {str(tmp_path / "gone.jsonl"): "0"}}
    folder = a_run(tmp_path, "2", "failed")
    leave_record(folder, config, "failed", data=gone)
    assert rundir.left(config, tmp_path) == [
        f"Not resuming {folder}: {tmp_path / 'gone.jsonl'} changed since that run began."
    ]
    assert (
        rundir.left(
            composed("hardware=cpu", f"run_root={tmp_path / 'runs'}", "resume=never"), tmp_path
        )
        == []
    )
    a_run(tmp_path, "3", "done")
    assert rundir.left(config, tmp_path) == []
    assert rundir.left(config, a_run(tmp_path, "4", "failed")) == []
    json_files.write_text(tmp_path / "runs/sft-tiny-cpu/5/record.json", "{")
    assert rundir.left(config, tmp_path) == [
        f"Not resuming {tmp_path}/runs/sft-tiny-cpu/5: {rundir.DAMAGED}."
    ]


def test_a_record_with_keys_that_are_numbers_is_as_it_was_written(tmp_path):
    """JSON has them as text, and text sorts otherwise."""
    for kept in ({220: 1, 1000: 2}, {2: 1, "b": 2}):
        config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
        leave_record(tmp_path / "run", config, "failed", seeds=kept)
        assert sealed.faults(json_files.read_json(tmp_path / "run/record.json")) == []
