"""Test the choice of the RAFT cycle and early stopping. The phases are stubs."""

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
    ([0.5, 0.8, 0.8, 0.7], None, 0.0, 1, 3),  # the first of equal cycles
    ([0.9, 0.6, 0.7, 0.5], None, 0.0, 2, 3),  # never the starting model
    ([0.5, 0.6, 0.6], 1, 0.0, 1, 2),
    ([0.5, 0.4], 1, 0.0, 1, 1),  # not better than the start
    ([0.5, 0.6, 0.55, 0.65], 2, 0.0, 3, 3),  # only one cycle without improvement
    ([0.5, 0.6, 0.62], 1, 0.05, 2, 2),  # the gain is below min_delta, but this cycle is the best
    ([0.5, 0.6], 2, 0.0, 3, 3),  # not final, so the last planned cycle
    ([], 1, 0.0, 3, 3),
])  # fmt: skip
def test_choice(accuracies, patience, min_delta, cycle, last):
    choice = choose("", Selection("accuracy", patience, min_delta), accuracies, 3)
    assert (choice.cycle, choice.last, choice.is_final) == (cycle, last, len(accuracies) > last)
    default = choose("", Selection(), accuracies, 3)
    assert (default.cycle, default.last, default.is_final) == (3, 3, False)


@pytest.fixture
def events(phases_that_end):
    return phases_that_end[1]


RAFT = ["hardware=cpu", "model=tiny", "method=raft", "method.args.cycles=3", BEST, "name=r"]
PHASES = (
    "phases=[{name: sft}, {name: raft, model_from: sft, "
    f"overrides: ['method=raft', 'method.args.cycles=3', '{BEST}', PATIENCE]}}, "
    "{name: dpo, model_from: raft, data_from: raft, overrides: ['method=dpo']}, "
    "{name: export, model_from: raft, results_from: raft, overrides: ['method=export']}]"
)


def run(root: Path, overrides: list[str]) -> tuple[int, Path]:
    arguments = [*overrides, f"run_root={root}"]
    code = pipeline.run(compose(arguments), Request(arguments))
    [run_dir] = (root / "r").glob("[0-9]*")
    return code, run_dir


def record_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "record.json").read_text())


def inputs(run_dir: Path, phase: str) -> dict:
    """Return the model's run, the data and the arguments of a phase."""
    config = record_of(next(run_dir.glob(f"*_{phase}")))["composition"]
    return {
        "model": Path(config["model"]["path"]).parent.name,
        "data": config["data"]["path"],
        "args": config["method"]["args"],
    }


def evaluated(prefix: str, *accuracies: float) -> dict[str, float]:
    """Return the events that set the accuracies of the cycles, from cycle 0."""
    return {
        f"accuracy of {prefix}cycle{cycle}_evaluate": value
        for cycle, value in enumerate(accuracies)
    }


def overrides_of_phases(patience: str = "seed=0") -> list[str]:
    return ["hardware=cpu", "model=tiny", "name=r", PHASES.replace("PATIENCE", f"'{patience}'")]


def test_later_phases_use_the_best_cycle(tmp_path, events, capsys):
    events |= evaluated("raft_", 0.5, 0.7, 0.9, 0.8)
    code, run_dir = run(tmp_path, overrides_of_phases())
    assert code == EXIT_DONE
    dpo, export = inputs(run_dir, "dpo"), inputs(run_dir, "export")
    assert (dpo["model"], export["model"]) == ("7_raft_cycle2_train",) * 2
    assert dpo["data"].endswith("/9_raft_cycle3_sample/scored.jsonl"), "the newest samples"
    # the evaluation of the exported model
    assert export["args"]["results_from"].endswith("/8_raft_cycle2_evaluate")
    choice = {
        "cycle": 2,
        "num_cycles": 3,
        "metric": "accuracy",
        "accuracy": 0.9,
        "stopped_early": False,
        "accuracies": [0.5, 0.7, 0.9, 0.8],
        "model": "7_raft_cycle2_train",
        "evaluation": "8_raft_cycle2_evaluate",
        "last_evaluation": "11_raft_cycle3_evaluate",
    }
    assert record_of(run_dir)["chosen"] == {"raft": choice}
    assert re.search(r"raft: cycle 2 of 3 .* accuracy 90\.0%\n", capsys.readouterr().out)


def test_cycles_stop_when_accuracy_no_longer_improves(tmp_path, events, capsys):
    events |= evaluated("raft_", 0.5, 0.7, 0.6)
    code, run_dir = run(tmp_path, overrides_of_phases("method.selection.patience=1"))
    assert code == EXIT_DONE
    assert not list(run_dir.glob("*_raft_cycle3_*"))
    assert inputs(run_dir, "dpo")["model"] == "4_raft_cycle1_train"
    assert inputs(run_dir, "dpo")["data"].endswith("/6_raft_cycle2_sample/scored.jsonl")
    # reproduce and report look for phases that ran
    assert [name for name in record_of(run_dir)["phases"] if "cycle3" in name] == []
    assert re.search(r"cycle 1 of 2 .* 70\.0%; stopped early after 1 ", capsys.readouterr().out)


@pytest.mark.parametrize(("how", "at"), [("signal", "raft_cycle2_evaluate"), ("dies", "dpo")])
def test_an_interrupted_run_resumes_to_the_same_choice(tmp_path, events, how, at):
    events |= evaluated("raft_", 0.5, 0.7, 0.6) | {f"{how} {at}": signal.SIGTERM}
    overrides = overrides_of_phases("method.selection.patience=1")
    assert run(tmp_path, overrides)[0] == (EXIT_FAILED if how == "dies" else EXIT_INTERRUPTED)
    code, run_dir = run(tmp_path, overrides)
    assert code == EXIT_DONE
    assert (
        inputs(run_dir, "dpo")["model"]
        == inputs(run_dir, "export")["model"]
        == "4_raft_cycle1_train"
    )
    assert record_of(run_dir)["chosen"]["raft"]["stopped_early"] is True


def test_a_run_killed_between_an_evaluation_and_the_choice(tmp_path, events):
    """Resume a run whose evaluation is done but missing in the pipeline's record."""
    events |= evaluated("raft_", 0.5, 0.7, 0.6) | {"dies dpo": True}
    overrides = overrides_of_phases("method.selection.patience=1")
    _, run_dir = run(tmp_path, overrides)
    before = {
        key: value for key, value in record_of(run_dir).items() if key not in ("chosen", "sha256")
    }
    parts = ("sample", "train", "evaluate")
    cycles = [f"raft_cycle{cycle}_{part}" for cycle in (1, 2, 3) for part in parts]
    names = ["sft", "raft_cycle0_evaluate", *cycles, "dpo", "export"]
    before["phases"] = {name: f"{number}_{name}" for number, name in enumerate(names, start=1)}
    json_files.write_json(run_dir / "record.json", sealed.seal(before))
    code, again = run(tmp_path, overrides)
    assert (code, again) == (EXIT_DONE, run_dir)
    assert inputs(run_dir, "dpo")["model"] == "4_raft_cycle1_train"


def test_the_pipeline_fails_if_data_is_deleted_before_the_choice(tmp_path, events):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "completion": "2", "answer": "2"}\n' * 8)
    events |= {**evaluated("", 0.5, 0.6), "removes cycle0_evaluate": rows}
    reward = ["~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0"]
    overrides = [*RAFT, *reward, "data=jsonl", f"data.path={rows}", f"data.heldout_path={rows}"]
    with pytest.raises(UserError, match="rows.jsonl: no such file"):
        run(tmp_path, overrides)
    [run_dir] = (tmp_path / "r").glob("[0-9]*")
    assert (record_of(run_dir)["status"], record_of(run_dir)["exit_code"]) == ("failed", 2)
