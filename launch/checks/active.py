"""Compare the results of doctor.py active=true with `healthy` in the GPU's conf/hardware file."""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping

from launch.checks import driver
from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, fail_or_warn, passed, unknown, warn
from launch.checks.measured import Measured, Outcome
from launch.machine.placement import MASK
from launch.schema.enums import Link, Vendor

# Shares of a healthy GPU's rate. Rates of one product vary by 8% on average and 22% at most;
# outliers are 1.5 times slower than the median (arXiv:2208.11035, 18,800 hours on five clusters).
# A GPU slower than that is broken or shared.
WARN, FAIL = 0.85, 0.60
# Share of the node's median; our choice, because training waits for the slowest GPU. Measured H200s
# differed by less than 4%.
MEDIAN_SHARE = 0.90
# Shares of the peak, for GPUs without a published healthy rate. Our choice, below the lowest
# published shares: 0.42 (GEMM) and 0.55 (copy), both on AMD.
MIN_GEMM, MIN_COPY = 0.25, 0.40
# Largest allowed errors, in standard deviations of an entry. The largest entries are about five
# deviations, so bf16 rounds them by up to 5 * 2^-9 = 0.01. Errors of fp32 output are below 1e-4.
GEMM_ERROR, FP32_ERROR = 0.05, 0.001
# How far a die's clock may be below the fastest one, as a share. AMD's workload guide: 3 to 10% is
# normal. 50% is our choice.
XCD_WARN, XCD_FAIL = 0.10, 0.50
SEVERAL_DIES = ("gfx942", "gfx950")  # targets whose GPUs have several XCDs
# TRL requests fp32 output from this torch version on (trl.kernels.chunked_logprob).
OUT_DTYPE_SINCE = (2, 8)
PROGRAM = "recipes/measure/health.py"
COMPARE = "compare with another machine of the same kind"


def _outcome(facts: Facts) -> Outcome:
    assert facts.active is not None
    return facts.active


def _results_with(facts: Facts, field: str) -> list[Measured]:
    """Return the results of the processes that measured `field`."""
    return [result for result in _outcome(facts).measured if getattr(result, field) is not None]


def _label_by_gpu(facts: Facts, values: Mapping[int, object]) -> str:
    """List a value per rank, each with the index of the rank's GPU."""
    gpus = _outcome(facts).gpus
    names = {rank: f"GPU {gpus[rank]}" if gpus else f"process {rank}" for rank in values}
    return ", ".join(f"{names[rank]}: {value}" for rank, value in values.items())


def _exclusion(facts: Facts, ranks: Container[int]) -> str:
    """Return the remedy for bad ranks: train without their GPUs if others are left."""
    others = [str(gpu) for rank, gpu in enumerate(_outcome(facts).gpus) if rank not in ranks]
    if facts.hardware is None or not others:
        return "see the temperature, power_cap and ras checks, then repeat on an idle machine"
    mask = f"{MASK[facts.hardware.vendor]}={','.join(others)}"
    return f"see the temperature, power_cap and ras checks. To exclude the GPUs: export {mask}"


def active_tests(facts: Facts) -> Finding:
    outcome = _outcome(facts)
    if outcome.not_run:
        return unknown(*outcome.not_run)
    if outcome.failed:
        return fail(*outcome.failed)
    if skipped := _results_with(facts, "not_measured"):
        remedy = (
            "free the GPU and repeat the test, or test it while it is in use: python "
            "launch/doctor.py active=force"
        )
        if any(result.num_gpus < len(outcome.gpus) for result in skipped):
            remedy = "see the torch_gpus check"
        return unknown(
            _label_by_gpu(facts, {result.rank: result.not_measured for result in skipped}), remedy
        )
    count = len(outcome.gpus)
    devices = f"{count} GPU(s)" if count else f"{len(outcome.measured)} processes on the CPU"
    return passed(f"{devices} in {outcome.seconds:.0f} s")


def torch_gpus(facts: Facts) -> Finding:
    outcome = _outcome(facts)
    count, version = len(outcome.gpus), outcome.measured[0].torch
    counts = sorted({result.num_gpus for result in outcome.measured})
    reading = f"torch {version} sees {' or '.join(map(str, counts))}"
    remedy = (
        "see the kfd, render_nodes, amdgpu_driver and visibility_masks checks; or "
        "install a torch that is built for these GPUs"
    )
    if "+cpu" in version and facts.hardware:
        torch = "rocm" if facts.hardware.vendor == Vendor.amd else "cuda"
        remedy = f"make setup TORCH={torch}, because this torch is built for CPUs"
    finding = passed(reading) if counts == [count] else fail(reading, remedy)
    return finding.expecting(f"torch sees {count} GPU(s)")


def gemm(facts: Facts) -> Finding | None:
    measured = _results_with(facts, "gemm_tflops")
    if not measured:
        return None
    errors = {result.rank: result.gemm_error for result in measured}
    summary = f"correct in {measured[0].dtype}"
    return _judge_errors(facts, errors, GEMM_ERROR, summary, "wrong results: ")


def _judge_errors(
    facts: Facts, errors: dict[int, float | None], limit: float, summary: str, remedy: str
) -> Finding:
    """Fail for errors above the limit, in standard deviations. None means not finite."""
    bad = {rank: error for rank, error in errors.items() if error is None or error > limit}
    if bad:
        words = {
            rank: "not finite" if error is None else f"{error:.2g} standard deviations off"
            for rank, error in bad.items()
        }
        return fail(_label_by_gpu(facts, words), remedy + _exclusion(facts, bad))
    worst = max(error or 0 for error in errors.values())
    return passed(f"{summary}, at most {worst:.2g} standard deviations off")


def gemm_rate(facts: Facts) -> Finding | None:
    dtype = _outcome(facts).measured[0].dtype
    peak = facts.hardware.peak_tflops.get(dtype) if facts.hardware else None
    rates = {result.rank: result.gemm_tflops for result in _outcome(facts).measured}
    unit, peak_key = f"TFLOPS in {dtype}", f"peak_tflops.{dtype}"
    return _judge_rate(facts, "gemm", rates, peak, unit, peak_key, MIN_GEMM)


def copy_rate(facts: Facts) -> Finding | None:
    """Judge the faster of a copy and a multiplication, because torch's copy kernel may be slow."""
    peak = facts.hardware.bandwidth_gb_s if facts.hardware else None
    rates = {
        result.rank: max(filter(None, (result.copy_gb_s, result.multiply_gb_s)), default=None)
        for result in _outcome(facts).measured
    }
    unit = "GB/s read and written"
    return _judge_rate(facts, "copy", rates, peak, unit, "bandwidth_gb_s", MIN_COPY)


def _judge_rate(
    facts: Facts,
    kind: str,
    rates: dict[int, float | None],
    peak: float | None,
    unit: str,
    peak_key: str,
    min_share: float,
) -> Finding | None:
    """Compare each GPU with `healthy.<kind>` of its file, then with the node's median.

    If `healthy.<kind>` is empty, require the share `min_share` of the peak. Return None if no
    process measured a rate.
    """
    values = {rank: rate for rank, rate in rates.items() if rate is not None}
    if not values:
        return None
    reading = f"{_range(list(values.values()))} {unit}"
    if peak is None or facts.hardware is None or facts.hardware.vendor == Vendor.none:
        nominal = "conf/hardware: a CPU's peaks are nominal"
        return unknown(reading, COMPARE).expecting("no rate is known", nominal)
    slowest = min(values.values())
    reading += f", {'from ' if len(values) > 1 else ''}{slowest / peak:.0%} of the peak"
    share: float | None = getattr(facts.hardware.healthy, kind)
    if share:
        floor, broken = WARN * share * peak, FAIL * share * peak
        threshold = (
            f"{floor:.0f} or more, fails below {broken:.0f} ({share:.0%} of {peak:g} is healthy)"
        )
        keys = f"healthy.{kind} and {peak_key}"
    else:
        floor, broken = min_share * peak, 0.0
        threshold = f"{floor:.0f} or more ({min_share:.0%} of {peak:g}; no published rate)"
        keys = peak_key
    source = f"conf/hardware: {keys} of {facts.group}; launch/checks/active.py"
    shown = {rank: f"{rate:.4g}" for rank, rate in values.items()}
    if slow := {rank: shown[rank] for rank, rate in values.items() if rate < floor}:
        reading = f"{_label_by_gpu(facts, slow)} {unit}"
        finding = fail_or_warn(slowest < broken, reading, _exclusion(facts, slow))
        return finding.expecting(threshold, source)
    median = statistics.median(values.values())
    slow_rate = MEDIAN_SHARE * median
    if behind := {rank: shown[rank] for rank, rate in values.items() if rate < slow_rate}:
        reading = f"{_label_by_gpu(facts, behind)}, the node's median is {median:.4g} {unit}"
        finding = warn(reading, _exclusion(facts, behind))
        return finding.expecting(f"{MEDIAN_SHARE:.0%} of the node's median or more")
    return passed(reading).expecting(threshold, source)


def _range(values: list[float]) -> str:
    ends = (min(values), max(values))
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in ends)
    return low if low == high else f"{low} to {high}"


def fp32_output(facts: Facts) -> Finding | None:
    """Check the fp32 output of half-precision products, which TRL's chunked loss uses.

    ROCm's torch up to 2.9 raises an error for it (pytorch/pytorch#161540).
    """
    measured = [
        result
        for result in _outcome(facts).measured
        if result.fp32_output_refused or result.fp32_output_tflops is not None
    ]
    if not measured:
        return None
    if failed := next((result for result in measured if result.fp32_output_refused), None):
        if driver.version(failed.torch)[:2] < OUT_DTYPE_SINCE:
            return passed(f"torch {failed.torch} has no such products, so TRL multiplies in fp32")
        return fail(
            f"torch {failed.torch}: {failed.fp32_output_refused}",
            "use a newer torch, such as the one in our images (docs/containers.md), because "
            "TRL's losses fail in backward with this one",
        )
    errors = {result.rank: result.fp32_output_error for result in measured}
    rates = [result.fp32_output_tflops for result in measured if result.fp32_output_tflops]
    remedy = "use a newer torch. If only one GPU is affected: "
    return _judge_errors(facts, errors, FP32_ERROR, f"{_range(rates)} TFLOPS", remedy)


def xcd_clocks(facts: Facts) -> Finding | None:
    measured = _results_with(facts, "gemm_tflops")
    if facts.hardware is None or facts.hardware.gfx not in SEVERAL_DIES or not measured:
        return None
    clocks = {result.rank: result.clocks_mhz for result in measured if result.clocks_mhz}
    if not clocks:
        reading = measured[0].clocks_unknown or "the driver reported no clocks"
        return unknown(reading, "amd-smi metric --clock, during a run")
    spread = {rank: 1 - min(dies) / max(dies) for rank, dies in clocks.items()}
    widest = max(spread.values())
    slow = {
        rank: f"{' '.join(map(str, dies))} MHz"
        for rank, dies in clocks.items()
        if spread[rank] > XCD_WARN
    }
    if not slow:
        return passed(f"{len(clocks)} GPU(s), at most {widest:.1%}")
    return fail_or_warn(widest >= XCD_FAIL, _label_by_gpu(facts, slow), _exclusion(facts, slow))


def all_reduce(facts: Facts) -> Finding | None:
    measured = _results_with(facts, "all_reduce_wrong")
    if not measured:
        return None
    bad = {r.rank: f"{r.all_reduce_wrong} wrong elements" for r in measured if r.all_reduce_wrong}
    if bad:
        remedy = (
            "see the kernel_log, xgmi, iommu and acs checks; repeat with NCCL_P2P_DISABLE=1 "
            "to see whether copies between GPUs are faulty"
        )
        return fail(_label_by_gpu(facts, bad), remedy)
    return passed(f"correct on {len(measured)} ranks")


def all_reduce_rate(facts: Facts) -> Finding | None:
    rates = [result.all_reduce_gb_s or 0.0 for result in _results_with(facts, "all_reduce_gb_s")]
    if not rates:
        return None
    slowest, hardware = min(rates), facts.hardware
    reading = f"{slowest:.3g} GB/s bus bandwidth on {len(rates)} ranks"
    remedy = (
        "look at xgmi, pcie, iommu, acs and numa_balancing; compare with all_reduce_perf of "
        "rccl-tests"
    )
    share = hardware.healthy.all_reduce if hardware else None
    link = hardware.link_gb_s if hardware else None
    if hardware is None or share is None or link is None:
        on_cpu = hardware is not None and hardware.vendor == Vendor.none
        return unknown(reading, COMPARE if on_cpu else remedy).expecting("no rate is known")
    # Over xGMI each pair of GPUs has a link, so fewer GPUs use fewer links (ROCm/rccl#1270).
    # Behind a switch, any number of GPUs uses all links.
    others = hardware.gpus_per_node - 1
    used = min(len(rates) - 1, others) if hardware.link == Link.xgmi else others
    bus = share * link * used / others
    links = "" if used == others else f", {used} of {others} links"
    finding = passed(reading)
    if slowest < WARN * bus:
        finding = fail_or_warn(slowest < FAIL * bus, reading, remedy)
    return finding.expecting(
        f"{WARN * bus:.0f} GB/s or more, fails below {FAIL * bus:.0f} "
        f"({share:.0%} of {link:g} is healthy{links})"
    )
