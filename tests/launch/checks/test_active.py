"""Test the doctor's active tests: thresholds, and how their processes are started."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from launch.checks import active as active_checks
from launch.checks import check_table
from launch.checks.facts import Facts, gather
from launch.checks.finding import Finding, Status
from launch.checks.measured import Measured, Outcome
from launch.machine import detect
from recipes.measure import health
from tests.conftest import composed

KEYS = ("gemm_tflops", "copy_gb_s", "multiply_gb_s", "all_reduce_gb_s")
# Rates of healthy GPUs.
RATES = {
    "h200": dict(zip(KEYS, (788.0, 4300.0, 4100.0, 330.0), strict=True)),
    "mi300x": dict(zip(KEYS, (620.0, 2600.0, 4100.0, 310.0), strict=True)),
    "mi50": dict(zip(KEYS, (20.0, 700.0, 800.0, None), strict=True)),
}
DTYPE = {"h200": "bf16", "mi300x": "bf16", "mi50": "fp16"}
CLOCKS = [2100, 2080, 2095, 2100, 2060, 2100, 2090, 2010]


def healthy(hardware: str, rank: int, num_gpus: int) -> Measured:
    fields = dict.fromkeys((field.name for field in dataclasses.fields(Measured)), None)
    fields |= {"rank": rank, "phase": "done", "product": hardware, "torch": "2.11.0"}
    fields |= {"num_gpus": num_gpus, "dtype": DTYPE[hardware], "gemm_error": 0.008}
    fields |= {"fp32_output_tflops": 500.0, "fp32_output_error": 1e-5, "all_reduce_wrong": 0}
    fields |= RATES[hardware]
    fields["clocks_mhz"] = CLOCKS if hardware == "mi300x" else None
    if num_gpus == 1:
        fields |= {"all_reduce_wrong": None, "all_reduce_gb_s": None}
    return Measured(**fields)


def facts(hardware: str, count: int, /, bad: int = 0, **worse: object) -> Facts:
    """Return facts of a node on which GPU `bad` has the results `worse`."""
    measured = [healthy(hardware, rank, count) for rank in range(count)]
    measured[bad] = dataclasses.replace(measured[bad], **worse)
    known = gather(detect.Host("python", 8), composed(f"hardware={hardware}").hardware)
    return dataclasses.replace(known, active=Outcome(tuple(range(count)), tuple(measured), 17.6))


def checked(known: Facts) -> dict[str, Finding]:
    results = check_table.run(known).items()
    return {
        check.name: finding for check, finding in results if check.subject == check_table.ACTIVE
    }


@pytest.mark.parametrize(
    ("hardware", "num_gpus"), [("h200", 1), ("h200", 4), ("mi300x", 8), ("mi50", 1)]
)
def test_a_healthy_node_passes(hardware, num_gpus):
    findings = checked(facts(hardware, num_gpus))
    assert {finding.status for finding in findings.values()} == {Status.passed}
    assert ("xcd_clocks" in findings) == (hardware == "mi300x")
    assert ("all_reduce" in findings) == (num_gpus > 1)
    assert all(finding.source and finding.threshold for finding in findings.values())


SLOW_COPY = {"copy_gb_s": 2000.0, "multiply_gb_s": 2500.0}
OLD_TORCH = {"fp32_output_refused": "no", "torch": "2.7.1+rocm6.3"}


# fmt: off
@pytest.mark.parametrize(
    ("hardware", "check", "worse", "status", "read"),
    [
        ("h200", "gemm_rate", {"gemm_tflops": 600.0}, Status.warn, "GPU 1: 600 TFLOPS in bf16"),
        ("h200", "gemm_rate", {"gemm_tflops": 400.0}, Status.fail, "GPU 1: 400 TFLOPS in bf16"),
        ("h200", "gemm_rate", {"gemm_tflops": 690.0}, Status.warn, "GPU 1: 690, the node's median"),
        ("mi300x", "gemm_rate", {"gemm_tflops": 500.0}, Status.warn, "GPU 1: 500 TFLOPS in bf16"),
        ("mi300x", "gemm_rate", {"gemm_tflops": 300.0}, Status.fail, "GPU 1: 300 TFLOPS in bf16"),
        ("h200", "copy_rate", SLOW_COPY, Status.fail, "GPU 1: 2500 GB/s read and written"),
        ("h200", "gemm", {"gemm_error": None}, Status.fail, "GPU 1: not finite"),
        ("h200", "gemm", {"gemm_error": 0.3}, Status.fail, "GPU 1: 0.3 standard deviations off"),
        ("h200", "gemm_fp32_output", {"fp32_output_error": 0.008}, Status.fail, "GPU 1: 0.008"),
        ("h200", "gemm_fp32_output", {"fp32_output_refused": "no"}, Status.fail, "torch 2.11.0"),
        ("h200", "gemm_fp32_output", OLD_TORCH, Status.passed, "torch 2.7.1+rocm6.3 has no"),
        ("mi300x", "xcd_clocks", {"clocks_mhz": [2100, 1800]}, Status.warn, "GPU 1: 2100 1800 MHz"),
        ("mi300x", "xcd_clocks", {"clocks_mhz": [2100, 132]}, Status.fail, "GPU 1: 2100 132 MHz"),
        ("h200", "all_reduce", {"all_reduce_wrong": 7}, Status.fail, "GPU 1: 7 wrong elements"),
        ("h200", "all_reduce_rate", {"all_reduce_gb_s": 200.0}, Status.warn, "200 GB/s"),
        ("h200", "all_reduce_rate", {"all_reduce_gb_s": 40.0}, Status.fail, "40 GB/s"),
        ("h200", "torch_gpus", {"num_gpus": 3}, Status.fail, "torch 2.11.0 sees 3 or 4"),
        ("h200", "active_tests", {"not_measured": "in use"}, Status.unknown, "GPU 1: in use"),
    ],
)
# fmt: on
def test_a_worse_gpu_is_found(hardware, check, worse, status, read):
    if hardware == "mi300x":
        worse = {"all_reduce_gb_s": 150.0, **worse}
    findings = checked(facts(hardware, 4, bad=1, **worse))
    assert findings[check].status == status
    assert findings[check].read.startswith(read)
    assert bool(findings[check].cure) == (status != Status.passed)
    bad = {name for name, f in findings.items() if f.status in (Status.warn, Status.fail)}
    assert bad <= {check}


def test_the_remedy_leaves_out_the_bad_gpu():
    cure = checked(facts("h200", 4, bad=1, gemm_tflops=400.0))["gemm_rate"].cure
    assert cure.endswith("export CUDA_VISIBLE_DEVICES=0,2,3")
    cure = checked(facts("mi300x", 8, bad=7, gemm_error=None))["gemm"].cure
    assert cure.endswith("export HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6")
    assert "export" not in checked(facts("h200", 1, gemm_tflops=400.0))["gemm_rate"].cure


@pytest.mark.parametrize(("num_gpus", "bus"), [(2, 43.5), (4, 130.6), (8, 304.6)])
def test_fewer_gpus_have_fewer_links_over_xgmi(num_gpus, bus):
    """68% of 448 GB/s by one, three and seven of seven links; all NVLinks serve any number."""
    threshold = checked(facts("mi300x", num_gpus))["all_reduce_rate"].threshold
    assert threshold.startswith(f"{0.85 * bus:.0f} GB/s or more, fails below {0.6 * bus:.0f} ")
    assert checked(facts("h200", num_gpus))["all_reduce_rate"].threshold.startswith(
        "264 GB/s or more, fails below 186 "
    )


def test_a_torch_for_cpus_next_to_gpus():
    torch_cpu = {"torch": "2.13.0+cpu", "num_gpus": 0, "not_measured": "sees 0 GPU(s)"}
    unmeasured = (*KEYS[:3], "fp32_output_tflops", "clocks_mhz")
    findings = checked(facts("mi300x", 1, **torch_cpu, **dict.fromkeys(unmeasured)))
    assert set(findings) == {"active_tests", "torch_gpus"}
    assert findings["torch_gpus"].cure.startswith("make setup TORCH=rocm")
    assert findings["active_tests"].cure == "see the torch_gpus check"


@pytest.mark.parametrize(("free_gb", "force", "reason"), [
    (135.0, False, None),
    (120.0, False, "it is in use: 21.0 of 141 GB are taken"),
    (120.0, True, None),
    (3.0, True, "memory is short: 3.0 of 141 GB are free, but 4 GB are needed"),
])  # fmt: skip
def test_a_gpu_in_use_is_left_alone(free_gb, force, reason):
    assert health.unusable_reason(free_gb, 141.0, force) == reason


def test_wrong_products_are_noticed():
    """Let bf16's own rounding pass, but no infinite entry, nor one rounded on its way to fp32."""
    torch.manual_seed(0)
    a, b = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(2))
    rounded = health.error(a @ b, a, b)
    assert active_checks.FP32_ERROR < rounded < active_checks.GEMM_ERROR
    assert health.error(a.float() @ b.float(), a, b) < active_checks.FP32_ERROR / 10
    assert health.error((a @ b).roll(1, 0), a, b) > 1
    product = a @ b
    product[77, 13] = float("nan")
    assert health.error(product, a, b) is None
