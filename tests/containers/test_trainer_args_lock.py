"""Compare containers/trainer_args.lock.json with the installed packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from containers import lock_trainer_args
from launch.schema.trainer_args import LOCK, NOT_SETTABLE, OWNED, lock

ROOT = Path(__file__).parents[2]


def test_lock_is_up_to_date():
    assert json.loads(LOCK.read_text()) == lock_trainer_args.lock(), "run `make lock`"


def test_engine_arguments_match_pinned_vllm():
    """Compare versions, since `make lock` does not update the list without vLLM."""
    assert f"\nvllm-cpu=={lock()['vllm']} ;" in (ROOT / "containers/cpu/vllm.lock").read_text(), (
        "run `make vllm`, then `make lock`"
    )
    engine = lock()["engine"]
    assert engine["max_num_seqs"] == {"types": ["int", "null"]}
    assert {"fp8", "auto"} <= set(engine["kv_cache_dtype"]["names"])
    assert "ROCM_AITER_FA" in engine["attention_backend"]["names"]
    assert engine["compilation_config"]["types"] == ["dict"]
    assert "names" not in engine["quantization"]  # plugins can add words


def test_removed_arguments_are_absent():
    for name in ("SFTConfig", "DPOConfig", "GRPOConfig"):
        assert set(NOT_SETTABLE["removed"]) & set(lock()["arguments"][f"trl.{name}"]) == set()


def test_owned_arguments_exist_in_some_class():
    known = set().union(*lock()["arguments"].values())
    assert set(OWNED) - known == set()


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "GRPOConfig"])
def test_words_match_trainer(name):
    """Check that the words include the defaults and the losses in TRL's documentation."""
    arguments = lock()["arguments"][f"trl.{name}"]
    for argument, entry in arguments.items():
        if "names" in entry and entry["default"] is not None:
            default = entry["default"]
            defaults = default if isinstance(default, list) else [default]
            assert set(defaults) <= set(entry["names"]), argument
    documented = {
        "SFTConfig": {"nll", "dft"},
        "DPOConfig": {"ipo", "hinge", "robust", "sft"},
        "GRPOConfig": {"grpo", "dr_grpo", "cispo"},
    }
    assert documented[name] <= set(arguments["loss_type"]["names"])
    assert {"lr_scheduler_type", "optim", "save_strategy"} <= {
        argument for argument, entry in arguments.items() if "names" in entry
    }
