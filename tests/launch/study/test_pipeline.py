"""Test phases: names, references, overrides, topologies, and stops between phases."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest

from launch import reproduce
from launch.config.compose import compose
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, HostError, UserError
from launch.plan import sealed
from launch.plan.views import as_json, shared_warnings
from launch.study import pipeline
from tests.conftest import composed, host_with
from tests.helpers.report_examples import a_run

TWO = ["hardware=cpu", "model=tiny", "phases=[{name: a}, {name: b, model_from: a}]"]


@functools.cache
def plans(*overrides):
    return pipeline.make_plans(
        composed(*overrides), Request(overrides), host_with(8), Path("/runs/p/1")
    )


ODD = {
    "{name: a/b}": ["name=a/b: invalid format"],
    "{name: a}, {name: a}": ["two phases are named a"],
    "{name: a, model_from: a}": [
        "model_from=a of a is not an earlier phase",
        "Earlier phases: none",
    ],
    "{name: first}, {name: b, model_from: frist}": [
        "model_from=frist of b is not a phase. Did you mean first? Earlier phases: first"
    ],
    "{name: a}, {name: e, model_from: a, overrides: ['method=evaluate']},"
    " {name: b, model_from: e}": ["model_from=e of b: that phase produces no model", "that do: a."],
    "{name: a, overrides: ['method=raft', 'method.args.max_steps=7']}": [
        "phase a: method.args.max_steps=7: recipes.sample.RaftConfig has no"
    ],
    "{name: a, optional: true}, {name: b, model_from: a}": [
        "model_from=a of b: a is optional",
        "Remove its key optional",
    ],
    "{name: a, optional: true, overrides: ['method=raft']}": ["a is optional"],
    "{name: a, overrides: [seed]}": ["override seed of a: seed: '=' is missing"],
    '{name: a, overrides: ["seed=\'x"]}': ["override seed='x of a: "],
    "{name: a, overrides: ['runtime=slurm']}": ["phase a: runtime=slurm "],
    "{name: a}, {name: b, model_from: a, overrides: ['model.path=/x']}": [
        "override model.path=/x of b: model_from=a sets the same key"
    ],
    "{name: a, overrides: ['method=sample']},"
    " {name: b, data_from: a, overrides: ['method=raft']}": [
        "data_from=a of b: method=raft does not read it",
        "sft, dpo or grpo",
    ],
    "{name: a}, {name: b, model_from: a, overrides: ['method=bench/gemm']}": [
        "model_from=a of b: method=bench/gemm does not read it"
    ],
    "{name: a, nme: b}": ["phases: Key 'nme' not in 'Phase'. Did you mean name?"],
}


@pytest.mark.parametrize(("phases", "said"), ODD.items(), ids=ODD)
def test_invalid_phases_are_rejected(launch, phases, said):
    done = launch("hardware=cpu", f"phases=[{phases}]", "mode=plan")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert [words for words in said if words not in done.err] == []


@pytest.mark.parametrize(
    "given",
    [TWO, ["hardware=cpu", "method=raft"], ["-m", "seed=0,1", *TWO]],
    ids=["phases", "raft", "sweep"],
)
def test_no_name_leads_out_of_the_run_root(launch, tmp_path, given):
    done = launch(*given, "name=../escape", f"run_root={tmp_path}/inner", "mode=plan")
    assert done.code == 2
    assert "name=../escape: invalid format. Use " in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    ["experiment=quickstart", "+mode=plan", "~phases", "hardware=mi300x", "hydra.verbose=true"],
)  # fmt: skip
def test_keys_of_the_pipeline_are_rejected_in_phases(override):
    given = ["hardware=cpu", f"phases=[{{name: a, overrides: ['{override}']}}]"]
    with pytest.raises(
        UserError, match=r"phases: override .* of a: .* Use: .* outside phases\."
    ) as refused:
        pipeline.make_plans(composed(*given), Request(given), host_with(0), Path("/runs/p/1"))
    assert f"override {override} of a" in str(refused.value)


TOPOLOGIES = (
    "phases=[{name: sft, overrides: ['method=sft', 'topology=fsdp']},"
    " {name: grpo, model_from: sft, overrides: ['method=grpo', 'topology=split']},"
    " {name: evaluate, model_from: grpo, overrides: ['method=evaluate']},"
    " {name: export, model_from: grpo, overrides: ['method=export']}]"
)


def test_each_phase_has_its_own_topology_on_eight_gpus():
    found = plans("hardware=mi300x", "model=qwen3_4b", TOPOLOGIES)
    gpus = {
        name: sorted(process.gpus for process in plan.processes) for name, plan in found.items()
    }
    eight = list(range(8))
    assert gpus == {
        "sft": [eight],
        "grpo": [[], [0], eight[1:]],  # a pause container, a server and seven trainers
        "evaluate": [eight],
        "export": [[]],
    }
    taken = [plan.config.model.path for plan in found.values()]
    grpo = "/runs/p/1/2_grpo/model"
    assert taken == [None, "/runs/p/1/1_sft/model", grpo, grpo]
    with_memory = [name for name, plan in found.items() if as_json(plan)["memory"]]
    assert with_memory == ["sft", "grpo", "evaluate"]


OPTIONAL = [
    "phases=[{name: a}, {name: vllm, optional: true, overrides: ['method=grpo',"
    " 'topology=split']}, {name: b, optional: true}, {name: c}]"
]


def test_an_optional_phase_that_cannot_run_is_left_out_with_its_reason(launch):
    given = ["hardware=mi50", *OPTIONAL, "mode=plan", "format=json"]
    shown = json.loads(launch(*given).out)
    assert list(shown["phases"]) == ["a", "b", "c"]
    assert "phase vllm is not run: topology=split: no released vLLM" in shown["warnings"][0]
    assert shown["warnings"][0].endswith("The other phases run without it.")
    alone = "phases=[{name: a, optional: true, overrides: ['precision=bf16']}]"
    done = launch("hardware=mi50", alone, "mode=plan")
    assert (done.code, done.out) == (3, "")
    assert "phase a is not run: precision=bf16" in done.err
    typed = launch("hardware=mi50", *OPTIONAL, "method.args.max_stps=1", "mode=plan")
    assert typed.code == 2  # a mistake of the command line is not a reason of this machine


def test_a_pipeline_names_the_gpus_that_it_uses_of_a_node(launch):
    lines = launch("hardware=mi300x", "experiment=hardware_report", "mode=plan").out.splitlines()
    [hardware] = [line for line in lines if line.startswith("  hardware")]
    assert hardware.endswith("; 2 used")


def test_after_an_optional_phase_has_failed_the_others_run(tmp_path, monkeypatch, phases_that_end):
    started, events = phases_that_end
    given = [*TWO[:2], *OPTIONAL, f"run_root={tmp_path}", "name=p"]
    reject_vllm = {"vllm": HostError("two GPUs needed")}

    def check_host(plan, host):
        if error := reject_vllm.get(plan.run_dir.name.partition("_")[2]):
            raise error

    monkeypatch.setattr(pipeline, "check_host", check_host)
    given[2] = given[2].replace("'method=grpo', 'topology=split'", "'method=grpo'")
    events["dies b"] = True
    ends = []
    code = pipeline.run(
        compose(given), Request(given), lambda config, run_dir: ends.append(run_dir)
    )
    [run_dir] = (tmp_path / "p").glob("[0-9]*")
    assert (code, started, ends) == (4, ["1_a", "4_c"], [run_dir])
    record = json_files.read_json(run_dir / "record.json")
    assert (record["exit_code"], record["not_run"]) == (4, {"vllm": "two GPUs needed"})
    assert pipeline.run(compose(given), Request(given)) == EXIT_DONE
    assert started == ["1_a", "4_c", "3_b"]
    repeated = []
    monkeypatch.setattr(
        reproduce, "reproduce_one", lambda folder, *_: repeated.append(folder.name) or EXIT_DONE
    )
    assert reproduce.reproduce(run_dir) == EXIT_DONE
    assert repeated == ["1_a", "3_b", "4_c"]


def test_no_phase_starts_if_a_later_one_does_not_fit(tmp_path, monkeypatch):
    phases = (
        "phases=[{name: a, overrides: ['topology=fsdp']},"
        " {name: big, model_from: a, overrides: ['topology=single']}]"
    )
    given = ["hardware=mi300x", "model=qwen3_32b", phases, f"run_root={tmp_path}"]
    given += ["runtime=local", "preflight=refuse"]
    monkeypatch.setattr(pipeline.detect, "host", lambda python: host_with(8))
    monkeypatch.setattr(
        "launch.checks.preflight.check", lambda plan, host: None
    )  # the doctor's findings on this machine
    with pytest.raises(HostError, match=r"phase big: .*mode=plan"):
        pipeline.run(compose(given), Request(given))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_which_phase_does_not_fit(launch):
    phases = "phases=[{name: a}, {name: big, overrides: ['model=qwen3_32b']}]"
    done = launch("hardware=rx7900xtx", phases, "mode=plan")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines if "DOES NOT FIT" in line] == ["big"]
    assert sum(line.startswith("! phase big: ") for line in lines) == 1


@pytest.mark.usefixtures("hangups")
def test_a_signal_between_two_phases_stops_the_pipeline_and_the_same_command_resumes(
    tmp_path, capsys, phases_that_end
):
    """With format=json, each command ends with one JSON object."""
    started, signals = phases_that_end
    overrides = [*TWO, f"run_root={tmp_path}", "name=p", "format=json"]
    signals["1_a"] = signal.SIGHUP
    before = signal.getsignal(signal.SIGHUP)
    assert pipeline.run(compose(overrides), Request(overrides)) == EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGHUP) == before
    assert started == ["1_a"]
    stopped = json.loads(capsys.readouterr().out)
    assert (stopped["exit_code"], list(stopped["phases"])) == (EXIT_INTERRUPTED, ["a"])
    [run_dir] = (tmp_path / "p").glob("[0-9]*")
    record = json_files.read_json(run_dir / "record.json")
    assert (record["status"], record["exit_code"]) == ("interrupted", EXIT_INTERRUPTED)
    signals["2_b"] = signal.SIGHUP  # the last phase is already done
    assert pipeline.run(compose(overrides), Request(overrides)) == EXIT_DONE
    assert started == ["1_a", "2_b"]
    assert json_files.read_json(run_dir / "record.json")["status"] == "done"
    phases = {
        name[2:]: {"run_dir": str(run_dir / name), "exit_code": 0, "result": {"status": "done"}}
        for name in ("1_a", "2_b")
    }
    whole = {"run_dir": str(run_dir), "exit_code": 0, "phases": phases}
    assert json.loads(capsys.readouterr().out) == whole


def stopped_in_a(tmp_path, asked):
    """Return the overrides and run directory of a pipeline that was stopped in its first phase."""
    given = [*TWO, f"run_root={tmp_path}", "name=p"]
    asked["1_a"] = signal.SIGTERM
    assert pipeline.run(compose(given), Request(given)) == EXIT_INTERRUPTED
    [first] = (tmp_path / "p").glob("[0-9]*")
    return given, first


def test_a_phase_with_a_changed_composition_is_not_resumed(
    tmp_path, capsys, monkeypatch, phases_that_end
):
    """conf/ changes for the method of a phase, but not the pipeline's own composition."""
    started, asked = phases_that_end
    given, first = stopped_in_a(tmp_path, asked)

    def edited(overrides, typed=None):
        found = compose(overrides, typed)
        found.method.args["learning_rate"] = 0.125
        return found

    monkeypatch.setattr(pipeline, "compose", edited)
    asked.clear()
    named = [*given, f"resume={first}"]
    with pytest.raises(
        UserError,
        match=r"resume=.*a\.method\.args\.learning_rate: .* -> 0\.125.*resume=never",
    ):
        pipeline.run(compose(named), Request(named))
    assert started == ["1_a"]
    assert pipeline.run(compose(given), Request(given)) == EXIT_DONE
    assert started == ["1_a", "1_a", "2_b"]
    assert "since it began: a.method.args.learning_rate" in capsys.readouterr().out
    assert json.loads((first / "record.json").read_text())["status"] == "interrupted"


def test_a_phase_whose_record_was_edited_is_not_resumed(tmp_path, phases_that_end):
    _, signals = phases_that_end
    given, first = stopped_in_a(tmp_path, signals)
    record = first / "1_a/record.json"
    json_files.write_json(record, {**json_files.read_json(record), "status": "failed"})
    signals.clear()
    named = [*given, f"resume={first}"]
    with pytest.raises(UserError, match=r"a: its record.json cannot be trusted .*resume=never"):
        pipeline.run(compose(named), Request(named))
    record.write_text("{")
    with pytest.raises(UserError, match="a: its record.json is damaged"):
        pipeline.run(compose(named), Request(named))


def test_a_pipeline_fails_if_the_engine_rejects_a_phase(
    tmp_path, monkeypatch, capsys, phases_that_end
):
    def refuses(*args, **kwargs):
        raise HostError("no such device")

    monkeypatch.setattr(pipeline, "execute", refuses)
    given = [*TWO, f"run_root={tmp_path}", "name=p", "format=json"]
    with pytest.raises(HostError, match="phase a: no such device"):
        pipeline.run(compose(given), Request(given))
    [record] = tmp_path.glob("p/[0-9]*/record.json")
    assert json.loads(record.read_text())["status"] == "failed"
    shown = json.loads(capsys.readouterr().out)
    assert (shown["exit_code"], shown["phases"]) == (HostError.exit_code, {})


def pipeline_record(folder, status, exit_code):
    kept = {"schema": 1, "run_id": "r", "status": status, "exit_code": exit_code}
    kept |= {"overrides": [], "composition": {}, "composition_hash": ""}
    content = {**kept, "phases": {"a": "1_a", "b": "2_b"}}
    json_files.write_json(folder / "record.json", sealed.seal(content))


def test_reproducing_a_pipeline_stops_at_an_interruption(tmp_path, monkeypatch, capsys):
    for name in ("1_a", "2_b"):
        a_run(tmp_path / name, weights_sha256="x")
    pipeline_record(tmp_path, "done", 0)
    started = []

    def asked_as_it_ends(plan, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        started.append(plan.run_dir.name.partition("-")[0])
        json_files.write_json(plan.run_dir / "result.json", {"weights_sha256": "x"})
        return EXIT_DONE

    monkeypatch.setattr(reproduce, "check_host", lambda plan, host: None)
    monkeypatch.setattr(reproduce, "execute", asked_as_it_ends)
    assert reproduce.main([str(tmp_path)]) == EXIT_INTERRUPTED
    assert started == ["1_a"]
    assert "2_b and later phases were not compared" in capsys.readouterr().out


def test_no_run_is_reproduced_if_a_later_one_is_not_done(tmp_path, monkeypatch, capsys):
    a_run(tmp_path / "1_a", weights_sha256="x")
    a_run(tmp_path / "2_b", exit_code=4)
    pipeline_record(tmp_path, "failed", 4)
    monkeypatch.setattr(reproduce, "reproduce_one", lambda *args: pytest.fail("a run was started"))
    assert reproduce.main([str(tmp_path)]) == 2
    assert "2_b: status failed" in capsys.readouterr().err


def test_a_warning_of_several_phases_is_shown_once_with_their_names(launch):
    overrides = "hardware=mi300x model=qwen3_4b user_env.HIP_X=expandable_segments:True".split()
    overrides.append(TWO[-1])
    warning = "expandable_segments hangs"
    lines = [line for line in shared_warnings(plans(*overrides)) if warning in line]
    assert [line.partition(": ")[0] for line in lines] == ["a, b"]
    shown = launch(*overrides, "mode=plan")
    assert (shown.code, shown.out.count(warning)) == (0, 1)
    printed = json.loads(launch(*overrides, "mode=plan", "format=json").out)
    assert [line for line in printed["warnings"] if warning in line] == lines
