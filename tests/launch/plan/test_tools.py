"""Test the programs that a run needs: warnings of the plan, and the check before the start."""

from __future__ import annotations

import dataclasses
import os
import sys

import pytest

from containers import images
from containers.tools import PRESENT
from launch.core.errors import HostError
from launch.execution.execute import check_tools
from launch.plan import tools
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with

ROCPROF = "model=qwen3_4b topology=single profile=rocprof method.args.save_strategy=no"


def config_of(overrides: str):
    return prepare(composed("hardware=mi300x", *overrides.split()))[0]


@pytest.mark.parametrize(("overrides", "tool", "words"), [
    (ROCPROF, "rocprofv3", "may be missing"),
    ("method=tune/hipblaslt model=qwen3_4b", "hipblaslt-bench", "is not in the image rocm"),
    ("method=bench/gemm", "hipblaslt-bench", "its rows are left out"),
    ("method=bench/collectives", "rccl-tests", "its rows are left out"),
    ("method=tune/inductor model=qwen3_4b method.args.candidates=[default,ck]", "ck4inductor",
     "this candidate fails"),
])  # fmt: skip
def test_a_plan_says_that_the_image_may_lack_a_program(monkeypatch, overrides, tool, words):
    config = config_of(overrides)
    (line,) = tools.warnings(config)
    assert tool in line
    assert words in line
    rocm = images.load()["rocm"]
    monkeypatch.setitem(rocm.tools, tool, PRESENT)
    assert not list(tools.warnings(config))


@pytest.mark.parametrize("overrides", [
    f"{ROCPROF} runtime=local",  # the start looks for it
    f"{ROCPROF} smoke=true runtime=docker",
    "method=bench/gemm method.args.ops=[matmul]",
    "method=tune/inductor model=qwen3_4b",
])  # fmt: skip
def test_a_plan_without_such_a_program_has_no_warning(overrides):
    assert not list(tools.warnings(config_of(overrides)))


@pytest.mark.parametrize(("overrides", "program"), [
    (f"{ROCPROF} runtime=local", "rocprofv3"),
    (f"{ROCPROF} rocprof=sys runtime=local", "rocprof-sys-sample"),
    ("method=tune/hipblaslt model=qwen3_4b runtime=local", "hipblaslt-bench"),
])  # fmt: skip
def test_a_missing_program_ends_the_run_before_it_starts(tmp_path, monkeypatch, overrides, program):
    host = dataclasses.replace(host_with(8), python=sys.executable)
    plan = make_plan(config_of(overrides), host, tmp_path / "run")
    with pytest.raises(HostError, match=f"{program} is not on the PATH"):
        check_tools(plan, host)
    (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    check_tools(plan, host)
