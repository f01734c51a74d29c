"""Test the combinations of precision and adapter that are measured, and their table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from launch.plan.planning import prepare
from tests.conftest import composed
from tests.gpu import jobs, precision

ASKED = argparse.Namespace(
    hardware="hardware=mi300x", tiny=False, start_steps=400, steps=200, learning_rate=1e-3
)


def row(name, adapter, seed, loss, **own):
    return json.dumps(
        {
            "precision": name,
            "adapter": adapter,
            "seed": seed,
            "loss": loss,
            "steps": 4,
            "step_s": 1.0,
            **own,
        }
    )


@pytest.mark.parametrize(("name", "adapter"), precision.combinations())
def test_each_runs_on_an_mi300x_but_4_bits_without_an_adapter(name, adapter):
    refused = precision.refusal(name, adapter, ASKED)
    assert (refused is not None) == ((name, adapter) == ("nf4", "full")), refused


def test_adapters_take_ten_times_the_rate_from_the_same_start_and_seed(tmp_path):
    full, lora = (
        precision.job("fp32", adapter, 1, ASKED, tmp_path).overrides for adapter in ("full", "lora")
    )
    assert sorted(set(lora) ^ set(full)) == [
        "adapter=lora",
        "method.args.learning_rate=0.0005",
        "method.args.learning_rate=0.005",
    ]


def test_the_start_trains_from_random_weights_in_fp32_on_the_smallest_hardware():
    config, _ = prepare(
        composed(
            "hardware=cpu",
            *precision.start(argparse.Namespace(**{**vars(ASKED), "tiny": True})).overrides,
        )
    )
    assert (config.precision.name, config.adapter.name, config.model.init.name) == (
        "fp32",
        "none",
        "random",
    )


def test_figures_are_of_the_last_quarter_and_of_steps_after_the_warm_up():
    steps = [
        {
            "step": n,
            "loss": float(n),
            "memory_peak_gb": 1.0 + n,
            "time_s": 2.0 * n,
            "tokens_per_second": 100.0 * (n > jobs.WARM_UP),
        }
        for n in range(1, 9)
    ]
    assert precision.figures(steps) == {
        "steps": 8,
        "loss": 7.5,
        "peak_gb": 9.0,
        "step_s": 2.0,
        "tokens_per_second": 100.0,
    }


def test_the_table_compares_with_the_same_seed_and_names_what_was_not_measured(tmp_path):
    speed = {"peak_gb": 1.5, "tokens_per_second": 1234.0}
    rows = [row("fp32", "full", seed, 2.0 + seed, **speed) for seed in (0, 1)]
    rows += [row("bf16", "lora", 0, 2.1, **speed), row("bf16", "lora", 1, 3.2, **speed)]
    rows += [row("bf16", "dora", 5, 9.0, **speed)]  # the reference was not measured with this seed
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(rows) + "\n")
    found = precision.report(file)
    assert "| fp32 | full | 2 | 4 | 2.5000 | +0.0000 | 0.0000 | 1.50 | 1,234 |" in found
    assert "| bf16 | lora | 2 | 4 | 2.6500 | +0.1500 | 0.1000 | 1.50 | 1,234 |" in found
    assert "bf16 dora" in found.partition("Not measured: ")[2]


def test_a_job_with_its_own_model_and_data_is_given_neither(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda argv, **_: started.append(argv))
    jobs.start(precision.start(ASKED), ASKED.hardware, tmp_path, [0])
    jobs.start(jobs.Job("other", 1, [], "sft"), ASKED.hardware, tmp_path, [0])
    own, other = started
    assert "save_model=true" in own
    assert not [word for word in own if word.startswith(("data=", "model.init="))]
    assert {
        "save_model=false",
        "data=jsonl",
        "model.init=random",
        f"data.path={Path(tmp_path) / 'sft.jsonl'}",
    } <= set(other)
