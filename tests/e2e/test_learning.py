"""Test experiment=tiny_learning: GRPO, RAFT and DPO use one SFT and equally many samples.

It is planned as it stands, and scaled down and run.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from launch import report
from launch.config.compose import compose
from launch.config.request import Request
from launch.core import json_files
from launch.schema.plan import Plan
from launch.schema.trainer_args import value
from launch.study import phase_curves, pipeline
from recipes.rewards.verifier import Verifier
from tests.conftest import host_with
from tests.e2e import phases

EXPERIMENT = ["experiment=tiny_learning", "tracking=none"]
SMALL = ["model.num_layers=1", "data.num_train=64", "data.num_heldout=8"]
# Random weights solve no problem and never finish, so keep all their answers. A reward for length
# makes their rewards differ.
ANYTHING = (
    "method.args.threshold=0.0 method.args.finished_only=false +method.rewards.length=0.1".split()
)
SCALED = {  # phase -> its overrides in addition to those of the experiment
    "sft": ["method.args.max_steps=2", "method.args.per_device_train_batch_size=8"],
    "raft": [
        "method.args.sample={num_prompts: 8, batch_size: 4, threshold: 0.0, finished_only: false}",
        "method.args.train.per_device_train_batch_size=4",
    ],
    "grpo": [
        "method.args.max_steps=2",
        "method.args.per_device_train_batch_size=32",
        "+method.rewards.length=0.1",
    ],
    "dpo_samples": ["method.args.num_prompts=16", "method.args.batch_size=8", *ANYTHING],
    "dpo": ["data.pairs_of_any=true"],
}
PHASES = """
sft raft_cycle0_evaluate raft_cycle1_sample raft_cycle1_train raft_cycle1_evaluate
raft_cycle2_sample raft_cycle2_train raft_cycle2_evaluate grpo grpo_evaluated dpo_samples dpo
dpo_evaluated
""".split()
SAMPLED = {
    "raft": ("raft_cycle1_sample", "raft_cycle2_sample"),
    "grpo": ("grpo",),
    "dpo": ("dpo_samples",),
}


def plans_of(run_dir, scaled: dict[str, list[str]], *overrides: str) -> dict[str, Plan]:
    arguments = [*EXPERIMENT, *overrides]
    config = compose(arguments)
    for phase in config.phases:
        phase.overrides += scaled.get(phase.name, [])
    return pipeline.make_plans(config, Request(arguments), host_with(0), run_dir)


def num_samples(plan: Plan) -> int:
    """Return the completions that a phase's configuration requests."""
    if plan.config.method.name == "sample":
        return value(plan.config, "num_prompts") * value(plan.config, "samples_per_prompt")
    names = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
    steps, rows, accumulated = (value(plan.config, name) for name in names)
    return steps * rows * accumulated


def budgets(plans: dict[str, Plan]) -> dict[str, int]:
    return {
        method: sum(num_samples(plans[phase]) for phase in sampled)
        for method, sampled in SAMPLED.items()
    }


def source(plans: dict[str, Plan], phase: str) -> str:
    """Return the phase whose model `phase` starts from."""
    return next(
        name
        for name, plan in plans.items()
        if str(plan.run_dir / "model") == plans[phase].config.model.path
    )


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Return the scaled plans, each phase's result, and its number of judged completions."""
    run_dir = tmp_path_factory.mktemp("tiny_learning") / "run"
    judged = Counter()
    plans = plans_of(run_dir, SCALED, *SMALL)
    names = iter(plans)
    judge = Verifier._judge

    def counted(self, prompts, completions, columns):
        judged[phase] += len(completions)
        return judge(self, prompts, completions, columns)

    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "_judge", counted)
        phase = next(names)
        for name, result in phases.run(plans):
            results[name], phase = result, next(names, None)
    return plans, results, judged


def test_every_method_has_the_same_start_and_number_of_samples(tmp_path):
    plans = plans_of(tmp_path, {})
    assert list(plans) == PHASES
    assert budgets(plans) == dict.fromkeys(SAMPLED, 32_000)
    starts = ("raft_cycle0_evaluate", "raft_cycle1_sample", "grpo", "dpo_samples", "dpo")
    assert {source(plans, phase) for phase in starts} == {"sft"}
    evaluated = {n: p.config for n, p in plans.items() if p.config.method.name == "evaluate"}
    settings = {json.dumps([str(c.data), str(c.method.args)]) for c in evaluated.values()}
    assert len(settings) == 1, "evaluations that cannot be compared"
    sources = "sft raft_cycle1_train raft_cycle2_train grpo dpo".split()
    assert [source(plans, name) for name in evaluated] == sources


def test_every_phase_is_done_and_its_model_differs(learned):
    plans, results, _ = learned
    assert list(results) == PHASES
    assert {result["code"] for result in results.values()} == {0}
    trained = [name for name, plan in plans.items() if plan.config.method.kind == "trainer"]
    assert len({results[name]["weights_sha256"] for name in trained}) == len(trained) == 5


def test_each_method_judges_the_planned_samples(learned):
    plans, results, judged = learned
    assert budgets(plans) == dict.fromkeys(SAMPLED, 64)
    spent = {method: sum(map(judged.get, sampled)) for method, sampled in SAMPLED.items()}
    assert spent == budgets(plans)
    assert sum(results[phase]["num_samples"] for phase in SAMPLED["raft"] + SAMPLED["dpo"]) == 128
    trains = set(judged) - {phase for phase, result in results.items() if "accuracy" in result}
    assert trains == {phase for sampled in SAMPLED.values() for phase in sampled}, (
        "a phase samples that none accounts for"
    )


def test_the_summary_and_the_report_list_the_evaluations(learned):
    plans, results, _ = learned
    summary = phase_curves.summary(next(iter(plans.values())).run_dir.parent, list(plans.values()))
    evaluated = [name for name, result in results.items() if "accuracy" in result]
    for name in evaluated:
        assert (
            f"{plans[name].run_dir.name}: held-out accuracy {results[name]['accuracy']:.1%}"
            in summary
        )
    assert summary.count(" points on ") == len(evaluated) - 1
    assert summary.count("samples selected; pass@1") == 3
    run_dir = plans["sft"].run_dir.parent
    record = {
        "status": "done",
        "exit_code": 0,
        "phases": {name: plan.run_dir.name for name, plan in plans.items()},
    }
    json_files.write_json(run_dir / "record.json", record)
    assert report.main([str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    for name in evaluated[1:]:  # compared with the latest evaluation of an ancestor
        before = (
            "raft_cycle1_evaluate" if name == "raft_cycle2_evaluate" else "raft_cycle0_evaluate"
        )
        assert f"{plans[before].run_dir.name} to {plans[name].run_dir.name}" in page
