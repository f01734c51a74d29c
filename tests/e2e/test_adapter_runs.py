"""Test runs of adapters in this process.

Checkpoints hold the adapter alone, runs resume exactly, and a run can train another's adapter.
"""

from __future__ import annotations

import os
import signal

from safetensors import safe_open

from recipes.training import train_loop
from tests.e2e.test_resume import assert_equal, run

LORA = ["adapter=lora", "adapter.rank=4"]


def names(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_exactly(tmp_path, monkeypatch):
    assert resumes_exactly(tmp_path, monkeypatch, "adapter=dora", "adapter.rank=4") == (0, 75, 0)


def resumes_exactly(tmp_path, monkeypatch, *overrides):
    """Return the exit codes of a whole SFT, of one stopped in step 2, and of its resumption.

    The resumed run ends like the whole one.
    """
    whole, _ = run(tmp_path / "whole", "sft", *overrides)
    held = tmp_path / "whole/checkpoints/checkpoint-4"
    assert {
        name for name in names(held / "adapter_model.safetensors") if "lora_" not in name
    } == set()
    assert not list(held.glob("model*.safetensors"))
    log = train_loop.Metrics.on_log

    def signal_in_step_2(self, args, state, *rest, **kwargs):
        log(self, args, state, *rest, **kwargs)
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train_loop.Metrics, "on_log", signal_in_step_2)
    stopped, _ = run(tmp_path / "cut", "sft", *overrides)
    monkeypatch.undo()
    resumed, _ = run(tmp_path / "cut", "sft", *overrides)
    assert_equal(tmp_path / "cut", tmp_path / "whole")
    return whole, stopped, resumed


def test_a_run_goes_on_from_the_adapter_of_another_on_its_base_only(tmp_path):
    assert run(tmp_path / "sft", "sft", *LORA)[0] == 0
    path = f"adapter.path={tmp_path / 'sft/adapter'}"
    code, result = run(tmp_path / "dpo", "dpo", *LORA, path)
    # TRL's copy is not kept.
    assert (code, sorted(p.name for p in (tmp_path / "dpo/adapter").iterdir() if p.is_dir())) == (
        0,
        [],
    )
    assert names(tmp_path / "dpo/adapter/adapter_model.safetensors") == names(
        tmp_path / "sft/adapter/adapter_model.safetensors"
    )
    code, result = run(tmp_path / "other", "sft", *LORA, path, "seed=3")
    assert code == 2
    assert "was trained on another base than model=tiny" in result["error"]
