"""What was measured of each GPU under load (doctor.py active=true), against a healthy one of its kind: conf/hardware, `healthy`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.checks.measured import Measured, Outcome
from launch.environment import MASK
from launch.schema import Hardware
from launch.schema.enums import Link, Vendor

# Of the rate of a healthy GPU. Equal GPUs differ by 8% on average and 22% at most, and the worst are 1.5 times slower than the median
# (arXiv:2208.11035, 18,800 hours on five clusters): a slower one than those is broken, or not alone.
WARN, FAIL = 0.85, 0.60
OF_MEDIAN = 0.90  # of the node's median; our choice: training waits for the slowest GPU, and H200s that were measured lie within 4%
# Where nobody says what a healthy one reaches. Our choice: the lowest known are 0.42 (a GEMM) and 0.55 (a copy), both an AMD GPU's.
LEAST_GEMM, LEAST_COPY = 0.25, 0.40
# Standard deviations. Rounding an entry to bf16 moves it by 0.01 (five of them, 2^-9 of that); fp32 output without it by 1e-4 at most.
GEMM_ERROR, FP32_ERROR = 0.05, 0.001
XCD_WARN, XCD_FAIL = 0.10, 0.50  # of the fastest die's clock. AMD's workload guide: 3 to 10% is normal; half of it is our choice
DIES = ("gfx942", "gfx950")  # several XCDs to a GPU
OUT_DTYPE_SINCE = (2, 8)  # the torch from which TRL asks for fp32 output (trl.kernels.chunked_logprob)
PROGRAM = "recipes/health/measure.py"
COMPARE = "compare with another machine of its kind"


def _outcome(facts: Facts) -> Outcome:
    assert facts.active is not None
    return facts.active


def _name(outcome: Outcome, found: Measured) -> str:
    return f"GPU {outcome.gpus[found.rank]}" if outcome.gpus else f"process {found.rank}"


def _named(facts: Facts, bad: list[Measured], what: Callable[[Measured], object]) -> str:
    return ", ".join(f"{_name(_outcome(facts), one)}: {what(one)}" for one in bad)


def _leave_out(facts: Facts, bad: list[Measured]) -> str:
    """What to do about GPUs that are bad while others are not."""
    outcome, out = _outcome(facts), {one.rank for one in bad}
    kept = [str(gpu) for rank, gpu in enumerate(outcome.gpus) if rank not in out]
    if facts.hardware is None or not kept:
        return "look at temperature, power_cap and ras; run it again with nothing else on the machine"
    return f"look at its temperature, power_cap and ras; to train without it: export {MASK[facts.hardware.vendor]}={','.join(kept)}"


def ran(facts: Facts) -> Finding:
    outcome, expected = _outcome(facts), Expected("every process does every test", f"{PROGRAM}, one process a GPU")
    if outcome.not_run:
        return expected.unknown(*outcome.not_run)
    if outcome.failed:
        return expected.fail(*outcome.failed)
    left = [found for found in outcome.measured if found.not_measured]
    if left:
        cure = "free it and run this again, or test beside what uses it: python launch/doctor.py active=force"
        unseen = any(found.num_gpus < len(outcome.gpus) for found in left)
        return expected.unknown(_named(facts, left, lambda found: found.not_measured), "see torch_gpus" if unseen else cure)
    what = f"{len(outcome.gpus)} GPU(s)" if outcome.gpus else f"{len(outcome.measured)} processes on the CPU"
    return expected.passed(f"{what} in {outcome.seconds:.0f} s")


def torch_gpus(facts: Facts) -> Finding:
    outcome = _outcome(facts)
    expected = Expected(f"torch sees {len(outcome.gpus)} GPU(s)", "the kernel's list, less what a mask leaves out")
    seen = sorted({found.num_gpus for found in outcome.measured})
    version = outcome.measured[0].torch
    read = f"torch {version} sees {' or '.join(map(str, seen))}"
    if seen == [len(outcome.gpus)]:
        return expected.passed(read)
    if "+cpu" in version and facts.hardware:
        return expected.fail(
            read, f"make setup TORCH={'rocm' if facts.hardware.vendor == Vendor.amd else 'cuda'}: this torch is built for CPUs"
        )
    return expected.fail(
        read, "look at the checks kfd, render_nodes, amdgpu_driver and visibility_masks; is this torch built for these GPUs?"
    )


def gemm(facts: Facts) -> Finding | None:
    measured = [found for found in _outcome(facts).measured if found.gemm_tflops is not None]
    if not measured:
        return None
    expected = Expected(
        f"finite, within {GEMM_ERROR:g} standard deviations of float64", "launch/checks/active.py: five times bf16's rounding"
    )
    bad = [found for found in measured if found.gemm_error is None or found.gemm_error > GEMM_ERROR]
    if bad:
        return expected.fail(_named(facts, bad, _error_of(lambda found: found.gemm_error)), f"wrong results: {_leave_out(facts, bad)}")
    return expected.passed(f"right in {measured[0].dtype}, at most {max(found.gemm_error or 0 for found in measured):.2g} off")


def _error_of(error: Callable[[Measured], float | None]) -> Callable[[Measured], str]:
    return lambda found: "not finite" if error(found) is None else f"{error(found):.2g} standard deviations off"


def gemm_rate(facts: Facts) -> Finding | None:
    hardware, dtype = facts.hardware, _outcome(facts).measured[0].dtype
    peak = hardware.peak_tflops.get(dtype) if hardware else None
    return _rate(facts, "gemm", lambda found: found.gemm_tflops, peak, f"TFLOPS in {dtype}", f"peak_tflops.{dtype}", LEAST_GEMM)


def copy_rate(facts: Facts) -> Finding | None:
    """By the faster way: torch's copy is a kernel on one stack and a copy engine's or a slower kernel's work on another."""
    bandwidth = facts.hardware.bandwidth_gb_s if facts.hardware else None
    return _rate(facts, "copy", _fastest_copy, bandwidth, "GB/s read and written", "bandwidth_gb_s", LEAST_COPY)


def _fastest_copy(found: Measured) -> float | None:
    return max((rate for rate in (found.copy_gb_s, found.multiply_gb_s) if rate is not None), default=None)


def _rate(
    facts: Facts, kind: str, rate: Callable[[Measured], float | None], peak: float | None, unit: str, figure: str, least: float
) -> Finding | None:
    """Each GPU against `healthy.<kind>` of its file (against `least` where that is empty), then against the node's median."""
    measured = [found for found in _outcome(facts).measured if rate(found) is not None]
    if not measured:
        return None
    values = {found.rank: rate(found) or 0.0 for found in measured}
    read = f"{_span(list(values.values()))} {unit}"
    if peak is None or facts.hardware is None or facts.hardware.vendor == Vendor.none:
        where = Expected("none is known", "conf/hardware: a CPU's figures are nominal")
        return where.unknown(read, COMPARE)
    read += (
        f", {min(values.values()) / peak:.0%} of the peak" if len(values) == 1 else f", from {min(values.values()) / peak:.0%} of the peak"
    )
    share: float | None = getattr(facts.hardware.healthy, kind)
    floors = (WARN * share * peak, FAIL * share * peak) if share else (least * peak, 0.0)
    basis = f"{share:.0%} of {peak:g} is healthy" if share else f"no published rate; {least:.0%} of {peak:g} is little"
    source = f"conf/hardware: {f'healthy.{kind} and ' if share else ''}{figure} of {facts.group}; launch/checks/active.py"
    expected = Expected(f"{floors[0]:.0f} or more{f', fails below {floors[1]:.0f}' if share else ''} ({basis})", source)
    slow = [found for found in measured if values[found.rank] < floors[0]]
    if slow:
        words = f"{_named(facts, slow, lambda found: f'{values[found.rank]:.4g}')} {unit}"
        cure = _leave_out(facts, slow)
        return expected.fail(words, cure) if min(values.values()) < floors[1] else expected.warn(words, cure)
    median = statistics.median(values.values())
    behind = [found for found in measured if values[found.rank] < OF_MEDIAN * median]
    if behind:
        words = f"{_named(facts, behind, lambda found: f'{values[found.rank]:.4g}')}, the node's median is {median:.4g} {unit}"
        return Expected(f"{OF_MEDIAN:.0%} of the node's median or more", "launch/checks/active.py").warn(words, _leave_out(facts, behind))
    return expected.passed(read)


def _span(values: list[float]) -> str:
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def fp32_output(facts: Facts) -> Finding | None:
    """TRL's chunked loss asks a half-precision product for fp32 output; ROCm's torch up to 2.9 refused (pytorch/pytorch#161540)."""
    asked = [found for found in _outcome(facts).measured if found.fp32_output_refused or found.fp32_output_tflops is not None]
    if not asked:
        return None
    dtype = asked[0].dtype
    expected = Expected(
        f"{dtype} products with fp32 output, not rounded to {dtype} on the way",
        "trl.kernels.chunked_logprob._addmm_fp32; sgl-project/sglang#34681, pytorch/pytorch#161540",
    )
    refused = [found for found in asked if found.fp32_output_refused]
    if refused and _version(refused[0].torch) < OUT_DTYPE_SINCE:
        return expected.passed(f"torch {refused[0].torch} has none, and TRL then multiplies in fp32")
    if refused:
        return expected.fail(
            f"torch {refused[0].torch}: {refused[0].fp32_output_refused}",
            "take a newer torch, such as that of our images (docs/containers.md); until then TRL's losses fail in backward",
        )
    bad = [found for found in asked if found.fp32_output_error is None or found.fp32_output_error > FP32_ERROR]
    if bad:
        read = _named(facts, bad, _error_of(lambda found: found.fp32_output_error))
        return expected.fail(read, f"a newer torch, or, where it is one GPU only: {_leave_out(facts, bad)}")
    rates = [found.fp32_output_tflops for found in asked if found.fp32_output_tflops is not None]
    return expected.passed(f"{_span(rates)} TFLOPS, at most {max(found.fp32_output_error or 0 for found in asked):.2g} off")


def _version(torch: str) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdigit())


def xcd_clocks(facts: Facts) -> Finding | None:
    measured = [found for found in _outcome(facts).measured if found.gemm_tflops is not None]
    if facts.hardware is None or facts.hardware.gfx not in DIES or not measured:
        return None
    expected = Expected(
        f"dies of one GPU within {XCD_WARN:.0%} of its fastest (fails from {XCD_FAIL:.0%})",
        "AMD's workload guide: 3 to 10% is normal; kernel: gpu_metrics of each GPU, under load",
    )
    known = [found for found in measured if found.clocks_mhz]
    if not known:
        return expected.unknown(f"{measured[0].clocks_unknown or 'not stated'}", "amd-smi metric --clock, while a load runs")
    spread = {found.rank: 1 - min(found.clocks_mhz or []) / max(found.clocks_mhz or []) for found in known}
    worst = [found for found in known if spread[found.rank] > XCD_WARN]
    if not worst:
        return expected.passed(f"{len(known)} GPU(s), at most {max(spread.values()):.1%}")
    read = _named(facts, worst, lambda found: " ".join(map(str, found.clocks_mhz or [])) + " MHz")
    cure = _leave_out(facts, worst)
    return expected.fail(read, cure) if max(spread.values()) >= XCD_FAIL else expected.warn(read, cure)


def all_reduce(facts: Facts) -> Finding | None:
    measured = [found for found in _outcome(facts).measured if found.all_reduce_wrong is not None]
    if not measured:
        return None
    expected = Expected("every element has the right sum", f"{PROGRAM}: whole numbers, exact in fp32")
    bad = [found for found in measured if found.all_reduce_wrong]
    if bad:
        cure = "look at kernel_log, xgmi, iommu and acs; NCCL_P2P_DISABLE=1 shows whether it is the copies between GPUs"
        return expected.fail(_named(facts, bad, lambda found: f"{found.all_reduce_wrong} wrong"), cure)
    return expected.passed(f"right among {len(measured)}")


def all_reduce_rate(facts: Facts) -> Finding | None:
    rates = [found.all_reduce_gb_s for found in _outcome(facts).measured if found.all_reduce_gb_s is not None]
    if not rates:
        return None
    slowest, cure = min(rates), "look at xgmi, pcie, iommu, acs and numa_balancing; compare with all_reduce_perf of rccl-tests"
    read = f"{slowest:.3g} GB/s bus bandwidth among {len(rates)}"
    want = healthy_bus(facts.hardware, len(rates)) if facts.hardware else None
    if want is None:
        where = Expected("none is known", f"conf/hardware: healthy.all_reduce or link_gb_s of {facts.group} is empty")
        return where.unknown(read, COMPARE if facts.hardware and facts.hardware.vendor == Vendor.none else cure)
    bus, basis = want
    expected = Expected(
        f"{WARN * bus:.0f} GB/s or more, fails below {FAIL * bus:.0f} ({basis})",
        f"conf/hardware: healthy.all_reduce and link_gb_s of {facts.group}; launch/checks/active.py",
    )
    if slowest >= WARN * bus:
        return expected.passed(read)
    return expected.fail(read, cure) if slowest < FAIL * bus else expected.warn(read, cure)


def healthy_bus(hardware: Hardware, num_gpus: int) -> tuple[float, str] | None:
    """GB/s of bus bandwidth among so many healthy GPUs, and why. Over xGMI a GPU has a link of its own to each other one: fewer GPUs, fewer
    links (ROCm/rccl#1270); a switch gives all of its links to any number.
    """
    share, link = hardware.healthy.all_reduce, hardware.link_gb_s
    if share is None or link is None:
        return None
    others = hardware.gpus_per_node - 1
    used = min(num_gpus - 1, others) if hardware.link == Link.xgmi else others
    links = "" if used == others else f", {used} of {others} links"
    return share * link * used / others, f"{share:.0%} of {link:g} is healthy{links}"
