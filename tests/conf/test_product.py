"""Check and plan every combination of hardware, method, model, precision and topology.

The expected results are written by hand, from the hardware's documentation rather than
from conf/ or launch/rules/check.py.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path

import pytest

from launch.plan.planning import make_plan
from launch.rules.check import refusals
from launch.schema.trainer_args import complete
from tests.conftest import composed, host_with

METHODS = ["sft", "dpo", "grpo", "evaluate"]
MODELS = ["tiny", "llama3_1_70b"]  # random weights, and a model larger than most GPUs
PRECISIONS = ["fp32", "fp16", "bf16", "fp8", "nf4"]
TOPOLOGIES = ["single", "ddp", "fsdp", "zero2", "zero3", "split", "colocate"]
# Precisions that each GPU has; devices of a usual node; whether a released vLLM serves it.
HARDWARE = {
    "cpu": ({"fp32", "bf16", "nf4"}, 1, False),
    "mi50": ({"fp32", "fp16"}, 1, False),
    "mi50_16gb": ({"fp32", "fp16"}, 1, False),
    "mi60": ({"fp32", "fp16"}, 1, False),
    "mi100": ({"fp32", "fp16", "bf16", "nf4"}, 4, True),
    "mi210": ({"fp32", "fp16", "bf16", "nf4"}, 8, True),
    "mi250x": ({"fp32", "fp16", "bf16", "nf4"}, 8, True),
    "mi300a": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 4, True),
    "mi300x": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
    "mi308x": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
    "mi325x": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
    "mi350x": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
    "mi355x": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
    "rx7900xtx": ({"fp32", "fp16", "bf16", "nf4"}, 1, True),
    "rx7900xt": ({"fp32", "fp16", "bf16", "nf4"}, 1, True),
    "w7900": ({"fp32", "fp16", "bf16", "nf4"}, 1, True),
    "rx7800xt": ({"fp32", "fp16", "bf16", "nf4"}, 1, True),
    "rx6800xt": ({"fp32", "fp16"}, 1, False),
    "rx6900xt": ({"fp32", "fp16"}, 1, False),
    "rx9060xt": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 1, True),
    "rx9070xt": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 1, True),
    "r9700": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 1, True),
    "strix_halo": ({"fp32", "fp16", "bf16", "nf4"}, 1, True),
    "radeon_890m": ({"fp32", "fp16", "bf16", "nf4"}, 1, True),
    "h100": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
    "h200": ({"fp32", "fp16", "bf16", "fp8", "nf4"}, 8, True),
}
COMBINATIONS = list(itertools.product(HARDWARE, METHODS, MODELS, PRECISIONS, TOPOLOGIES))


def expected(hardware: str, method: str, precision: str, topology: str) -> set[str]:
    """Return the reasons to reject a combination with adapter=none."""
    has, gpus, vllm = HARDWARE[hardware]
    reasons = {
        "precision": precision not in has,
        "nf4_without_adapter": precision == "nf4"
        and "nf4" in has
        and method != "evaluate",  # 4-bit weights have no gradients
        "topology_of_nf4": method != "evaluate"
        and precision == "nf4"
        and topology in ("fsdp", "zero3", "colocate"),
        "fp8_eager": (method, precision) == ("grpo", "fp8")
        and "fp8" in has
        and topology not in ("split", "colocate"),  # transformers generates
        "topology_of_fp8": method != "evaluate" and (precision, topology) == ("fp8", "zero3"),
        "topology_of_method": topology not in ("single", "ddp")
        if method == "evaluate"
        else topology in ("split", "colocate") and method in ("sft", "dpo"),
        "vllm": topology in ("split", "colocate") and method == "grpo" and not vllm,
    }
    return {name for name, holds in reasons.items() if holds}


def parts():
    """Compose one option of every group, once."""
    group = {
        "hardware": list(HARDWARE),
        "method": METHODS,
        "model": MODELS,
        "precision": PRECISIONS,
        "topology": TOPOLOGIES,
    }
    return {
        name: {
            o: getattr(composed("hardware=cpu", *_no_pair(name), f"{name}={o}"), name)
            for o in options
        }
        for name, options in group.items()
    }


def _no_pair(group: str) -> list[str]:
    """Return overrides that leave out conf/model_method/tiny_*.yaml."""
    return ["model=qwen3_0_6b"] if group == "method" else []


@pytest.fixture(scope="module")
def outcomes():
    """Map combinations to the rules that reject them, and plan every allowed one."""
    options, base = parts(), composed("hardware=cpu", "name=product")
    options["topology"]["split"].overlap = None  # it depends on the hardware's number of GPUs
    hosts = {gfx: host_with(8, gfx) for gfx in ("gfx942", "sm_90")}
    reasons_of = {}
    for combination in COMBINATIONS:
        chosen = dict(
            zip(("hardware", "method", "model", "precision", "topology"), combination, strict=True)
        )
        config = dataclasses.replace(
            base, **{group: options[group][option] for group, option in chosen.items()}
        )
        reasons_of[combination] = {rule.name for rule in refusals(config)}
        if not reasons_of[combination]:
            before = copy.copy(config)
            plan = make_plan(config, hosts["gfx942"], Path("/runs/product/1"))
            assert config == before
            _check_plan(plan, combination)
    return reasons_of


def _check_plan(plan, combination):
    hardware, method, model, _, topology = combination
    # vLLM reads a model from a directory, so random weights are written before it starts.
    prepared = model == "tiny" and topology in ("split", "colocate")
    gpus = [gpu for process in plan.processes for gpu in process.gpus if process.kind != "prepare"]
    expected_gpus = (
        0
        if hardware == "cpu"
        else 1
        if topology in ("single", "colocate")
        else HARDWARE[hardware][1]
    )
    # Server and trainer share a single GPU.
    shared = int(topology == "split" and expected_gpus == 1)
    assert len(gpus) - shared == len(set(gpus)) == expected_gpus
    assert len(plan.memory) == max(1, expected_gpus) + (topology == "split" and expected_gpus < 2)
    assert all(entry.total_gb > 0 for entry in plan.memory)
    before = ["prepare"] * prepared + ["server"] * (topology == "split")
    assert [p.kind for p in plan.processes] == [
        *before,
        "evaluator" if method == "evaluate" else "trainer",
    ]
    assert all(isinstance(word, str) for process in plan.processes for word in process.argv)


def test_rules_reject_exactly_what_the_table_rejects(outcomes):
    wrong = {
        c: (reasons, expected(c[0], c[1], c[3], c[4]))
        for c, reasons in outcomes.items()
        if reasons != expected(c[0], c[1], c[3], c[4])
    }
    assert wrong == {}


@pytest.mark.parametrize(("phase", "batch", "length", "step_s", "memory_gb"), [
    ("baseline", (2, 4), 512, 6.0, 12.0),
    ("phase1", (4, 2), 400, 4.0, 15.0),
    ("phase2", (4, 2), 400, 2.5, 18.0),
    ("phase3", (8, 1), 400, 2.0, 28.0),
])  # fmt: skip
def test_phases_have_the_values_of_the_mi50_guide(phase, batch, length, step_s, memory_gb):
    config = composed(f"experiment=mi50_{phase}")
    args = complete(config, Path("/runs/1"), (8000, 8001))
    sizes = (args["per_device_train_batch_size"], args["gradient_accumulation_steps"])
    assert (sizes, args["max_length"]) == (batch, length)
    assert (args["lr_scheduler_type"], args["warmup_steps"]) == ("linear", 100)
    targets = {name: target.value for name, target in config.targets.items()}
    assert targets == {"step_s": step_s, "memory_peak_gb": memory_gb}
