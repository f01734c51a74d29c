"""Check the launcher's Python, which ranks use where runs have no image of ours."""

from __future__ import annotations

import sys

from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, passed, warn
from launch.machine import this_python


def torch_build(facts: Facts) -> Finding:
    assert facts.hardware is not None
    assert facts.probe.packages is not None
    found, needed = facts.probe.packages(), this_python.GPUS[facts.hardware.vendor]
    reading = f"torch {found.torch}, built for {found.torch_build}"
    if found.torch_build == needed:
        return passed(reading)
    remedy = this_python.TORCH_REMEDY.format(needed)
    return fail(reading if found.torch else f"{sys.executable} has no torch", remedy)


def vllm(facts: Facts) -> Finding:
    assert facts.probe.packages is not None
    version = facts.probe.packages().vllm
    if version:
        return passed(f"vLLM {version}")
    return warn(f"{sys.executable} has no vLLM", this_python.VLLM_REMEDY)
