"""Test trials, and the results of tunings, with a stand-in for the recipe.

tests/e2e runs real recipes.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.core.errors import UserError
from recipes.bench.benchmark import Table
from recipes.rank.program import Failed
from recipes.tune import batch, hipblaslt, inductor, tunableop
from recipes.tune.trial import Setting
from recipes.tune.tuning import (
    STEP,
    TrainingTuneConfig,
    finish,
    full_rows,
    measure_trials,
    training,
)
from tests.conftest import ROOT


def tuned_config(run_dir, **args):
    """Return the configuration that a rank of a tuning reads."""
    recipe = {"output_dir": "", "max_steps": 1, "size": 2, "sleep_s": 0.0, "says": None}
    recipe |= {"ends_with": 0, "max_length": 8, **args}
    groups = {"hardware": "mi350x", "model": "qwen3_4b", "method": "sft", "adapter": "none"}
    groups |= {"precision": "bf16", "topology": "single", "data": "reasoning", "tracking": "none"}
    hardware = {"name": "mi350x", "product": "AMD Instinct MI350X", "gfx": "gfx950"}
    return OmegaConf.create(
        {
            "run_dir": str(run_dir),
            "runtime": {"hang_timeout_s": 1200},
            "smoke": False,
            "hardware": {**hardware, "vendor": "amd"},
            "data": {"kind": "reasoning", "path": None},
            "method": {"program": "recipes.tune.batch"},
            "tuned": {
                "method": {"program": "tests.helpers.tuned_recipe"},
                "trainer_args": recipe,
                "cache": str(run_dir / "cache"),
                "experiment": {"groups": groups, "values": {"model": {"init": "random"}}},
            },
        }
    )


def training_args(**args):
    return TrainingTuneConfig(output_dir="", **{"steps": 1, "warmup": 1, **args})


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_trial_gets_its_setting_and_is_measured(tmp_path):
    setting = Setting({"size": 4}, {"MINE": "yes"})
    row = training(tuned_config(tmp_path), training_args(steps=3, warmup=2), "one", setting)
    assert row["tokens_per_second"] == 400 / 0.5  # 100 x 4 tokens per step of 0.5 s
    expected = {"step_s": 0.5, "spread": 0.0, "first_step_s": 10.5, "memory_gb": 5.0}
    assert expected.items() <= row.items()
    assert (tmp_path / "trials/one/log").read_text() == "started jsonl yes 0\n"
    written = yaml.safe_load((tmp_path / "trials/one/config.yaml").read_text())
    assert written["trial"] is True
    assert "tuned" not in written
    assert (tmp_path / "heartbeat").exists()  # so that the watchdog sees progress


@pytest.mark.parametrize(("args", "message"), [
    ({"ends_with": 1, "says": "torch.OutOfMemoryError: CUDA"}, "^out of memory"),
    ({"ends_with": 7}, "started reasoning None 0 .exit code 7; one/log"),
    ({"size": 0}, "no tokens after 1 warm-up steps"),
])  # fmt: skip
def test_a_failed_trial_has_a_reason(tmp_path, args, message):
    with pytest.raises(UserError, match=message):
        training(tuned_config(tmp_path, **args), training_args(rows="data"), "one", Setting())


def test_overrides_compose_to_the_same_values():
    values = ["ATEN,TRITON,CK", "it's", "a b", "{x}", ["a", "b c"], [1, 2], None, 0.5, True]
    values += [{"type": "yarn", "factor": 2.0}]
    args = {f"value{number}": value for number, value in enumerate(values)}
    overrides = [f"+{override}" for override in Setting(args).overrides()]
    known = inductor.CANDIDATES["ck"]
    config = compose(["hardware=mi350x", "model=qwen3_4b", *overrides, *known.overrides()])
    expected = {**args, **known.args}
    assert {key: config.method.args[key] for key in expected} == expected
    assert config.user_env == known.env


TABLE = Table("batch", "batch tokens_per_second", figure="tokens_per_second")


def row(batch_size, figure, error=None, **more):
    return {"batch": batch_size, "tokens_per_second": figure, "error": error, **more}


def test_before_after_and_an_experiment_that_composes(tmp_path, capsys):
    rows = [row(4, 100.0, spread=0.2), row(8, 110.0), row(16, None, "out of memory: all of it")]
    settings = [Setting({STEP[0]: row["batch"]}, {"HIP_B": "1"}) for row in rows]
    config = tuned_config(tmp_path)
    config.smoke = True
    result = finish(config, TABLE, rows, rows[0], settings)
    assert result["gain"] == 1.1
    assert result["before"] == {"tokens_per_second": 100.0}
    assert result["overrides"] == ["method.args.per_device_train_batch_size=8", "user_env.HIP_B=1"]
    name = "tuned_batch_sft_qwen3_4b_mi350x"
    config = compose([f"experiment={tmp_path}/conf/experiment/{name}.yaml"])
    assert config.method.args["per_device_train_batch_size"] == 8
    assert (config.hardware.name, config.model.init.name) == ("mi350x", "random")
    assert (config.name, config.user_env) == (name, {"HIP_B": "1"})
    out = capsys.readouterr().out
    assert "16: out of memory: all of it\n" in out
    assert "vary by 20.0%, so a gain of 10.0%" in out
    assert "From a smoke run" in Path(result["experiment"]).read_text()


def test_a_failed_recipe_is_retried_and_other_runs_are_skipped(tmp_path):
    config, seen = tuned_config(tmp_path), []
    config.profile, args = "none", TrainingTuneConfig(output_dir="")

    def work(case):
        seen.append(case["batch"])
        raise UserError("no engine")

    for _ in range(2):
        rows = measure_trials(config, args, TABLE, [{"batch": 1}, {"batch": 2}], work)
    errors = [row["error"] for row in rows]
    assert errors == ["no engine", "not measured: the unchanged recipe failed"]
    assert seen == [1, 1]
    with pytest.raises(Failed, match="unchanged recipe failed: no engine"):
        finish(config, TABLE, rows, rows[0], [Setting(), Setting()])


@pytest.mark.parametrize(("batch_size", "accumulation", "counts", "remedy"), [
    (32, 1, "128 sequences per step instead of 16", "Sweep the learning rate"),
    (1, 2, "8 sequences per step instead of 16", "effective_batch=16"),
    (2, 2, None, None),
])  # fmt: skip
def test_a_note_reports_a_changed_number_of_sequences_per_step(
    tmp_path, monkeypatch, batch_size, accumulation, counts, remedy
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    rows = [row(4, 1.0), row(batch_size, 2.0)]
    changes = dict(zip(STEP, (batch_size, accumulation), strict=True))
    config = tuned_config(tmp_path, per_device_train_batch_size=4)
    result = finish(config, TABLE, rows, rows[0], [Setting(), Setting(changes)])
    notes = [line for line in result["notes"] if "sequences per step" in line]
    assert [counts in note and remedy in note for note in notes] == [True] * bool(counts)
    header = Path(result["experiment"]).read_text().splitlines()
    assert [line for line in header if "sequences per step" in line] == [f"# {n}" for n in notes]


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_full_rows(tmp_path, recipe):
    args, setting = training_args(recipe=recipe, warmup=2), Setting({STEP[0]: 1})
    data = full_rows(tuned_config(tmp_path, max_length=16), args, setting, 1)
    text = Path(data["path"]).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 3
    assert all(len(line["text" if recipe == "sft" else "chosen"]) == 64 for line in lines)
    args.seed = 1  # a resumed tuning reuses the rows
    assert full_rows(tuned_config(tmp_path, max_length=16), args, setting, 1) == data
    assert Path(data["path"]).read_text() == text


# ---- batch


def planned(size, checkpointing, fits):
    args = {"per_device_train_batch_size": size, "gradient_checkpointing": checkpointing}
    return {"args": args, "planned_gb": 10.0 * size, "capacity_gb": 80.0, "fits": fits}


def test_the_smallest_batch_that_should_not_fit_is_measured():
    small, fails, larger = (planned(n, True, n == 1) for n in (1, 2, 4))
    without = planned(1, False, False)
    candidates, (note,) = batch.select_candidates([small, fails, larger, without])
    assert candidates == [small, fails, without]
    assert "batch 4 with checkpointing" in note


def test_before_is_the_nearest_batch_that_runs(tmp_path, monkeypatch):
    config = tuned_config(tmp_path, **planned(4, True, True)["args"])
    config.tuned.planned = [planned(n, on, True) for on in (True, False) for n in (1, 2, 4, 8)]
    config.trainer_args, config.profile = {"output_dir": ""}, "none"
    monkeypatch.setenv("WORLD_SIZE", "1")

    def train(_config, _args, name, setting):
        if setting.args["per_device_train_batch_size"] >= 4 and "with-" in name:
            raise UserError("out of memory")
        return {"tokens_per_second": 1.0, "memory_gb": 1.0}

    monkeypatch.setattr(batch, "training", train)
    result = batch.batch(config)
    errors = [row["error"] for row in result["rows"]]
    assert (
        errors
        == [None, None, "out of memory", "not measured: batch 4 already ran out of memory"]
        + [None] * 4
    )
    note = "(batch 4 with checkpointing) does not run here, so `before` is batch 2 with"
    assert note in " ".join(result["notes"])


# ---- inductor


def test_candidates_of_the_hardware_and_of_a_recipe_that_compiles():
    args = inductor.InductorConfig(output_dir="", candidates=["default", "ck", "cpp"])
    on_amd, notes = inductor.candidates(args, {}, "gfx950", on_cpu=False)
    assert list(on_amd) == ["eager", "default", "ck"]
    assert "cpp" in notes[-1]
    on_nvidia, _ = inductor.candidates(args, {}, "sm_90", on_cpu=False)
    assert list(on_nvidia) == ["eager", "default"]
    by_default = inductor.candidates(inductor.InductorConfig(output_dir=""), {}, "gfx950", False)[0]
    assert {"gemm-autotune", "pointwise-autotune"} <= set(by_default)
    assert "layout" not in by_default
    own = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}
    settings, _ = inductor.candidates(args, own, "gfx950", on_cpu=False)
    assert list(settings) == ["as it stands", "eager", "default", "ck"]
    assert settings["as it stands"] == Setting()
    # transformers compiles if a mode is set, even with torch_compile=False
    assert settings["eager"].args == {"torch_compile": False, "torch_compile_mode": None}
    assert settings["default"].args == {"torch_compile": True, "torch_compile_mode": None}


@pytest.mark.parametrize(("named", "gfx", "tried"), [
    (None, "gfx942", False),
    (list(inductor.GRAPHS), "gfx942", True),
    (None, "sm_90", True),
])  # fmt: skip
def test_cuda_graphs_are_tried_on_amd_only_if_they_are_named(named, gfx, tried):
    args = inductor.InductorConfig(output_dir="", candidates=named)
    settings, notes = inductor.candidates(args, {}, gfx, on_cpu=False)
    assert (set(inductor.GRAPHS) <= set(settings)) == tried
    assert any("187715" in note for note in notes) != tried


@pytest.mark.parametrize(("loss", "differs"), [(2.01, False), (2.3, True), (math.nan, True)])
def test_a_candidate_that_trains_differently_is_not_the_best(loss, differs):
    before = {"candidate": "eager", "mean_loss": 2.0, "error": None}
    row = inductor.check_loss({"candidate": "default", "mean_loss": loss, "error": None}, before)
    assert bool(row["error"]) == differs
    without = {"candidate": "default", "error": "no compiler"}  # a failed trial has no loss
    assert inductor.check_loss(without, before) is without


# ---- tunableop


VALIDATORS = """\
Validator,PT_VERSION,2.13.0
Validator,ROCM_VERSION,7.2.0.0-1
Validator,HIPBLASLT_VERSION,1.2.0-abc
Validator,GCN_ARCH_NAME,gfx950:sramecc+:xnack-
"""


def test_tuned_products_are_added_to_the_file_of_their_versions(tmp_path):
    file, first = tmp_path / "tuned.csv", "GemmTunableOp_BFloat16_TN,tn_1_2_3,A,0.1"
    for lines in ((first, "Gemm_x,y,Z,1"), ("Gemm_x,y,W,2", "Gemm_x,z,W,2")):
        file.write_text(VALIDATORS + "\n".join(lines) + "\n")
        folder = tunableop.add_to_cache(file, tmp_path / "cache")
    assert folder.name == "gfx950-rocm7.2.0.0-1-hipblaslt1.2.0-abc-torch2.13.0"
    expected = [*VALIDATORS.splitlines(), first, "Gemm_x,y,W,2", "Gemm_x,z,W,2"]
    for gpu in range(8):
        assert (folder / f"tunableop{gpu}.csv").read_text().splitlines() == expected
    for content, message in (
        (VALIDATORS, "wrote 0 kernels"),
        (VALIDATORS.replace("HIPBLASLT", "X") + first, "HIPBLASLT_VERSION"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            tunableop.add_to_cache(file, tmp_path)


# ---- hipblaslt


def test_products_that_hipblaslt_logs_are_tuned_and_the_file_is_used(tmp_path, monkeypatch):
    program = tmp_path / "hipblaslt-bench"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/argv\n[ $4 = 64 ] && exit 3\n'
        'echo "N,N,1,$4,512,1024,11" >> $HIPBLASLT_TUNING_FILE\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hipblaslt.torch.version, "hip", "7.2")
    config = tuned_config(tmp_path / "run")
    (tmp_path / "run").mkdir()
    config.profile, config.trainer_args = "none", {"output_dir": "", "steps": 1, "warmup": 1}
    result = hipblaslt.hipblaslt(config)
    options = "--algo_method heuristic --requested_solution -1 --cold_iters 50 --iters 20"
    product = "--api_method c -m {} -n 512 -k 1024 --transA N --a_type bf16_r {}"
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv == [product.format(m, options) for m in (1024, 64)]
    (file,) = (tmp_path / "run/cache/hipblaslt").iterdir()
    assert file.read_text() == "N,N,1,1024,512,1024,11\n"  # the other product fails
    assert (result["gain"], result["rows"][1]["products"]) == (2.0, 2)
    assert result["overrides"] == [f"user_env.HIPBLASLT_TUNING_OVERRIDE_FILE={file}"]
