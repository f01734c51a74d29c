"""Compare the predicted speed with measured runs, and test its parts."""

from __future__ import annotations

import json

import pytest

from launch.estimate import speed
from launch.schema import Config
from tests.conftest import ROOT, composed
from tests.gpu import predictions, published
from tests.gpu.speed_report import replaced

ROWS = [json.loads(line) for line in predictions.MEASURED.read_text().splitlines()]
SMALL = "hardware=h200 model=qwen3_0_6b method=sft topology=single precision=bf16"


def config_of(*overrides: str) -> Config:
    return composed(*" ".join(overrides).split())


def parts_of(*overrides: str, peak: float = 1e15) -> dict[str, float]:
    config = config_of(*overrides)
    return speed.step_parts(config, speed.batch(config), peak)


def step_s(*overrides: str) -> float:
    return speed.estimate_speed(config_of(*overrides)).step_s


@pytest.mark.parametrize(
    "row", [r for r in ROWS if "step_s" in r and not r["held_out"]], ids=lambda row: row["name"]
)
def test_measured_steps_are_predicted(row):
    """Errors are at most 10% for the runs behind the shares, or 20% (docs/results/speed.md)."""
    is_rough = "grpo" in row["name"] or row["name"] in (
        "qwen3_0_6b-sft-bf16-ddp-4",
        "dpo-1.7b-fsdp-2",
    )
    predicted = predictions.planned_row(row)[1].step_s
    assert predicted == pytest.approx(row["step_s"], rel=0.20 if is_rough else 0.10)


@pytest.mark.parametrize("name", ["memory", "speed"])
@pytest.mark.parametrize("module", [predictions, published])
def test_pages_contain_the_reports(name, module):
    """`python tests/gpu/predictions.py report` and `python tests/gpu/published.py` update them."""
    page = (ROOT / f"docs/results/{name}.md").read_text()
    section = module.__name__.rpartition(".")[2]
    assert replaced(page, section, getattr(module, f"{name}_report")()) == page


@pytest.mark.parametrize("offload", [
    "topology=fsdp topology.fsdp.cpu_offload=true",
    "topology=zero2 topology.zero.offload_optimizer=true",
])  # fmt: skip
def test_speed_with_offload_is_not_predicted(offload):
    base = "hardware=mi300x model=qwen3_4b method=sft price_per_gpu_hour=2"
    assert speed.estimate_speed(config_of(base, offload.split()[0])).cost is not None
    predicted = speed.estimate_speed(config_of(base, offload))
    assert (predicted.tokens_per_second, predicted.step_s, predicted.cost) == (None, None, None)
    assert "offload" in predicted.basis


def test_hours_and_cost_of_a_run():
    """8000 rows, 4 per step, 3 epochs are 6000 steps. Two GPUs need half as many steps."""
    one = speed.estimate_speed(config_of(SMALL, "price_per_gpu_hour=2.5"))
    assert one.run_hours == pytest.approx(6000 * one.step_s / 3600)
    assert one.cost == pytest.approx(2.5 * one.run_hours)
    two_gpus = SMALL.replace("single", "ddp"), "topology.num_gpus=2 price_per_gpu_hour=2.5"
    two = speed.estimate_speed(config_of(*two_gpus))
    assert two.run_hours == pytest.approx(3000 * two.step_s / 3600)
    assert two.cost == pytest.approx(5 * two.run_hours)


GRPO_EPOCH = "method=grpo method.args.max_steps=-1 method.args.num_train_epochs=1 data.num_train=16"


@pytest.mark.parametrize(("overrides", "steps"), [
    ("method.args.max_steps=7", 7),
    ("data.limit=10 method.args.num_train_epochs=1", 3),
    ("data.limit=10 data.num_train=4 method.args.num_train_epochs=1", 1),
    ("data=jsonl data.path=/x.jsonl", None),
    ("method.args.packing=true", None),
    (f"{GRPO_EPOCH} method.args.num_iterations=2", 32),
])  # fmt: skip
def test_steps_of_a_run(overrides, steps):
    config = config_of(SMALL, overrides)
    assert speed.num_steps(config, speed.batch(config)) == steps


@pytest.mark.parametrize(("overrides", "passes"), [
    ("method.args.save_steps=3", 1 + 3),
    ("method.args.save_steps=3 method.args.eval_steps=1", 1 + 7),
    ("method.args.save_steps=0.5", 1 + 2),
    ("method=grpo method.args.save_steps=3", 3),  # not before the first step
])  # fmt: skip
def test_held_out_passes_take_time(overrides, passes):
    words = (SMALL, "method.args.max_steps=7 data.num_heldout=100", overrides)
    metric = "eval_reward" if "grpo" in overrides else "eval_loss"
    plain, selected = (
        speed.estimate_speed(config_of(*words, more))
        for more in ("topology.overlap=false", f"method.selection.metric={metric}")
    )
    assert (plain.passes, selected.passes) == (0, passes)
    extra_hours = selected.run_hours - plain.run_hours
    assert extra_hours * 3600 == pytest.approx(passes * selected.pass_s)
    many = config_of(*words, f"method.selection.metric={metric} data.num_heldout=1000")
    assert speed.estimate_speed(many).pass_s > 5 * selected.pass_s


def test_fp8_does_not_change_the_time_of_attention():
    base = "hardware=mi350x model=qwen3_8b method=sft topology=single"
    bf16 = parts_of(base, "precision=bf16", peak=2300e12)
    fp8 = parts_of(base, "precision=fp8", peak=4614e12)
    assert fp8["attention"] == pytest.approx(bf16["attention"])
    # The speedup is less than that of the peak, because the head is in bf16 and clocks are lower.
    assert 2300 / 4614 < fp8["matrix products"] / bf16["matrix products"] < 1


def test_fewer_gpus_of_a_board_use_fewer_xgmi_links():
    base = "hardware=mi300x model=qwen3_8b method=sft precision=bf16 topology=ddp"
    # The links are too slow to overlap with a micro-step.
    base += " hardware.link_gb_s=1"
    two, eight = (parts_of(base, f"topology.num_gpus={n}")["communication"] for n in (2, 8))
    assert two == pytest.approx(eight * (1 / 2) / (7 / 8) * 7, rel=0.01)


@pytest.mark.parametrize(("overrides", "forwards"), [
    ("method=sft", 0),
    ("method=dpo adapter=lora", 1),  # without the adapter
    ("method=dpo method.args.precompute_ref_log_probs=true", 0),
    ("method=grpo method.args.beta=0.1", 1),
    # TRL gets the probabilities from the training forward
    ("method=grpo topology=colocate", 0),
    ("method=grpo topology=colocate method.args.steps_per_generation=3", 1),
    ("method=grpo method.args.num_iterations=2", 0.5),
])  # fmt: skip
def test_forwards_without_gradients(overrides, forwards):
    config = config_of("hardware=h200 model=qwen3_0_6b topology=single", overrides)
    assert speed.extra_forwards(config) == forwards


@pytest.mark.parametrize(("layout", "mean"), [("packed", 256), ("grouped", 256), ("padded", 512)])
def test_prepared_rows_replace_rows_of_maximum_length(layout, mean):
    """Padded rows compute their padding, here half of the tokens. max_length is 1024."""
    config = config_of(SMALL, f"speed=off step.rows={layout}")
    rows = {"rows": 6000, "tokens": 6000 * 256, "max_length": 1024, "efficiency": 0.5}
    longest, known = speed.estimate_speed(config), speed.estimate_speed(config, rows)
    short = config_of(SMALL, f"speed=off step.rows={layout} method.args.max_length={mean}")
    assert known.step_s == speed.estimate_speed(short).step_s < longest.step_s
    assert known.tokens_per_second * known.step_s == pytest.approx(4 * 256)
    assert (longest.steps, known.steps) == (8000 // 4 * 3, 6000 // 4 * 3)
    assert (longest.is_upper_bound, known.is_upper_bound) == (True, False)


def test_generated_answers_remain_upper_bounds():
    """For GRPO, the statistics are those of prompts."""
    config = config_of("hardware=mi300x model=qwen3_4b method=grpo topology=single")
    rows = {"rows": 100, "length": {"mean": 100.0}, "max_length": None, "efficiency": None}
    known = speed.estimate_speed(config, rows)
    assert known.is_upper_bound
    assert known.step_s < speed.estimate_speed(config).step_s


def test_packed_rows_are_counted_after_packing():
    config = config_of(SMALL, "method.args.packing=true")
    rows = {"rows": 6000, "packing": True, "packed_rows": 400, "efficiency": 0.98}
    known = speed.estimate_speed(config, rows)
    assert (speed.estimate_speed(config).steps, known.steps) == (None, 300)
    assert known.tokens_per_second * known.step_s == pytest.approx(4 * 1024 * 0.98)
