"""Test a tuning's recipe, its planned candidates and its experiment file."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.core.errors import UserError
from launch.execution import record
from launch.plan import tuned
from launch.plan.check_files import check_files
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with

BATCH = ("hardware=mi350x", "model=qwen3_4b", "method=tune/batch", "topology=single")
RUN = Path("/runs/tune/1")


def plan(*overrides, host=None):
    config, warnings = prepare(composed(*overrides))
    return make_plan(config, host or host_with(8), RUN, warnings)


def test_every_candidate_is_planned_including_the_current_recipe():
    tuning = plan(
        *BATCH,
        "method.args.max_length=4096",
        "method.args.batches=[1,64,128]",
        "method.args.checkpointing=[true]",
    )
    planned = {
        candidate["args"]["per_device_train_batch_size"]: candidate
        for candidate in tuning.tuned["planned"]
    }
    assert sorted(planned) == [1, 4, 64, 128]  # 4: conf/method/sft.yaml
    assert [planned[size]["fits"] for size in sorted(planned)] == [True, True, True, False]
    assert planned[1]["planned_gb"] < planned[64]["planned_gb"] < planned[64]["capacity_gb"]


def test_candidates_have_the_same_effective_batch():
    overrides = (
        "effective_batch=16",
        "method.args.batches=[4,8,32]",
        "method.args.checkpointing=[true]",
    )
    args = [candidate["args"] for candidate in plan(*BATCH, *overrides).tuned["planned"]]
    assert [(a["per_device_train_batch_size"], a["gradient_accumulation_steps"]) for a in args] == [
        (4, 4),
        (8, 2),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.args.recipe=sfd"], "no such recipe. Did you mean sft?"),
        (["method.args.recipe=tune/batch"], "no such recipe"),
        (["method.args.recipe=evaluate"], "measures training steps. Use: method.args.recipe=sft"),
        (["method.args.max_lenght=3"], "Did you mean max_length"),
        (["adapter=none", "precision=nf4"], "precision.weights=nf4"),
        (
            [
                "topology=fsdp",
                "topology.fsdp.activation_checkpointing=true",
                "method.args.checkpointing=[true]",
            ],
            "activation_checkpointing",
        ),
        (["effective_batch=6"], "not a multiple of 32"),
        (["method.args.batches=[a]"], "contains str, but entries must be int"),
        (["method.args.batches=[0]", "effective_batch=32"], "at least 1"),
        (["method.args.checkpointing=[]"], "nothing would be measured"),
    ],
)
def test_a_recipe_that_breaks_a_rule_is_rejected(overrides, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        plan(*BATCH[:3], *overrides)


def test_an_experiment_has_only_values_that_differ_from_its_groups():
    config = composed(
        *BATCH,
        "model.init=random",
        "seed=3",
        "user_env.HIP_B=1",
        "effective_batch=16",
        "method.args.max_length=2048",
    )
    content = tuned.experiment(prepare(config)[0], [])
    assert content["groups"]["method"] == "sft"
    assert content["values"]["model"] == {"init": "random"}
    assert (content["values"]["seed"], content["values"]["user_env"]) == (3, {"HIP_B": "1"})
    assert content["values"]["method"] == {
        "args": {"gradient_accumulation_steps": 4, "max_length": 2048}
    }


@pytest.mark.parametrize("hardware", ["cpu", "mi350x"])
def test_the_experiment_of_a_smoke_run_has_the_original_sizes(hardware):
    overrides = [f"hardware={hardware}", "method=tune/rccl", "smoke=true"]
    values = tuned.experiment(prepare(composed(*overrides))[0], overrides)["values"]
    assert values["method"]["args"] == {
        "ops": ["all_reduce"],
        "min_bytes": 16777216,
        "max_bytes": 1073741824,
        "programs": ["torch"],
        "settings": [],
    }
    assert values.get("smoke", False) == (hardware == "cpu")


@pytest.mark.parametrize(("override", "read"), [
    ("user_env.PYTORCH_TUNABLEOP_TUNING=0 user_env.PYTORCH_TUNABLEOP_FILENAME", "tuned0.csv"),
    ("user_env.HIPBLASLT_TUNING_OVERRIDE_FILE", "tuned.csv"),
])  # fmt: skip
def test_a_tuned_file_is_mounted_and_recorded_and_must_exist(tmp_path, override, read):
    file = tmp_path / "key" / "tuned.csv"
    used = ("hardware=mi300x", "model=qwen3_4b", *f"{override}={file}".split())
    with pytest.raises(UserError, match=rf"{read} is not the absolute path of a file"):
        check_files(composed(*used), all_lines=False)
    file.parent.mkdir()
    file.with_name(read).touch()
    check_files(composed(*used), all_lines=False)
    assert record.data_paths(plan(*used)) == [str(file.with_name(read))]
    (spec,) = plan(*used).containers.values()
    assert [mount.read_only for mount in spec.mounts if mount.source == str(file.parent)] == [True]
