"""Test runs of adapters in this process.

Checkpoints contain only the adapter, runs resume exactly, and a run can continue another adapter.
"""

from __future__ import annotations

from safetensors import safe_open

from tests.e2e.test_resume import assert_equal, run, signal_in_step_2

LORA = ["adapter=lora", "adapter.rank=4"]


def names(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def resumes_exactly(folder, monkeypatch, *overrides: str) -> tuple[int, int, int]:
    """Return the exit codes of an SFT, of one stopped in step 2, and of its resumption.

    Assert that both SFTs end with the same results.
    """
    whole, _ = run(folder / "whole", "sft", *overrides)
    with signal_in_step_2(monkeypatch):
        stopped, _ = run(folder / "stopped", "sft", *overrides)
    resumed, _ = run(folder / "stopped", "sft", *overrides)
    assert_equal(folder / "stopped", folder / "whole")
    return whole, stopped, resumed


def test_a_checkpoint_contains_only_the_adapter_and_resumes_exactly(tmp_path, monkeypatch):
    overrides = ("adapter=dora", "adapter.rank=4")
    assert resumes_exactly(tmp_path, monkeypatch, *overrides) == (0, 75, 0)
    checkpoint = tmp_path / "whole/checkpoints/checkpoint-4"
    assert {
        name for name in names(checkpoint / "adapter_model.safetensors") if "lora_" not in name
    } == set()
    assert not list(checkpoint.glob("model*.safetensors"))


def test_a_run_continues_the_adapter_of_another_only_on_its_base(tmp_path):
    assert run(tmp_path / "sft", "sft", *LORA)[0] == 0
    path = f"adapter.path={tmp_path / 'sft/adapter'}"
    code, result = run(tmp_path / "dpo", "dpo", *LORA, path)
    # The copy that TRL makes is not saved.
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
