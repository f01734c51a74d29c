"""Test the phases of method=raft: their order, models and data."""

import functools
from pathlib import Path

import pytest

from launch.config.request import Request
from launch.core.errors import UserError
from launch.plan import rundir
from launch.study import pipeline
from tests.conftest import composed, host_with

REAL = ["hardware=mi300x", "model=qwen3_4b", "method=raft"]


@functools.cache
def plans(*overrides):
    return pipeline.make_plans(
        composed(*overrides), Request(overrides), host_with(8), Path("/runs/raft/1")
    )


def taken(plan):
    """Return the numbers of the phases whose model and data a plan uses."""
    paths = (plan.config.model.path, plan.config.data.path)
    return [Path(path).parent.name.partition("_")[0] if path else None for path in paths]


def test_each_cycle_samples_the_newest_model_and_continues_training_it():
    found = plans(*REAL, "method.args.cycles=2")
    assert {name: taken(plan) for name, plan in found.items()} == {
        "cycle0_evaluate": [None, None],
        "cycle1_sample": [None, None],
        "cycle1_train": [None, "2"],
        "cycle1_evaluate": ["3", None],
        "cycle2_sample": ["3", None],
        "cycle2_train": ["3", "5"],
        "cycle2_evaluate": ["6", None],
    }
    assert [plan.run_dir.name for plan in found.values()][1] == "2_cycle1_sample"
    assert found["cycle1_train"].config.data.path == "/runs/raft/1/2_cycle1_sample/selected.jsonl"
    assert [found[f"cycle{c}_sample"].trainer_args["cycle"] for c in (1, 2)] == [1, 2]


def test_only_sampling_has_a_curriculum_which_uses_the_previous_pass_rates():
    levels = "data.tasks=[{name: chain_sum, level: 0}, {name: chain_sum, level: 1}]"
    adaptive = ["data.curriculum=adaptive", "data.curriculum_args.floor=0.1"]
    found = plans("hardware=cpu", "method=raft", levels, *adaptive)
    rates = {
        name: plan.config.data.pass_rates
        for name, plan in found.items()
        if plan.config.data.curriculum.value != "none"
    }
    assert rates == {
        "cycle1_sample": None,
        "cycle2_sample": "/runs/raft/1/3_cycle1_sample/result.json",
    }
    assert found["cycle2_sample"].config.data.curriculum_args.floor == 0.1


def test_a_fresh_base_and_the_learning_rate():
    found = plans(
        *REAL,
        "method.args.base=fresh",
        "method.args.learning_rate_decay=0.1",
        "method.args.train.learning_rate=1e-4",
    )
    assert [taken(found[f"cycle{c}_train"])[0] for c in (1, 2, 3)] == [None, None, None]
    assert taken(found["cycle3_sample"])[0] == "6"
    rates = [found[f"cycle{c}_train"].trainer_args["learning_rate"] for c in (1, 2, 3)]
    assert rates == pytest.approx([1e-4, 1e-5, 1e-6])


def test_each_phase_has_the_topology_and_adapter_that_it_can_use():
    found = plans(
        *REAL, "method.args.cycles=1", "adapter=lora", "adapter.rank=4", "adapter.rslora=true",
        "topology=fsdp", "topology.num_gpus=4",
        "topology.fsdp.cpu_offload=true", "effective_batch=64",
    )  # fmt: skip
    shapes = {
        n: (p.config.topology.name, len(p.processes[0].gpus), p.config.adapter.name,
            p.config.adapter.rank, p.config.adapter.rslora)
        for n, p in found.items()
    }  # fmt: skip
    inference = ("ddp", 4, "none", None, False)
    assert shapes == {
        "cycle0_evaluate": inference,
        "cycle1_sample": inference,
        "cycle1_train": ("fsdp", 4, "lora", 4, True),
        "cycle1_evaluate": inference,
    }
    assert found["cycle1_train"].trainer_args["gradient_accumulation_steps"] == 4
    assert all(plan.memory[0].total_gb > 0 for plan in found.values())


def test_raft_as_a_phase_of_an_experiment():
    found = plans("experiment=tiny_raft")
    names = list(found)
    assert names[:3] == ["sft", "raft_cycle0_evaluate", "raft_cycle1_sample"]
    assert taken(found["raft_cycle1_sample"])[0] == "1"
    assert taken(found["evaluate"])[0] == str(1 + names.index("raft_cycle2_train"))


def test_random_weights_get_sft_first_and_smoke_is_small():
    assert next(iter(plans("hardware=cpu", "method=raft"))) == "start"
    small = plans(*REAL, "smoke=true")
    assert [name for name in small if name.endswith("sample")] == ["cycle1_sample", "cycle2_sample"]
    assert {plan.config.model.num_layers for plan in small.values()} == {2}
    assert small["cycle1_sample"].trainer_args["threshold"] == 0.0


@pytest.mark.parametrize(("override", "field", "own", "default"), [
    ("topology.server_cache_gb=8", "server_cache_gb", 8, None),
    ("topology.server_args.max_num_seqs=8", "server_args", {"max_num_seqs": 8}, {}),
])  # fmt: skip
def test_server_keys_reach_only_phases_with_vllm(override, field, own, default):
    found = plans(*REAL, "method.args.sample.engine=vllm", override, "method.args.cycles=1")
    values = {name: getattr(plan.config.topology, field) for name, plan in found.items()}
    assert values == dict.fromkeys(found, default) | {"cycle1_sample": own}


def test_evaluations_use_the_rewards_of_sampling():
    code = ["data=code", "~method.rewards.reasoning_gym", "+method.rewards.code_tests=1.0"]
    found = plans(*REAL, *code, "method.args.cycles=1")
    rewards = [found[f"cycle{c}_evaluate"].config.method.rewards for c in (0, 1)]
    assert [reward["code_tests"] for reward in rewards] == [1.0, 1.0]


ACCURACY = ["~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0"]


def test_held_out_rows_are_evaluated_and_samples_use_the_chat_template(tmp_path):
    rows, template = tmp_path / "rows.jsonl", tmp_path / "own.jinja"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    template.write_text("{{ messages[0].content }}")
    data = ["data=jsonl", f"data.path={rows}", f"data.cache={tmp_path}/kept"]
    data += ["data.heldout_fraction=0.5", f"data.chat_template={template}"]
    found = plans(*REAL, *data, *ACCURACY, "method.args.cycles=1")
    assert list(found) == ["cycle0_evaluate", "cycle1_sample", "cycle1_train", "cycle1_evaluate"]
    trained = found["cycle1_train"].config.data
    assert (trained.chat_template, trained.cache) == (str(template), f"{tmp_path}/kept")
    # An evaluation does not train, so its rows need no completions.
    data = ["data=jsonl", f"data.path={rows}", f"data.heldout_path={rows}"]
    assert "cycle0_evaluate" in plans(*REAL, *data, *ACCURACY, "method.args.cycles=1")


def test_a_pipeline_does_not_resume_with_other_rows(tmp_path):
    rows, run_dir = tmp_path / "rows.jsonl", tmp_path / "runs/1"
    rows.write_text('{"prompt": "1+1", "completion": "2"}\n')
    given = ["hardware=cpu", "data=jsonl", f"data.path={rows}"]
    given.append("phases=[{name: a}, {name: b, model_from: a}]")
    found = list(
        pipeline.make_plans(composed(*given), Request(given), host_with(0), run_dir).values()
    )
    record = {"data": pipeline.input_data(run_dir, found)}
    assert rundir.changed_data(record) == []
    rows.write_text('{"prompt": "1+1", "completion": "3"}\n')
    assert rundir.changed_data(record) == [str(rows)]
    # Outputs of phases are not inputs.
    assert pipeline.input_data(tmp_path, found) == {"files": {}}


def of_phases(first, second="sft", *overrides):
    second_phase = ["method=" + second, *overrides]
    phases = (
        f"phases=[{{name: a, overrides: ['method={first}']}}, "
        f"{{name: b, data_from: a, overrides: {second_phase}}}]"
    )
    return plans("hardware=mi300x", "model=qwen3_4b", phases)


def test_a_phase_trains_on_samples_of_an_earlier_one():
    last = of_phases("raft")["b"].config.data.path
    assert last.endswith("_a_cycle3_sample/selected.jsonl")
    assert of_phases("sample")["b"].config.data.path.endswith("1_a/selected.jsonl")
    pairs = of_phases("sample", "dpo", "data.pairs_per_prompt=2")["b"].config.data
    source = (pairs.kind, pairs.path[-16:], pairs.pairs_per_prompt)
    assert source == ("samples", "1_a/scored.jsonl", 2)
    with pytest.raises(UserError, match="data_from=a of b: that phase produces no data"):
        of_phases("sft")


@pytest.mark.parametrize(("overrides", "words"), [
    (["method.args.train.max_step=3"], ["phase cycle1_train", "max_step", "max_steps"]),
    (["data=jsonl", "data.path=none.jsonl"],
     ["phase cycle1_sample", "none.jsonl: no such file"]),
    (["runtime=slurm"], ["runtime=slurm applies to a single run"]),
])  # fmt: skip
def test_invalid_phases_are_rejected(launch, overrides, words):
    done = launch(*REAL, *overrides, "mode=plan")
    assert done.code == 2
    for word in words:
        assert word in done.err


def exporting(model: str, results: str, method: str = "method=export") -> str:
    return (
        'phases=[{name: sft, overrides: ["method=sft"]}, '
        '{name: asked, model_from: sft, overrides: ["method=evaluate"]}, '
        '{name: more, model_from: sft, overrides: ["method=sft"]}, '
        f'{{name: out, model_from: {model}, results_from: {results}, overrides: ["{method}"]}}]'
    )


OF_RAFT = (
    "phases=[{name: r, overrides: ['method=raft']},"
    " {name: out, model_from: r, results_from: r, overrides: ['method=export']}]"
)


@pytest.mark.parametrize(
    ("phases", "folder"), [(exporting("sft", "asked"), "2_asked"), (OF_RAFT, "r_cycle2_evaluate")]
)
def test_an_export_quotes_the_last_evaluation_of_its_model(phases, folder):
    args = plans("hardware=cpu", phases)["out"].trainer_args
    assert args["results_from"].endswith(folder)


@pytest.mark.parametrize(("phases", "message"), [
    (exporting("sft", "sft"), "results_from=sft of out is not an .* evaluations: asked"),
    (exporting("more", "asked"), "results_from=asked of out is not an .* the model of more"),
    (exporting("sft", "asked", "method=raft"), "out has results_from, but method=raft"),
    (exporting("sft", "asked", "method=evaluate"), "phase out: method.args.results_from="),
])  # fmt: skip
def test_results_of_another_model_are_rejected(phases, message):
    with pytest.raises(UserError, match=message):
        plans("hardware=cpu", phases)
