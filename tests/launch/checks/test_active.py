"""Test the doctor's active tests: thresholds, and how their processes are started."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from launch.checks import active as active_checks
from launch.checks import measuring, table
from launch.checks.facts import Facts, gather
from launch.checks.finding import Finding, Status
from launch.checks.measured import Measured, Outcome
from launch.config.compose import groups
from launch.machine import detect
from launch.machine.gpu import Gpu
from launch.schema.enums import Vendor
from recipes.measure import health
from tests.conftest import composed

# What a healthy GPU of each kind measures.
RATES = {
    "h200": {
        "gemm_tflops": 788.0,
        "copy_gb_s": 4300.0,
        "multiply_gb_s": 4100.0,
        "all_reduce_gb_s": 330.0,
    },
    "mi300x": {
        "gemm_tflops": 620.0,
        "copy_gb_s": 2600.0,
        "multiply_gb_s": 4100.0,
        "all_reduce_gb_s": 310.0,
    },
    "mi50": {"gemm_tflops": 20.0, "copy_gb_s": 700.0, "multiply_gb_s": 800.0},
}
DTYPE = {"h200": "bf16", "mi300x": "bf16", "mi50": "fp16"}


def one(hardware: str, rank: int, num_gpus: int) -> Measured:
    fields = dict.fromkeys((field.name for field in dataclasses.fields(Measured)), None)
    fields |= {
        "rank": rank,
        "phase": "done",
        "product": hardware,
        "torch": "2.11.0",
        "num_gpus": num_gpus,
        "dtype": DTYPE[hardware],
    }
    fields |= {
        "gemm_error": 0.008,
        "fp32_output_tflops": 500.0,
        "fp32_output_error": 1e-5,
        "all_reduce_wrong": 0,
        **RATES[hardware],
    }
    fields |= (
        {"clocks_mhz": [2100, 2080, 2095, 2100, 2060, 2100, 2090, 2010]}
        if hardware == "mi300x"
        else {}
    )
    if num_gpus == 1:
        fields |= {"all_reduce_wrong": None, "all_reduce_gb_s": None}
    return Measured(**fields)


def facts(hardware: str, count: int, /, bad: int = 0, **worse: object) -> Facts:
    """Of a node whose GPU `bad` measured this instead."""
    measured = [one(hardware, rank, count) for rank in range(count)]
    measured[bad] = dataclasses.replace(measured[bad], **worse)
    found = gather(detect.Host("python", 8), composed(f"hardware={hardware}").hardware)
    return dataclasses.replace(found, active=Outcome(tuple(range(count)), tuple(measured), 17.6))


def checked(found: Facts) -> dict[str, Finding]:
    return {
        check.name: finding
        for check, finding in table.run(found).items()
        if check.subject == table.ACTIVE
    }


@pytest.mark.parametrize(
    ("hardware", "num_gpus"), [("h200", 1), ("h200", 4), ("mi300x", 8), ("mi50", 1)]
)
def test_a_healthy_node(hardware, num_gpus):
    found = checked(facts(hardware, num_gpus))
    assert {
        name: finding.status for name, finding in found.items() if finding.status != Status.passed
    } == {}
    assert ("xcd_clocks" in found) == (hardware == "mi300x")
    assert ("all_reduce" in found) == (num_gpus > 1)
    assert found["active_tests"].read == f"{num_gpus} GPU(s) in 18 s"
    assert all(finding.source and finding.threshold for finding in found.values())


def test_what_is_read_and_expected():
    found = checked(facts("mi300x", 8))
    assert found["gemm_rate"].read == "620 TFLOPS in bf16, from 47% of the peak"
    assert found["gemm_rate"].threshold == "522 or more, fails below 369 (47% of 1307.4 is healthy)"
    assert (
        found["gemm_rate"].source
        == "conf/hardware: healthy.gemm and peak_tflops.bf16 of mi300x; launch/checks/active.py"
    )
    assert found["copy_rate"].read == "4100 GB/s read and written, from 77% of the peak"
    assert (
        found["all_reduce_rate"].threshold
        == "259 GB/s or more, fails below 183 (68% of 448 is healthy)"
    )
    assert (
        checked(facts("mi50", 1))["gemm_rate"].threshold
        == "7 or more (no published rate; 25% of 26.5 is little)"
    )


@pytest.mark.parametrize(
    ("hardware", "check", "worse", "status", "read"),
    [
        ("h200", "gemm_rate", {"gemm_tflops": 600.0}, Status.warn, "GPU 1: 600 TFLOPS in bf16"),
        ("h200", "gemm_rate", {"gemm_tflops": 400.0}, Status.fail, "GPU 1: 400 TFLOPS in bf16"),
        (
            "h200",
            "gemm_rate",
            {"gemm_tflops": 690.0},
            Status.warn,
            "GPU 1: 690, the node's median is 788 TFLOPS in bf16",
        ),
        ("mi300x", "gemm_rate", {"gemm_tflops": 500.0}, Status.warn, "GPU 1: 500 TFLOPS in bf16"),
        ("mi300x", "gemm_rate", {"gemm_tflops": 300.0}, Status.fail, "GPU 1: 300 TFLOPS in bf16"),
        (
            "h200",
            "copy_rate",
            {"copy_gb_s": 2000.0, "multiply_gb_s": 3000.0},
            Status.warn,
            "GPU 1: 3000 GB/s read and written",
        ),
        (
            "h200",
            "copy_rate",
            {"copy_gb_s": 2000.0, "multiply_gb_s": 2500.0},
            Status.fail,
            "GPU 1: 2500 GB/s read and written",
        ),
        ("h200", "gemm", {"gemm_error": None}, Status.fail, "GPU 1: not finite"),
        ("h200", "gemm", {"gemm_error": 0.3}, Status.fail, "GPU 1: 0.3 standard deviations off"),
        (
            "h200",
            "gemm_fp32_output",
            {"fp32_output_error": 0.008},
            Status.fail,
            "GPU 1: 0.008 standard deviations off",
        ),
        ("h200", "gemm_fp32_output", {"fp32_output_error": None}, Status.fail, "GPU 1: not finite"),
        (
            "h200",
            "gemm_fp32_output",
            {"fp32_output_refused": "no"},
            Status.fail,
            "torch 2.11.0: no",
        ),
        (
            "h200",
            "gemm_fp32_output",
            {"fp32_output_refused": "no", "torch": "2.7.1+rocm6.3"},
            Status.passed,
            "torch 2.7.1+rocm6.3 has none",
        ),
        ("mi300x", "xcd_clocks", {"clocks_mhz": [2100, 1800]}, Status.warn, "GPU 1: 2100 1800 MHz"),
        ("mi300x", "xcd_clocks", {"clocks_mhz": [2100, 132]}, Status.fail, "GPU 1: 2100 132 MHz"),
        ("h200", "all_reduce", {"all_reduce_wrong": 7}, Status.fail, "GPU 1: 7 wrong"),
        (
            "h200",
            "all_reduce_rate",
            {"all_reduce_gb_s": 200.0},
            Status.warn,
            "200 GB/s bus bandwidth among 4",
        ),
        (
            "h200",
            "all_reduce_rate",
            {"all_reduce_gb_s": 40.0},
            Status.fail,
            "40 GB/s bus bandwidth among 4",
        ),
        ("h200", "torch_gpus", {"num_gpus": 3}, Status.fail, "torch 2.11.0 sees 3 or 4"),
        (
            "h200",
            "active_tests",
            {"not_measured": "it is in use"},
            Status.unknown,
            "GPU 1: it is in use",
        ),
    ],
)
def test_a_gpu_that_is_worse(hardware, check, worse, status, read):
    found = checked(
        facts(
            hardware,
            4,
            bad=1,
            **{"all_reduce_gb_s": 150.0, **worse} if hardware == "mi300x" else worse,
        )
    )
    assert found[check].status == status
    assert found[check].read.startswith(read)
    assert bool(found[check].cure) == (status != Status.passed)
    others = {
        name for name, finding in found.items() if finding.status in (Status.warn, Status.fail)
    } - {check}
    assert others == set()


def test_a_rate_is_of_the_gpu_that_has_it():
    """The same figure is healthy on one kind and broken on another."""
    assert checked(facts("mi300x", 8, gemm_tflops=600.0))["gemm_rate"].status == Status.passed
    assert checked(facts("h200", 8, gemm_tflops=440.0))["gemm_rate"].status == Status.fail


def test_what_leaves_a_bad_gpu_out():
    assert checked(facts("h200", 4, bad=1, gemm_tflops=400.0))["gemm_rate"].cure.endswith(
        "export CUDA_VISIBLE_DEVICES=0,2,3"
    )
    assert checked(facts("mi300x", 8, bad=7, gemm_error=None))["gemm"].cure.endswith(
        "export HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6"
    )
    assert "export" not in checked(facts("h200", 1, gemm_tflops=400.0))["gemm_rate"].cure, (
        "there would be none left"
    )


@pytest.mark.parametrize(("num_gpus", "bus"), [(2, 43.5), (4, 130.6), (8, 304.6)])
def test_fewer_gpus_have_fewer_links_over_xgmi(num_gpus, bus):
    """68% of 448 GB/s by one, three and seven of seven links; all NVLinks serve any number."""
    threshold = checked(facts("mi300x", num_gpus))["all_reduce_rate"].threshold
    assert threshold.startswith(f"{0.85 * bus:.0f} GB/s or more, fails below {0.6 * bus:.0f} ")
    assert checked(facts("h200", num_gpus))["all_reduce_rate"].threshold.startswith(
        "264 GB/s or more, fails below 186 "
    )


def test_clocks_that_cannot_be_read():
    found = checked(
        facts("mi300x", 1, clocks_mhz=None, clocks_unknown="gpu_metrics v1.9 states no clock")
    )["xcd_clocks"]
    assert (found.status, found.read) == (Status.unknown, "gpu_metrics v1.9 states no clock")


def test_no_published_rate_is_not_a_failure():
    found = checked(facts("mi50", 1, gemm_tflops=3.0, copy_gb_s=100.0, multiply_gb_s=120.0))
    assert (found["gemm_rate"].status, found["copy_rate"].status) == (Status.warn, Status.warn)


def test_a_torch_for_cpus_beside_gpus():
    away = {
        "torch": "2.13.0+cpu",
        "num_gpus": 0,
        "not_measured": "torch 2.13.0+cpu sees 0 GPU(s)",
        "gemm_tflops": None,
        "copy_gb_s": None,
    }
    gone = {"multiply_gb_s": None, "fp32_output_tflops": None, "clocks_mhz": None}
    found = checked(facts("mi300x", 1, **away, **gone))
    assert set(found) == {"active_tests", "torch_gpus"}
    assert found["torch_gpus"].cure.startswith("make setup TORCH=rocm")
    assert found["active_tests"].cure == "see torch_gpus"


# One of each maker and target that differs in what it is given; each takes a second to compose.
@pytest.mark.parametrize("hardware", ["cpu", "h200", "mi50", "mi300x", "strix_halo"])
def test_processes(hardware, tmp_path):
    """Start as many as the mask leaves, in a known precision, in the environment of a run."""
    group = composed(f"hardware={hardware}").hardware
    environ = {"HIP_VISIBLE_DEVICES": "1,3", "CUDA_VISIBLE_DEVICES": "1,3"}
    gpus = (
        ()
        if group.vendor == Vendor.none
        else tuple(Gpu("test", group.gfx, None, None, hardware) for _ in range(4))
    )
    found = gather(detect.Host("python3", 8, gpus=gpus, environ=environ), group)
    config, visible = measuring._composed(found)
    process = measuring._process(config, found, visible, force=True, folder=tmp_path)
    assert visible == (() if group.vendor == Vendor.none else (1, 3))
    assert process.argv[:8] == [
        "python3",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    assert process.argv[-1] == "--force"
    assert measuring.dtype(config) in group.peak_tflops
    assert measuring.dtype(config) == {"cpu": "fp32", "mi50": "fp16"}.get(hardware, "bf16")
    assert process.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"
    if group.vendor == Vendor.amd:
        assert (process.env["HIP_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES" in process.env) == (
            "1,3",
            False,
        )


@pytest.mark.parametrize(
    ("free_gb", "force", "told"),
    [
        (135.0, False, None),
        (120.0, False, "it is in use: 21.0 of 141 GB are taken"),
        (120.0, True, None),
        (3.0, True, "memory is short: 3.0 of 141 GB are free, and 4 are needed"),
    ],
)
def test_a_gpu_that_is_left_alone(free_gb, force, told):
    assert health.unusable(free_gb, 141.0, force) == told


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


@pytest.mark.parametrize("hardware", [name for name in groups()["hardware"] if name != "auto"])
def test_shares_of_a_healthy_gpu(hardware):
    """Expect no share of a figure that is missing, and none beyond it but by NVLink SHARP."""
    group = composed(f"hardware={hardware}").hardware
    healthy = group.healthy
    assert all(
        share is None or 0.4 <= share <= 1
        for share in (healthy.gemm, healthy.copy, healthy.all_reduce)
    )
    assert healthy.gemm is None or {"bf16", "fp16"} & set(group.peak_tflops)
    assert healthy.all_reduce is None or group.gpus_per_node > 1


def test_the_doctor_reads_what_the_program_writes():
    assert [field.name for field in dataclasses.fields(Measured)] == [
        field.name for field in dataclasses.fields(health.Measurement)
    ]
