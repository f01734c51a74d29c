"""Test which run resumes, which records can be trusted, and that records contain no secrets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from launch.config import identity
from launch.config.identity import composition_hash
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import UserError
from launch.execution import record
from launch.execution.execute import execute
from launch.plan import rundir, sealed
from launch.plan.planning import make_plan, prepare
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


def test_auto_resumes_the_newest_unfinished_run_of_the_same_composition(tmp_path):
    a_run(tmp_path, "1", "failed")
    unfinished = a_run(tmp_path, "2", "interrupted")
    a_run(tmp_path, "3", "done")
    a_run(tmp_path, "4", "failed", "seed=9")
    assert choose(tmp_path) == (unfinished, True)


def test_a_new_run_names_how_it_differs_from_an_unfinished_one(tmp_path):
    old = a_run(tmp_path, "1", "interrupted")

    def notes(*overrides: str) -> list[str]:
        config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}", *overrides)
        return rundir.skipped_run_notes(config, rundir.choose(config)[0])

    [note] = notes("method.args.learning_rate=0.5", "seed=9")
    assert "method.args.learning_rate, seed differ" in note
    assert str(old) in note
    assert notes() == []  # it resumes
    assert notes("seed=9", "resume=never") == []
    a_run(tmp_path, "2", "done", "seed=8")
    assert notes("seed=9") == []


def test_a_plan_says_where_it_resumes(launch, tmp_path):
    """Without a checkpoint, a run starts at its first step."""
    run = a_run(tmp_path, "1", "interrupted")
    command = ["hardware=cpu", f"run_root={tmp_path / 'runs'}", "mode=plan"]
    assert "(resumes)" in launch(*command).out
    (run / "checkpoints/checkpoint-13").mkdir(parents=True)
    (run / "checkpoints/checkpoint-5").mkdir()
    assert "(resumes after step 13 of " in launch(*command).out
    assert "(resumes" not in launch(*command, "seed=9").out


@pytest.mark.parametrize("override", ["tracking=tensorboard", "tracking.package=tensorboard"])
def test_a_record_with_the_package_of_its_tracker_resumes(tmp_path, override):
    """Records of earlier versions have the package, which conf/tracking contained."""
    before = a_run(tmp_path, "1", "failed", "tracking.package=tensorboard")
    assert choose(tmp_path, override) == (before, True)
    a_run(tmp_path, "2", "failed", "tracking=none")
    assert choose(tmp_path, override) == (before, True)


def test_a_record_with_a_key_that_the_schema_no_longer_has_resumes(tmp_path):
    before = a_run(tmp_path, "1", "interrupted")
    record = json_files.read_json(before / "record.json")
    record["composition"]["precision"]["loss_scaling"] = False
    record["composition_hash"] = "as an earlier version computed it"
    json_files.write_json(before / "record.json", sealed.seal(record))
    assert choose(tmp_path) == (before, True)


def test_auto_does_not_resume_a_reproduction(tmp_path):
    a_run(tmp_path, "1-again-2", "failed")
    assert choose(tmp_path)[1] is False


def test_a_run_with_changed_data_does_not_resume(tmp_path):
    folder, file = a_run(tmp_path, "1", "failed"), tmp_path / "train.jsonl"
    file.write_text("old")
    run_record = json_files.read_json(folder / "record.json")
    json_files.write_json(
        folder / "record.json",
        sealed.seal({**run_record, "data": {"files": {str(file): json_files.sha256(file)}}}),
    )
    assert choose(tmp_path) == (folder, True)
    file.write_text("new")
    assert choose(tmp_path)[1] is False
    with pytest.raises(UserError, match=r"train\.jsonl changed since that run began"):
        choose(tmp_path, f"resume={folder}")


def test_a_run_with_a_changed_reward_does_not_resume(launch, tmp_path):
    """A checkpoint must not be trained further with another reward."""
    reward = "def score(completions, **columns): return [{}] * len(completions)\n"
    (tmp_path / "mine.py").write_text(reward.format(1))
    command = ["hardware=cpu", "method=grpo", "method.rewards={mine.score: 1.0}", "name=own"]
    config, _ = prepare(composed(*command))
    plan = make_plan(config, host_with(0), tmp_path, [], Request(command))
    folder = tmp_path / "runs/own/1"
    leave_record(folder, config, "failed", data=record.data(plan))
    assert "(resumes)" in launch(*command, "mode=plan").out
    (tmp_path / "mine.py").write_text(reward.format(0))
    page = launch(*command, "mode=plan").out.replace("\n  ", " ")
    assert "(resumes)" not in page
    assert "mine.py changed since that run began" in page


def test_a_data_file_is_hashed_once_for_all_unfinished_runs(tmp_path, monkeypatch):
    file, hashed = tmp_path / "train.jsonl", []
    file.write_text("old")
    data = {"files": {str(file): json_files.sha256(file)}}
    for number in range(5):
        folder = a_run(tmp_path, str(number), "failed")
        run_record = json_files.read_json(folder / "record.json")
        json_files.write_json(folder / "record.json", sealed.seal({**run_record, "data": data}))
    sha256 = json_files.sha256
    monkeypatch.setattr(json_files, "sha256", lambda path: hashed.append(path) or sha256(path))
    for content, resumes in (("new", False), ("old", True)):  # of the same size
        file.write_text(content)
        assert choose(tmp_path)[1] is resumes
    assert hashed == [file, file]


def test_a_record_is_parsed_unless_it_has_another_hash(tmp_path):
    def may_have_hash(content):
        (tmp_path / "record.json").write_text(content)
        return identity.may_have_hash(tmp_path / "record.json", "a" * 64)

    assert identity.may_have_hash(tmp_path / "missing.json", "a" * 64)
    same, other = ('{"composition_hash": "%s"' % (letter * 64) for letter in "ab")
    assert [may_have_hash(same), may_have_hash(same + other), may_have_hash(other)] == [1, 1, 0]
    assert may_have_hash("\0" * 9)  # damaged
    assert may_have_hash(other + ', "loss_scaling": 1')  # the hash is computed again


def test_a_running_run_does_not_resume(tmp_path):
    folder = a_run(tmp_path, "1", "running")
    with rundir.locked(folder):
        assert choose(tmp_path)[1] is False
        with pytest.raises(UserError, match="another launcher"), rundir.locked(folder):
            pass
        with pytest.raises(UserError, match="still running"):
            choose(tmp_path, f"resume={folder}")
    assert choose(tmp_path) == (folder, True)  # its launcher is gone


def test_one_of_several_launchers_resumes_and_the_others_are_refused(tmp_path):
    folder = a_run(tmp_path, "1", "interrupted")
    config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
    assert rundir.choose(config, starts=True) == (folder, True)
    with (
        rundir.locked(folder),
        pytest.raises(UserError, match=rf"^{folder}: another launcher.*resume=never"),
    ):
        rundir.choose(config, starts=True)
    with rundir.locked(folder):  # a plan says so
        (note,) = rundir.skipped_run_notes(config, rundir.choose(config)[0])
        assert note.startswith(f"{folder}: another launcher")
    # Another launcher has finished the run since this one chose it.
    host = host_with(0)
    plan = make_plan(config, host, a_run(tmp_path, "1", "done"))
    with pytest.raises(UserError, match=rf"^{folder}: .*resume=never"):
        execute(plan, host, None)
    assert rundir.choose(config, starts=True)[1] is False


@pytest.mark.parametrize(
    "newest", ["20991231-235959-ffffff", "99991231-235959-a", "99999999-999999"]
)
def test_runs_are_in_the_order_of_their_starts_even_if_the_clock_was_set_back(tmp_path, newest):
    a_run(tmp_path, newest, "interrupted")
    last = choose(tmp_path, "resume=never")[0]
    if newest < "9999":
        assert last.name.startswith("21000101-000000")
        a_run(tmp_path, last.name, "interrupted")
        assert choose(tmp_path) == (last, True)


def test_runs_that_start_in_the_same_second_are_in_order(tmp_path):
    names = []
    for _ in range(5):
        names.append(rundir.fresh_name(tmp_path))
        (tmp_path / names[-1]).mkdir()
    assert sorted(names) == names


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL])
def test_a_file_system_without_locks_uses_a_lock_of_this_machine(
    tmp_path, monkeypatch, capsys, number
):
    def flock(file, operation):
        if Path(file.name).parent == tmp_path:
            raise OSError(number, "not supported")
        real_flock(file, operation)

    real_flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    assert not rundir.is_locked(tmp_path)
    with rundir.locked(tmp_path):
        assert f"{tmp_path}: its file system has no locks" in capsys.readouterr().err
        assert rundir.is_locked(tmp_path)
        with pytest.raises(UserError, match="another launcher"), rundir.locked(tmp_path):
            pass
    assert not rundir.is_locked(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_a_run_that_cannot_be_read_is_passed_over_with_a_note(tmp_path):
    folder = a_run(tmp_path, "20260101-000000-aaaaaa", "interrupted")
    folder.chmod(0)
    chosen, resumes = choose(tmp_path)
    config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
    notes = rundir.skipped_run_notes(config, chosen)
    folder.chmod(0o700)
    assert not resumes
    assert [str(folder) in note for note in notes] == [True]


def record_of(tmp_path, *overrides, **environ):
    config = composed("hardware=cpu", *overrides)
    host = host_with(0, **environ)
    plan = make_plan(config, host, tmp_path / "run", request=Request(overrides))
    return record.begin(plan, host, None)


def test_a_record_has_what_reproduction_needs(tmp_path):
    run_record = record_of(tmp_path)
    assert [name for name in sealed.REQUIRED if name not in run_record] == []
    assert sealed.problems(run_record) == []
    assert run_record["packages"]["trl"] == "1.16.0"
    assert run_record["locks"]["containers/cpu/requirements.lock"]
    assert run_record["composition"]["model"]["name"] == "tiny"


def test_packages_of_a_container_are_those_that_its_ranks_report(tmp_path):
    run_record = record_of(tmp_path, "runtime=docker", "container=cpu")
    assert run_record["packages"] == {}
    (tmp_path / "packages.json").write_text('{"torch": "2.0"}')
    finished = record.finish(run_record, tmp_path, "done", 0, [], {})
    assert finished["packages"] == {"torch": "2.0"}
    assert sealed.problems(finished) == []


def test_a_record_has_only_the_names_of_secrets(tmp_path):
    run_record = record_of(
        tmp_path,
        HF_TOKEN="sentinel1",
        WANDB_API_KEY="sentinel2",
        NCCL_DEBUG="INFO",
        VLLM_API_KEY="sentinel3",
    )
    text = json.dumps(run_record)
    assert "sentinel" not in text
    assert run_record["secrets"] == ["HF_TOKEN", "VLLM_API_KEY", "WANDB_API_KEY"]
    assert run_record["environment"]["trainers"]["NCCL_DEBUG"] == "INFO"


def test_reproduce_needs_a_run(capsys, tmp_path):
    assert reproduce([str(tmp_path)]) == 2
    assert f"{tmp_path}: it has no record.json" in capsys.readouterr().err
    assert reproduce([]) == 2


def test_reproduce_rejects_an_unfinished_run(capsys, tmp_path):
    json_files.write_json(tmp_path / "record.json", record_of(tmp_path))
    assert reproduce([str(tmp_path)]) == 2
    assert "Only a run with status done" in capsys.readouterr().err


def test_metrics_are_compared_to_the_last_digit():
    then = [{"step": 1, "loss": 0.1, "time_s": 3.0}]
    assert compare_metrics(then, [{"step": 1, "loss": 0.1, "time_s": 9.0, "gpu_power_w": 7}]) == []
    assert compare_metrics(then, [{"step": 1, "loss": 0.1 + 2e-17}]) == [
        "step 1, loss: 0.1 -> 0.10000000000000002"
    ]
    assert compare_metrics(then, []) == ["1 lines of metrics then, 0 now"]
    assert compare_metrics(then, [{"step": 1}]) == ["step 1, loss: 0.1 -> None"]


@pytest.mark.parametrize(("override", "same"), [
    (["runtime.max_restarts=3", "runtime.hang_timeout_s=60", "runtime.stop_timeout_s=30"], True),
    (["runtime=slurm", "runtime.slurm.nodes=2", "topology=ddp"], False),
    (["seed=1"], False),
])  # fmt: skip
def test_settings_that_make_another_run(override, same):
    assert (
        composition_hash(composed("hardware=cpu", *override))
        == composition_hash(composed("hardware=cpu"))
    ) is same


def test_the_error_for_a_folder_of_runs_offers_the_newest(launch, tmp_path):
    for name in ("20261121-101500-aaaaaa", "20261122-101500-000000"):
        (tmp_path / "runs/quick" / name).mkdir(parents=True)
        (tmp_path / "runs/quick" / name / "record.json").write_text("{}")
    newest = f"It contains runs; the newest is {tmp_path}/runs/quick/20261122-101500-000000."
    for override in ("resume=runs/quick", "model.path=runs/quick"):
        done = launch(override, "mode=plan")
        assert (done.code, newest in done.err) == (2, True), done.err
    assert "It contains" not in launch("resume=runs").err
    with pytest.raises(
        UserError, match="no record.json. It contains runs; the newest is .*/20261122-101500-000000"
    ):
        load_record(tmp_path / "runs/quick")


@pytest.mark.parametrize(("changed", "problem"), [
    ({"data": [1]}, "sha256: the content was changed after it was written"),
    ({"composition": "seed=1"}, "sha256: the content was changed after it was written"),
    ({"composition_hash": None}, "sha256: the content was changed after it was written"),
    ({"model": ...}, "model: missing"),
])  # fmt: skip
def test_a_run_with_an_edited_record_does_not_resume(tmp_path, changed, problem):
    folder = a_run(tmp_path, "1", "failed")
    run_record = {**json_files.read_json(folder / "record.json"), **changed}
    json_files.write_json(
        folder / "record.json",
        {key: value for key, value in run_record.items() if value is not ...},
    )
    with pytest.raises(
        UserError,
        match=rf"its record.json cannot be trusted \({problem}\). Use: resume=never",
    ):
        choose(tmp_path, f"resume={folder}")
    assert choose(tmp_path)[1] is False
    if "composition_hash" not in changed:  # by which auto knows a run
        assert rundir.skipped_run_notes(
            composed("hardware=cpu", f"run_root={tmp_path / 'runs'}"), tmp_path
        ) == [f"Not resuming {folder}: its record.json cannot be trusted ({problem})."]


def test_auto_reports_only_the_newest_run_that_it_skips(tmp_path):
    config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
    gone = {"files": {str(tmp_path / "gone.jsonl"): "0"}}
    folder = a_run(tmp_path, "2", "failed")
    leave_record(folder, config, "failed", data=gone)
    assert rundir.skipped_run_notes(config, tmp_path) == [
        f"Not resuming {folder}: {tmp_path / 'gone.jsonl'} changed since that run began."
    ]
    assert (
        rundir.skipped_run_notes(
            composed("hardware=cpu", f"run_root={tmp_path / 'runs'}", "resume=never"), tmp_path
        )
        == []
    )
    a_run(tmp_path, "3", "done")
    assert rundir.skipped_run_notes(config, tmp_path) == []
    assert rundir.skipped_run_notes(config, a_run(tmp_path, "4", "failed")) == []
    json_files.write_text(tmp_path / "runs/sft-tiny-cpu/5/record.json", "{")
    assert rundir.skipped_run_notes(config, tmp_path) == [
        f"Not resuming {tmp_path}/runs/sft-tiny-cpu/5: {rundir.DAMAGED}."
    ]


@pytest.mark.parametrize(("plan", "expected"), [
    ({}, True),
    (None, True),  # plan.json is missing, too
    ({"composition_hash": "another"}, False),
])  # fmt: skip
@pytest.mark.parametrize("content", [None, "[]", ""])
def test_a_run_with_progress_is_never_left_without_a_note(tmp_path, plan, expected, content):
    config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
    older, folder = a_run(tmp_path, "1", "failed"), a_run(tmp_path, "2", "failed")
    (folder / "checkpoints").mkdir()
    (folder / "record.json").unlink()
    if content is not None:
        (folder / "record.json").write_text(content)
    if plan is not None:
        hash_ = {"composition_hash": composition_hash(config)}
        json_files.write_json(folder / "plan.json", hash_ | plan)
    assert rundir.choose(config) == (older, True)
    problem = rundir.MISSING if content is None else rundir.DAMAGED
    expected_notes = [f"Not resuming {folder}: {problem}."] if expected else []
    assert rundir.skipped_run_notes(config, older) == expected_notes


def test_a_run_whose_checkpoints_are_not_mounted_does_not_start_again_there(tmp_path):
    folder = a_run(tmp_path, "1", "failed")
    (folder / "checkpoints").symlink_to(tmp_path / "unmounted")
    assert choose(tmp_path)[1] is False
    with pytest.raises(UserError, match=f"{tmp_path / 'unmounted'}, which is missing"):
        choose(tmp_path, f"resume={folder}")
    (tmp_path / "unmounted").mkdir()
    assert choose(tmp_path) == (folder, True)


def test_a_record_with_numeric_keys_can_be_trusted(tmp_path):
    """JSON turns numeric keys into text, which sorts in another order."""
    for seeds in ({220: 1, 1000: 2}, {2: 1, "b": 2}):
        config = composed("hardware=cpu", f"run_root={tmp_path / 'runs'}")
        leave_record(tmp_path / "run", config, "failed", seeds=seeds)
        assert sealed.problems(json_files.read_json(tmp_path / "run/record.json")) == []


def test_latest_is_a_relative_link_to_the_newest_run(tmp_path):
    """Neither a phase nor a reproduction renews it, and a real directory of that name stays."""
    home = tmp_path / "runs/mine"
    first, second = home / "20260101-000000-aaaaaa", home / "20260102-000000-bbbbbb"
    for folder in (first, second, second / "1_sft", home / f"{second.name}-again-{first.name}"):
        rundir.make(folder)
    assert os.readlink(home / "latest") == second.name
    assert not (second / "latest").exists()
    rundir.make(first)  # as a resumed run does
    assert os.readlink(home / "latest") == first.name
    assert sorted(path.name for path in home.glob("*latest*")) == ["latest"]
    (tmp_path / "runs/own/latest").mkdir(parents=True)
    rundir.make(tmp_path / "runs/own" / first.name)
    assert not (tmp_path / "runs/own/latest").is_symlink()


def test_latest_is_not_a_run_of_its_own(tmp_path):
    unfinished = a_run(tmp_path, "20260101-000000-aaaaaa", "interrupted")
    rundir.make(unfinished)
    assert choose(tmp_path) == (unfinished, True)
    assert choose(tmp_path, f"resume={unfinished.parent / 'latest'}") == (unfinished, True)
    with pytest.raises(UserError, match=f"newest is {unfinished}"):
        choose(tmp_path, f"resume={unfinished.parent}")


@pytest.mark.parametrize(
    ("key", "path", "expected"),
    [
        ("model.path", "latest", "model"),
        ("model.path", "latest/checkpoints/checkpoint-2", "checkpoints/checkpoint-2"),
        ("data.path", "latest/selected.jsonl", "selected.jsonl"),
    ],
)
def test_a_composition_names_the_run_behind_latest(tmp_path, key, path, expected):
    """Otherwise, a later run would change what an earlier record means."""
    run = a_run(tmp_path, "20260101-000000-aaaaaa", "done")
    rundir.make(run)
    config = composed("hardware=cpu", "data=jsonl", f"{key}={run.parent / path}")
    group, name = key.split(".")
    assert getattr(getattr(config, group), name) == str(run / expected)
