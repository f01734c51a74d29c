"""Test that a changed pipeline reuses the phases before the change."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from launch import report, reproduce
from launch.config.compose import compose
from launch.config.identity import composition_hash
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from launch.plan.mounts import mounts as mounts_of
from launch.reports.run_files import phases_of, read
from launch.study import phase_reuse, pipeline
from tests.conftest import composed, host_with

SFT = "{name: sft}"
MORE = "{name: more, model_from: sft, overrides: ['method.args.learning_rate=%s']}"
LAST = "{name: last, model_from: more, overrides: ['method.args.learning_rate=%s']}"
THREE = [SFT, MORE % 1e-4, LAST % 1e-4]
FOLDERS = ["1_sft", "2_more", "3_last"]


@pytest.fixture
def begin(tmp_path, capsys, phases_that_end):
    """Return a function that runs phases and returns (started phases, run directory, output)."""
    started, _ = phases_that_end

    def call(phases: list[str], *overrides: str, code: int = EXIT_DONE):
        started.clear()
        given = ["hardware=cpu", f"phases=[{', '.join(phases)}]", f"run_root={tmp_path}", "name=p"]
        given += overrides
        assert pipeline.run(compose(given), Request(given)) == code
        return list(started), newest(tmp_path), capsys.readouterr().out

    return call


@pytest.fixture
def begin_stopped_change(begin, phases_that_end):
    """Return a function that runs THREE, and then a changed pipeline that a signal stops."""
    _, signals = phases_that_end

    def call() -> tuple[Path, Path, list[str]]:
        _, first, _ = begin(THREE)
        changed = [SFT, MORE % 1e-5, LAST % 1e-4]
        signals["2_more"] = signal.SIGTERM
        started, second, _ = begin(changed, code=EXIT_INTERRUPTED)
        assert started == ["2_more"]
        signals.clear()
        return first, second, changed

    return call


def newest(root: Path) -> Path:
    return max(
        (root / "p").glob("[0-9]*"), key=lambda folder: (folder / "record.json").stat().st_mtime_ns
    )


def links(run_dir: Path) -> dict[str, Path]:
    """Return the target of the link of each reused phase."""
    return {path.name: path.resolve() for path in sorted(run_dir.iterdir()) if path.is_symlink()}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


RATE = "method.args.learning_rate: 0.0001 -> 1e-05"
SEVEN_STEPS = "{name: sft, overrides: ['method.args.max_steps=7']}"
CHANGES = {
    "the last": ([SFT, MORE % 1e-4, LAST % 1e-5], FOLDERS[:2], ["3_last"], f"last.{RATE}"),
    "the first": ([SEVEN_STEPS, *THREE[1:]], [], FOLDERS, "sft.method.args.max_steps: "),
    "a middle one": ([SFT, MORE % 1e-5, LAST % 1e-4], FOLDERS[:1], FOLDERS[1:], f"more.{RATE}"),
    "one is added at the end": (
        [*THREE, "{name: e, model_from: last, overrides: ['method=evaluate']}"],
        FOLDERS, ["4_e"], "e is new",
    ),
    "one is inserted": (
        [SFT, "{name: e, model_from: sft, overrides: ['method=evaluate']}", *THREE[1:]],
        ["1_sft"], ["2_e", "3_more", "4_last"], "e replaces 2_more",
    ),
    "the last is left out": (THREE[:2], FOLDERS[:2], [], "no other phase has to run"),
    "nothing": (THREE, [], FOLDERS, ""),
}  # fmt: skip


@pytest.mark.parametrize(("phases", "kept", "run", "said"), CHANGES.values(), ids=CHANGES)
def test_phases_before_a_change_are_reused(begin, phases, kept, run, said):
    _, first, _ = begin(THREE)
    before = content(first)
    started, second, out = begin(phases)
    assert started == run
    assert second != first
    assert links(second) == {name: first / name for name in kept}
    assert said in out
    assert ("Reusing 1_sft" in out) == bool(kept)
    of_second = json_files.read_json(second / "record.json")
    assert (of_second["status"], list(of_second["phases"].values())) == ("done", [*kept, *run])
    assert content(first) == before, "the earlier run does not change"


def test_reused_phases_are_reused_again_and_most_phases_win(begin):
    """The third run reuses the first's phase through the second. More phases beat newer ones."""
    _, first, _ = begin(THREE)
    _, second, _ = begin([SFT, MORE % 1e-5, LAST % 1e-4])
    taken = [
        json_files.read_json(second / name / "record.json")["composition"]["model"]["path"]
        for name in FOLDERS
    ]
    assert taken == [None, str(first / "1_sft/model"), str(second / "2_more/model")]
    started, third, _ = begin([SFT, MORE % 1e-5, LAST % 1e-5])
    assert started == ["3_last"]
    assert {name: os.readlink(third / name) for name in FOLDERS[:2]} == {
        "1_sft": f"../{first.name}/1_sft",
        "2_more": f"../{second.name}/2_more",
    }
    started, fourth, _ = begin([SFT, MORE % 1e-4, LAST % 1e-6])
    assert (started, links(fourth)) == (["3_last"], {name: first / name for name in FOLDERS[:2]})
    assert begin(THREE)[0] == FOLDERS, "a finished pipeline runs again completely"


def test_resume_never_reuses_nothing(begin):
    begin(THREE[:2])
    started, run_dir, out = begin([*THREE[:2], LAST % 1e-5], "resume=never")
    assert (started, links(run_dir)) == (FOLDERS, {})
    assert "Reusing" not in out


def test_a_changed_pipeline_resumes_after_a_stop(begin, begin_stopped_change):
    first, second, changed = begin_stopped_change()
    with pytest.raises(UserError, match=r"differs in phases.* resume=auto"):
        begin([*THREE[:2], LAST % 1e-5], f"resume={second}")
    started, again, out = begin(changed)
    assert (started, again) == (["3_last"], second)
    assert f"Resuming {second}" in out
    assert links(second) == {"1_sft": first / "1_sft"}


def edit(path: Path) -> None:
    json_files.write_json(path, {**json_files.read_json(path), "exit_code": 7})


def test_a_damaged_phase_is_not_reused(begin):
    _, first, _ = begin(THREE)
    phase = first / "2_more"
    whole = content(phase)
    for damage, message in {
        lambda: (phase / "model/model.safetensors").unlink(): "model.safetensors is missing",
        lambda: edit(phase / "record.json"): "cannot be trusted (sha256",
        lambda: shutil.rmtree(phase): "has no record.json",
    }.items():
        damage()
        assert message in phase_reuse.problem(phase)
        for file, data in whole.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_bytes(data)
    assert phase_reuse.problem(phase) is None
    shutil.rmtree(phase)
    started, run_dir, out = begin([*THREE[:2], LAST % 1e-5])
    assert (started, links(run_dir)) == (["2_more", "3_last"], {"1_sft": first / "1_sft"})
    assert "running the phases after them: more: " in out


def test_a_run_whose_reused_phases_were_deleted_is_not_resumed(begin, begin_stopped_change):
    """The earlier run was deleted while the new one was stopped."""
    first, second, changed = begin_stopped_change()
    shutil.rmtree(first)
    why = f"sft: {first / '1_sft'} has no record.json"
    with pytest.raises(UserError) as refused:
        begin(changed, f"resume={second}")
    assert why in str(refused.value)
    assert "resume=never" in str(refused.value)
    started, third, out = begin(changed)
    assert (started, links(third)) == (FOLDERS, {})
    assert f"Not resuming {second}" in out
    assert why in out
    assert not first.exists(), "nothing is created in place of the deleted run"


def test_phases_with_changed_data_are_not_reused(begin, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "completion": "2"}\n')
    given = f"{{name: more, model_from: sft, overrides: ['data=jsonl', 'data.path={rows}']}}"
    _, first, _ = begin([SFT, given, LAST % 1e-4])
    rows.write_text('{"prompt": "1+1", "completion": "3"}\n')
    started, _, out = begin([SFT, given, LAST % 1e-5])
    assert started == ["2_more", "3_last"]
    assert f"more: {rows} has changed" in out


def test_the_plan_shows_reused_phases_and_writes_nothing(begin, tmp_path, capsys):
    _, first, _ = begin(THREE)
    changed, there = [*THREE[:2], LAST % 1e-5], sorted(tmp_path.rglob("*"))
    started, _, out = begin(changed, "mode=plan")
    assert started == []
    assert f"Reusing 1_sft, 2_more of {first}; running the phases after them: last.{RATE}." in out
    assert re.search(r"^  phases +last ", out, re.MULTILINE)
    shown = json.loads(begin(changed, "mode=plan", "format=json")[2])
    assert shown["kept"] == {"sft": str(first / "1_sft"), "more": str(first / "2_more")}
    assert {process["phase"] for process in shown["processes"]} == {"last"}
    assert list(shown["phases"]) == ["sft", "more", "last"]
    assert sorted(tmp_path.rglob("*")) == there


LEVELS = "data.tasks=[{name: chain_sum, level: 0}, {name: chain_sum, level: 1}]"
RAFT = ["hardware=cpu", "method=raft", LEVELS]


@pytest.mark.parametrize(("curriculum", "same"), [("adaptive", 8), ("progressive", 2)])
def test_one_more_cycle_leaves_the_first_phases_unchanged(curriculum, same):
    """A progressive curriculum depends on the number of cycles."""
    two, three = (
        pipeline.make_plans(composed(*overrides), Request(overrides), host_with(0), Path("/r/p/1"))
        for overrides in (
            [*RAFT, f"data.curriculum={curriculum}", f"method.args.cycles={cycles}"]
            for cycles in (2, 3)
        )
    )
    assert (len(two), len(three)) == (8, 11)
    hashes = [{n: composition_hash(p.config) for n, p in plans.items()} for plans in (two, three)]
    equal = [hashes[0][name] == hashes[1][name] for name in three if name in two]
    assert equal[: same + 1] == [True] * same + [False] * (same < len(two))


def test_reused_evaluations_choose_the_cycle(begin, phases_that_end):
    """The third of three cycles is skipped; later phases use the first, from the earlier run."""
    _, asked = phases_that_end
    asked |= {
        f"accuracy of raft_cycle{cycle}_evaluate": accuracy
        for cycle, accuracy in enumerate([0.5, 0.7, 0.6, 0.65])
    }
    raft = (
        "{name: raft, model_from: sft, overrides: ['method=raft', 'method.args.cycles=3',"
        " 'method.selection.metric=accuracy'%s]}"
    )
    stops, goes_on = raft % ", 'method.selection.patience=1'", raft % ""
    export = "{name: export, model_from: raft, overrides: ['method=export']}"
    whole, first, _ = begin([SFT, stops, export])
    assert whole[-2:] == ["8_raft_cycle2_evaluate", "12_export"]
    started, second, _ = begin(
        [SFT, stops, export, "{name: e, model_from: raft, overrides: ['method=evaluate']}"]
    )
    assert (started, sorted(links(second))) == (["13_e"], sorted(whole))
    asked_of = json_files.read_json(second / "13_e/record.json")["composition"]["model"]["path"]
    assert asked_of == str(first / "4_raft_cycle1_train/model")
    choices = [json_files.read_json(f / "record.json")["chosen"] for f in (first, second)]
    assert choices[0] == choices[1]
    assert begin([SFT, stops, export])[0] == whole, "a finished pipeline runs again completely"
    started, third, _ = begin([SFT, goes_on, export])
    assert [name.partition("_")[0] for name in started] == ["9", "10", "11", "12"]
    exported = json_files.read_json(third / "12_export/record.json")["composition"]["model"]
    assert "raft_cycle1_train" in exported["path"]
    started, fourth, _ = begin([SFT, stops.replace("patience=1", "patience=2"), export])
    assert (started, len(links(fourth))) == ([], 12)


def test_reports_follow_links_and_show_missing_phases(begin, capsys):
    _, first, _ = begin(THREE)
    _, second, _ = begin([SFT, MORE % 1e-5, LAST % 1e-4])
    runs = [read(phase, phase.name) for phase in phases_of(second)]
    assert [run.folder for run in runs] == [first / "1_sft", second / "2_more", second / "3_last"]
    assert report.main([str(second)]) == EXIT_DONE
    assert f"the earlier run {first.name}." in (second / "report.html").read_text()
    assert report.main([str(first), str(second), f"output={first.parent}/both.html"]) == EXIT_DONE
    assert "5 runs" in (first.parent / "both.html").read_text(), "the shared phase is counted once"
    shutil.rmtree(first)
    assert report.main([str(second)]) == EXIT_DONE
    assert ">gone</span>" in (second / "report.html").read_text()
    assert [read(phase).status for phase in phases_of(second)] == ["gone", "done", "done"]


def test_reproducing_runs_reused_phases_again_next_to_their_links(begin, monkeypatch):
    _, first, _ = begin(THREE)
    _, second, _ = begin([SFT, MORE % 1e-5, LAST % 1e-4])
    again = []
    monkeypatch.setattr(reproduce, "check_host", lambda plan, host: None)
    monkeypatch.setattr(
        reproduce, "execute", lambda plan, *args, **kwargs: again.append(plan.run_dir) or EXIT_DONE
    )
    assert reproduce.main([str(second)]) == EXIT_DONE
    names = [(folder.parent, folder.name.partition("-again-")[0]) for folder in again]
    assert names == [(second, name) for name in FOLDERS]


def test_a_container_mounts_reused_phases(begin, tmp_path):
    """A container mounts reused models, and the reused phases of a pipeline with samples."""
    _, first, _ = begin(THREE)
    _, second, _ = begin([SFT, MORE % 1e-5, LAST % 1e-4])

    def mounted(run_dir, *overrides):
        config = compose(["hardware=cpu", "runtime=docker", "container=cpu", *overrides])
        return {m.source: m.read_only for m in mounts_of(config, host_with(0), run_dir, False)}

    assert str(first / "1_sft/model") in mounted(
        second / "2_more", f"model.path={first}/1_sft/model"
    )
    reused = mounted(tmp_path / "p/x/1_s", "method=sample", f"method.args.reuse={second}")
    assert reused[str(second)]
    assert reused[str(first / "1_sft")]
