"""Test which RAFT cycle is the result and when cycles stop; phases do nothing here."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from launch.config.compose import compose
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError
from launch.plan import sealed
from launch.schema.cycle_choice import choose
from launch.schema.data import Selection
from launch.study import pipeline

BEST = "method.selection.metric=accuracy"


@pytest.mark.parametrize(("accuracies", "patience", "min_delta", "cycle", "last"), [
    ([0.5, 0.6, 0.8, 0.7], None, 0.0, 2, 3),
    ([0.5, 0.8, 0.8, 0.7], None, 0.0, 1, 3),  # of equal ones the first
    ([0.9, 0.6, 0.7, 0.5], None, 0.0, 2, 3),  # a cycle, and not what it started from
    ([0.5, 0.6, 0.6], 1, 0.0, 1, 2),
    ([0.5, 0.4], 1, 0.0, 1, 1),  # no better than the start
    ([0.5, 0.6, 0.55, 0.65], 2, 0.0, 3, 3),  # one miss is not two
    ([0.5, 0.6, 0.62], 1, 0.05, 2, 2),  # better by too little, and yet the best
    ([0.5, 0.6], 2, 0.0, 3, 3),  # not known yet: the last of all
    ([], 1, 0.0, 3, 3),
])  # fmt: skip
def test_the_rule(accuracies, patience, min_delta, cycle, last):
    choice = choose("", Selection("accuracy", patience, min_delta), accuracies, 3)
    assert (choice.cycle, choice.last, choice.is_made) == (cycle, last, len(accuracies) > last)
    last_one = choose("", Selection(), accuracies, 3)
    assert (last_one.cycle, last_one.last, last_one.is_made) == (3, 3, False)


@pytest.fixture
def asked(phases_that_end):
    return phases_that_end[1]


WHOLE = ["hardware=cpu", "model=tiny", "method=raft", "method.args.cycles=3", BEST, "name=r"]
PHASES = (
    "phases=[{name: sft}, {name: raft, model_from: sft, "
    f"overrides: ['method=raft', 'method.args.cycles=3', '{BEST}', PATIENCE]}}, "
    "{name: dpo, model_from: raft, data_from: raft, overrides: ['method=dpo']}, "
    "{name: export, model_from: raft, results_from: raft, overrides: ['method=export']}]"
)


def run(root: Path, given: list[str]) -> tuple[int, Path]:
    arguments = [*given, f"run_root={root}"]
    code = pipeline.run(compose(arguments), Request(arguments))
    [run_dir] = (root / "r").iterdir()
    return code, run_dir


def kept(run_dir: Path) -> dict:
    return json.loads((run_dir / "record.json").read_text())


def taken(run_dir: Path, phase: str) -> dict:
    config = kept(next(run_dir.glob(f"*_{phase}")))["composition"]
    return {
        "model": Path(config["model"]["path"]).parent.name,
        "data": config["data"]["path"],
        "args": config["method"]["args"],
    }


def after(prefix: str, *accuracies: float) -> dict[str, float]:
    return {
        f"accuracy of {prefix}cycle{cycle}_evaluate": value
        for cycle, value in enumerate(accuracies)
    }


def phased(patience: str = "seed=0") -> list[str]:
    return ["hardware=cpu", "model=tiny", "name=r", PHASES.replace("PATIENCE", f"'{patience}'")]


def test_later_phases_take_the_best_cycle(tmp_path, asked, capsys):
    asked |= after("raft_", 0.5, 0.7, 0.9, 0.8)
    code, run_dir = run(tmp_path, phased())
    assert code == EXIT_DONE
    dpo, export = taken(run_dir, "dpo"), taken(run_dir, "export")
    assert (dpo["model"], export["model"]) == ("7_raft_cycle2_train",) * 2
    assert dpo["data"].endswith("/9_raft_cycle3_sample/scored.jsonl"), "the newest samples"
    # of the model that is exported
    assert export["args"]["results_from"].endswith("/8_raft_cycle2_evaluate")
    choice = {
        "cycle": 2,
        "num_cycles": 3,
        "accuracy": 0.9,
        "stopped_early": False,
        "accuracies": [0.5, 0.7, 0.9, 0.8],
        "model": "7_raft_cycle2_train",
        "evaluation": "8_raft_cycle2_evaluate",
        "last_evaluation": "11_raft_cycle3_evaluate",
    }
    assert kept(run_dir)["chosen"] == {"raft": choice}
    assert re.search(r"raft: cycle 2 of 3 .* accuracy 90\.0%\n", capsys.readouterr().out)


def test_cycles_stop_when_accuracy_no_longer_improves(tmp_path, asked, capsys):
    asked |= after("raft_", 0.5, 0.7, 0.6)
    code, run_dir = run(tmp_path, phased("method.selection.patience=1"))
    assert code == EXIT_DONE
    assert not list(run_dir.glob("*_raft_cycle3_*"))
    assert taken(run_dir, "dpo")["model"] == "4_raft_cycle1_train"
    assert taken(run_dir, "dpo")["data"].endswith("/6_raft_cycle2_sample/scored.jsonl")
    # reproduce and report look for phases that ran
    assert [name for name in kept(run_dir)["phases"] if "cycle3" in name] == []
    assert re.search(r"cycle 1 of 2 .* 70\.0%; stopped early: 1 ", capsys.readouterr().out)


@pytest.mark.parametrize(("how", "at"), [("signal", "raft_cycle2_evaluate"), ("dies", "dpo")])
def test_a_run_that_was_stopped_goes_on_to_the_same_choice(tmp_path, asked, how, at):
    asked |= after("raft_", 0.5, 0.7, 0.6) | {f"{how} {at}": signal.SIGTERM}
    given = phased("method.selection.patience=1")
    assert run(tmp_path, given)[0] == (EXIT_FAILED if how == "dies" else EXIT_INTERRUPTED)
    code, run_dir = run(tmp_path, given)
    assert code == EXIT_DONE
    assert (
        taken(run_dir, "dpo")["model"] == taken(run_dir, "export")["model"] == "4_raft_cycle1_train"
    )
    assert kept(run_dir)["chosen"]["raft"]["stopped_early"] is True


def test_a_kill_between_an_evaluation_and_the_choice(tmp_path, asked):
    """Resume if the evaluation is done but the pipeline's record does not have it yet."""
    asked |= after("raft_", 0.5, 0.7, 0.6) | {"dies dpo": True}
    given = phased("method.selection.patience=1")
    _, run_dir = run(tmp_path, given)
    before = {key: value for key, value in kept(run_dir).items() if key not in ("chosen", "sha256")}
    parts = ("sample", "train", "evaluate")
    cycles = [f"raft_cycle{cycle}_{part}" for cycle in (1, 2, 3) for part in parts]
    names = ["sft", "raft_cycle0_evaluate", *cycles, "dpo", "export"]
    before["phases"] = {name: f"{number}_{name}" for number, name in enumerate(names, start=1)}
    json_files.write_json(run_dir / "record.json", sealed.seal(before))
    code, again = run(tmp_path, given)
    assert (code, again) == (EXIT_DONE, run_dir)
    assert taken(run_dir, "dpo")["model"] == "4_raft_cycle1_train"


def test_what_is_no_longer_there_when_a_choice_is_made_fails_the_pipeline(tmp_path, asked):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "completion": "2", "answer": "2"}\n' * 8)
    asked |= {**after("", 0.5, 0.6), "removes cycle0_evaluate": rows}
    reward = ["~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0"]
    given = [*WHOLE, *reward, "data=jsonl", f"data.path={rows}", f"data.heldout_path={rows}"]
    with pytest.raises(UserError, match="rows.jsonl: no such file"):
        run(tmp_path, given)
    [run_dir] = (tmp_path / "r").iterdir()
    assert (kept(run_dir)["status"], kept(run_dir)["exit_code"]) == ("failed", 2)
