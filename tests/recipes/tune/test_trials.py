"""Test recipes/tune: trials in processes of their own, and what tunings make of them.

Recipes here are stand-ins; tests/e2e runs real ones.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.core.errors import UserError
from launch.plan.planning import prepare
from recipes.bench.series import Column, Table
from recipes.rank import program
from recipes.rank.program import Failed, Interrupted
from recipes.tune import batch, inductor, miopen, rows, trial, tunableop
from recipes.tune.trial import Setting
from recipes.tune.tuning import TrainingTuneConfig, finish, trial_data, write_experiment
from recipes.tune.vllm import write_engine
from tests.conftest import ROOT


def tuned_config(run_dir, **args):
    """Return what a rank reads of a tuning."""
    given = {
        "output_dir": "",
        "max_steps": 1,
        "size": 2,
        "sleep_s": 0.0,
        "says": None,
        "ends_with": 0,
        "max_length": 8,
        **args,
    }
    groups = {
        "hardware": "mi350x",
        "model": "qwen3_4b",
        "method": "sft",
        "adapter": "none",
        "precision": "bf16",
    }
    groups |= {"topology": "single", "data": "reasoning", "tracking": "none"}
    return OmegaConf.create(
        {
            "run_dir": str(run_dir),
            "runtime": {"hang_timeout_s": 1200},
            "smoke": False,
            "hardware": {
                "name": "mi350x",
                "product": "AMD Instinct MI350X",
                "gfx": "gfx950",
                "vendor": "amd",
            },
            "data": {"kind": "reasoning", "path": None},
            "method": {"program": "recipes.tune.batch"},
            "tuned": {
                "method": {"program": "tests.helpers.tuned_recipe"},
                "trainer_args": given,
                "cache": str(run_dir / "cache"),
                "experiment": {"groups": groups, "values": {"model": {"init": "random"}}},
            },
        }
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_trial_gets_its_setting_and_is_measured(tmp_path):
    actual = trial.training(
        tuned_config(tmp_path),
        "one",
        Setting({"size": 4}, {"MINE": "yes"}),
        3,
        2,
        {"kind": "jsonl"},
    )
    assert actual["tokens_per_second"] == 400 / 0.5  # 100 x 4 tokens in each step of half a second
    assert (actual["step_s"], actual["spread"], actual["first_step_s"], actual["memory_gb"]) == (
        0.5,
        0.0,
        10.5,
        5.0,
    )
    assert (tmp_path / "trials/one/log").read_text() == "started jsonl yes 0\n"
    written = yaml.safe_load((tmp_path / "trials/one/config.yaml").read_text())
    assert written["trial"] is True
    assert "tuned" not in written
    assert (tmp_path / "heartbeat").exists()  # the watchdog sees that a trial gets on


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"ends_with": 1, "says": "torch.OutOfMemoryError: CUDA out of memory. Tried to"},
            "out of memory",
        ),
        ({"ends_with": 1, "says": "ValueError: no\nsecond line"}, "ValueError: no"),
        ({"ends_with": 7}, "exit code 7: started reasoning None 0"),
        ({"ends_with": -9}, "killed by SIGKILL: started"),
    ],
)
def test_a_trial_that_fails_says_why(tmp_path, args, message):
    with pytest.raises(UserError, match=message):
        trial.training(tuned_config(tmp_path, **args), "one", Setting(), 1, 1, {})


def test_a_trial_with_too_few_steps(tmp_path):
    with pytest.raises(UserError, match="no tokens in 1 steps"):
        trial.speed([{"time_s": 1.0, "num_tokens": 1, "memory_peak_gb": 0.0}], 1)
    with pytest.raises(UserError, match="no tokens in 3 steps"):
        trial.speed(
            [{"time_s": float(step), "num_tokens": 0, "memory_peak_gb": 0.0} for step in range(3)],
            1,
        )


def test_a_trial_is_stopped_by_its_rows(tmp_path):
    config = tuned_config(tmp_path, max_steps=10_000, sleep_s=0.01)
    outcome = trial.run(config, "one", Setting(), on_rows=lambda actual: len(actual) >= 2)
    assert outcome.stopped
    assert outcome.error is None
    assert 2 <= len(outcome.rows) < 10_000


def test_a_signal_ends_the_trial_too(tmp_path, monkeypatch):
    config = tuned_config(tmp_path, max_steps=10_000, sleep_s=0.01)
    monkeypatch.setattr(program, "_stop_asked", False)

    def ask(actual):
        monkeypatch.setattr(program, "_stop_asked", True)
        return False

    with pytest.raises(Interrupted):
        trial.run(config, "one", Setting(), on_rows=ask)
    size = (tmp_path / "trials/one/metrics.jsonl").stat().st_size
    time.sleep(0.05)
    assert (tmp_path / "trials/one/metrics.jsonl").stat().st_size == size


def test_a_setting_as_overrides():
    setting = Setting(
        {"torch_compile": True, "base": {"max_num_seqs": 512}, "none": None}, {"NCCL_ALGO": "Ring"}
    )
    assert setting.overrides() == [
        "method.args.torch_compile=true",
        "method.args.base.max_num_seqs=512",
        "method.args.none=null",
        "user_env.NCCL_ALGO=Ring",
    ]


def test_overrides_of_candidates_compose():
    candidates = (inductor.CANDIDATES["ck"], inductor.CANDIDATES["cpp-wrapper"])
    overrides = [word for setting in candidates for word in setting.overrides()]
    config = compose(["hardware=mi350x", "model=qwen3_4b", *overrides])
    args, env = ({**a, **b} for a, b in zip(*((c.args, c.env) for c in candidates), strict=True))
    assert {key: config.method.args[key] for key in args} == args
    assert config.user_env == env


def test_values_that_hydra_would_read_as_something_else():
    values = ["ATEN,TRITON,CK", "it's", "a b", "{x}", ["a", "b c"], [1, 2], None, 0.5]
    values += [{"type": "yarn", "factor": 2.0}]
    args = {f"value{number}": value for number, value in enumerate(values)}
    overrides = [f"+{word}" for word in Setting(args).overrides()]
    config = compose(["hardware=mi350x", "model=qwen3_4b", *overrides])
    assert {key: config.method.args[key] for key in args} == args


CHILD = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
print(child.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "timeout_s", "message"),
    [("sys.exit(3)", 1200, "exit code 3"), ("time.sleep(600)", 0.5, "hung")],
)
def test_a_trial_leaves_no_process_however_it_ends(tmp_path, then, timeout_s, message):
    config = tuned_config(tmp_path)
    config.runtime.hang_timeout_s = timeout_s
    (folder := tmp_path / "trials/one").mkdir(parents=True)
    outcome = trial.follow(
        config, [sys.executable, "-c", CHILD.format(then=then)], dict(os.environ), folder, "log"
    )
    assert message in outcome.error
    child = int((folder / "log").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


TABLE = Table(
    "batch",
    figure="tokens_per_second",
    columns=[Column("batch", "batch"), Column("tokens_per_second", "tokens/s", 0)],
)


def row(batch_size, figure, error=None, **more):
    return {"batch": batch_size, "tokens_per_second": figure, "error": error, **more}


def test_before_after_and_an_experiment_that_composes(tmp_path):
    actual = [row(4, 100.0), row(8, 150.0), row(16, None, "out of memory")]
    settings = [
        Setting({"per_device_train_batch_size": one["batch"]}, {"A_B": "1"}) for one in actual
    ]
    result = finish(tuned_config(tmp_path), TABLE, actual, actual[0], settings)
    assert result["gain"] == 1.5
    assert result["before"] == {"tokens_per_second": 100.0}
    assert result["overrides"] == ["method.args.per_device_train_batch_size=8", "user_env.A_B=1"]
    config = compose(
        [f"hydra.searchpath=[file://{tmp_path}/conf]", "experiment=tuned_batch_sft_qwen3_4b_mi350x"]
    )
    assert config.method.args["per_device_train_batch_size"] == 8
    assert (config.hardware.name, config.model.init.name, config.user_env) == (
        "mi350x",
        "random",
        {"A_B": "1"},
    )
    assert config.name == "tuned_batch_sft_qwen3_4b_mi350x"


def test_rows_that_failed_say_why_under_the_table(tmp_path, capsys):
    actual = [
        row(4, 100.0, spread=0.2),
        row(8, 110.0, spread=0.1),
        row(16, None, "out of memory: so it is"),
    ]
    finish(tuned_config(tmp_path), TABLE, actual, actual[0], [Setting()] * 3)
    message = capsys.readouterr().out
    assert "16: out of memory: so it is\n" in message
    assert "steps of one run lie 0.200 apart" in message


def test_nothing_to_compare_with(tmp_path):
    actual = [row(4, None, "out of memory"), row(8, 1.0)]
    with pytest.raises(Failed, match="as it stands could not be measured: out of memory"):
        finish(tuned_config(tmp_path), TABLE, actual, actual[0], [Setting(), Setting()])


def test_an_experiment_of_a_smoke_run_says_so(tmp_path):
    config = tuned_config(tmp_path)
    config.smoke = True
    path, command = write_experiment(config, TABLE, Setting(), row(1, 1.0), row(1, 1.0))
    assert "From a smoke run" in path.read_text()
    assert command in path.read_text()


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=grpo", "topology=split"],
        ["method=sample", "method.args.engine=vllm"],
        ["method=evaluate", "method.args.engine=vllm", "topology=single"],
        ["method=raft", "method.args.sample.engine=vllm"],
    ],
)
def test_the_engine_experiment_applies_to_generation(tmp_path, overrides):
    actual = {
        "max_num_seqs": 512,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.8,
        "block_size": None,
        "VLLM_ROCM_USE_AITER": 1,
    }
    path, command = write_engine(
        tuned_config(tmp_path), {**actual, "max_model_len": 64, "instances": 2}
    )
    assert command in path.read_text()
    given = [
        f"hydra.searchpath=[file://{tmp_path}/conf]",
        f"experiment={path.stem}",
        "hardware=mi350x",
        "model=qwen3_4b",
        *overrides,
    ]
    config, _ = prepare(compose(given))
    assert config.topology.server_args == {"max_num_seqs": 512, "kv_cache_dtype": "fp8"}
    assert (config.topology.server_memory_share, config.user_env) == (
        0.8,
        {"VLLM_ROCM_USE_AITER": "1"},
    )


def test_the_command_can_be_pasted_wherever_the_run_lies(tmp_path):
    folder = tmp_path / """it's a,b=c[1] q"q %41?#x $HOME"""
    _, command = write_experiment(
        tuned_config(folder), TABLE, Setting({"max_steps": 3}), row(1, 1.0), row(1, 1.0)
    )
    python, program, *overrides = shlex.split(command)
    assert compose(overrides).method.args["max_steps"] == 3


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "counts", "remedy"),
    [
        (32, 1, "128 sequences a step, before 16", "a sweep of learning rates"),
        (1, 2, "8 sequences a step, before 16", "effective_batch=16"),
        (4, 1, None, None),
        (2, 2, None, None),
    ],
)
def test_a_batch_that_changes_learning_is_noted(
    tmp_path, monkeypatch, batch_size, accumulated, counts, remedy
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    actual = [row(4, 1.0), row(batch_size, 2.0)]
    settings = [
        Setting(),
        Setting(
            {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulated}
        ),
    ]
    result = finish(
        tuned_config(tmp_path, per_device_train_batch_size=4), TABLE, actual, actual[0], settings
    )
    notes = [line for line in result["notes"] if "sequences a step" in line]
    assert [counts in note and remedy in note for note in notes] == [True] * bool(counts)
    header = Path(result["experiment"]).read_text().splitlines()
    assert [line for line in header if "sequences a step" in line] == [f"# {n}" for n in notes]


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_full_rows(tmp_path, recipe):
    path = tmp_path / "rows.jsonl"
    rows.full_rows(path, recipe, 16, 3, seed=0)
    lines = [yaml.safe_load(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3
    assert all(len(line["text" if recipe == "sft" else "chosen"]) == 64 for line in lines)
    before = path.read_text()
    rows.full_rows(path, recipe, 16, 3, seed=1)  # kept for an interrupted tuning
    assert path.read_text() == before


def test_rows_without_a_length(tmp_path):
    with pytest.raises(UserError, match="max_length=null"):
        trial_data(tuned_config(tmp_path, max_length=None), TrainingTuneConfig(output_dir=""), 1)
    assert (
        trial_data(tuned_config(tmp_path), TrainingTuneConfig(output_dir="", rows="data"), 1) == {}
    )


# ---- batch


def planned(size, checkpointing, fits):
    args = {"per_device_train_batch_size": size, "gradient_checkpointing": checkpointing}
    return {"args": args, "planned_gb": 10.0 * size, "capacity_gb": 80.0, "fits": fits}


def test_the_first_batch_that_should_not_fit_is_tried():
    given = [
        planned(1, True, True),
        planned(2, True, False),
        planned(4, True, False),
        planned(1, False, False),
    ]
    chosen, notes = batch.to_measure(given)
    assert chosen == [given[0], given[1], given[3]]
    assert notes == [
        "not measured, because the plan says that they do not fit: batches of 4 with checkpointing."
    ]


def test_the_margin_of_the_plan_is_noted():
    chosen = [planned(1, True, True), planned(2, True, False)]
    assert batch.margin([row(1, 1.0), row(2, 2.0, memory_gb=79.0)], chosen) == [
        "batch 2, planned to need more than the 80 GB there are: fitted, with 79.0 GB at its peak."
    ]
    assert batch.margin([row(1, 1.0), row(2, None, "out of memory")], chosen)[0].endswith(
        "did not fit."
    )


def test_another_batch_in_place_of_the_recipes_own_is_noted():
    own = {"per_device_train_batch_size": 8, "gradient_checkpointing": False}
    assert batch.another({"batch": 8, "checkpointing": False}, own) == []
    (message,) = batch.another({"batch": 4, "checkpointing": False}, own)
    assert message.startswith(
        "the recipe as it stands, batch 8 without checkpointing, does not run here"
    )


def test_a_batch_above_one_that_ran_out_of_memory():
    done = [row(2, None, "out of memory", checkpointing=True)]
    assert batch.out_of_memory_before({"batch": 4, "checkpointing": True}, done) == 2
    assert batch.out_of_memory_before({"batch": 4, "checkpointing": False}, done) is None


# ---- inductor


def test_candidates_that_this_hardware_lacks():
    args = inductor.InductorConfig(output_dir="", candidates=["default", "ck", "cpp"])
    on_amd, notes = inductor.candidates(args, {}, "gfx950", on_cpu=False)
    assert list(on_amd) == ["eager", "default", "ck"]
    assert "cpp" in notes[-1]
    on_nvidia, _ = inductor.candidates(args, {}, "sm_90", on_cpu=False)
    assert list(on_nvidia) == ["eager", "default"]
    assert "freezing is for inference" in notes[0]


def test_candidates_are_compared_with_a_recipe_that_compiles():
    args = inductor.InductorConfig(output_dir="", candidates=["default"])
    actual, _ = inductor.candidates(
        args,
        {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
        "gfx950",
        on_cpu=False,
    )
    assert list(actual) == ["as it stands", "eager", "default"]
    assert actual["as it stands"] == Setting()
    # transformers compiles where a mode is given, whatever torch_compile says
    assert actual["eager"].args == {"torch_compile": False, "torch_compile_mode": None}
    assert actual["default"].args == {"torch_compile": True, "torch_compile_mode": None}


# ---- tunableop


VALIDATORS = [
    ["PT_VERSION", "2.13.0"],
    ["ROCM_VERSION", "7.2.0.0-1"],
    ["HIPBLASLT_VERSION", "1.2.0-abc"],
]
VALIDATORS += [["GCN_ARCH_NAME", "gfx950:sramecc+:xnack-"]]


def test_tuned_products_are_kept_by_version_and_added_to(tmp_path):
    assert tunableop.key(VALIDATORS) == "gfx950-rocm7.2.0.0-1-hipblaslt1.2.0-abc-torch2.13.0"
    with pytest.raises(UserError, match="HIPBLASLT_VERSION"):
        tunableop.key(VALIDATORS[:2] + VALIDATORS[3:])
    for number, lines in enumerate(
        (
            ["GemmTunableOp_BFloat16_TN,tn_1_2_3,A,0.1", "Gemm_x,y,Z,1"],
            ["Gemm_x,y,W,2", "Gemm_x,z,W,2"],
        )
    ):
        (tmp_path / f"{number}.csv").write_text(
            "\n".join(["Validator,PT_VERSION,2.13.0", *lines]) + "\n"
        )
        folder = tunableop.keep(tmp_path / f"{number}.csv", VALIDATORS, tmp_path / "cache")
    expected = [
        "Validator,PT_VERSION,2.13.0",
        "GemmTunableOp_BFloat16_TN,tn_1_2_3,A,0.1",
        "Gemm_x,y,W,2",
        "Gemm_x,z,W,2",
    ]
    assert [(folder / f"tunableop{gpu}.csv").read_text().splitlines() for gpu in range(8)] == [
        expected
    ] * 8


def test_a_tuning_without_results(tmp_path):
    (tmp_path / "empty.csv").write_text("Validator,PT_VERSION,2.13.0\n")
    with pytest.raises(UserError, match="tuning wrote no kernel"):
        tunableop.keep(tmp_path / "empty.csv", VALIDATORS, tmp_path)


# ---- miopen


def test_calls_of_miopen_in_a_log(tmp_path):
    driver = "./bin/MIOpenDriver convbfp16 -n 1 -c 1024 -H 14 -F 1 -t 1"
    call = f"MIOpen(HIP): Command [LogCmdConvolution] {driver}"
    (tmp_path / "log").write_text(f"step 1\n{call}\n{call}\n{call.replace('1024', '512')}\n")
    assert len(miopen.calls(tmp_path / "log")) == 2
