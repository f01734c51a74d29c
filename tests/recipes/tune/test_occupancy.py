"""Test recipes/tune/occupancy.py without Triton: arguments, child processes and the table."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.tune import compile as compiler
from recipes.tune import occupancy, occupancy_rows
from recipes.tune.amdgpu import ARCHITECTURES
from recipes.tune.compile import Compiled

LIGER = "kernel=liger:rope"
FILE = "kernel=my.py:scale"


# ---- Arguments


@pytest.mark.parametrize(("arguments", "word"), [
    (["kernl=liger:rope"], "Did you mean kernel"),
    ([LIGER, LIGER], "kernel="),
    (["kernel=liger:rms_nrom"], "Did you mean liger:rms_norm"),
    ([LIGER, "model=qwen3_9b"], "Did you mean qwen3_8b"),
    (["kernel=inductor:layer,liger:rope", "dtype=amp"], "dtype=amp"),
    ([LIGER, "num_stages=" + "9" * 5000], "num_stages=9"),
    ([LIGER, "matrix_instr_nonkdim=8"], "0, 16, 32"),
    ([LIGER, f"tokens={10**12}"], "1 to 16777216"),
    ([FILE, "grid=32xn"], "grid=n "),
    ([FILE, "save=/dev/null/out"], "/dev/null/out"),
    ([FILE, "model=tiny"], "model has no effect"),
    ([LIGER, "grid=32"], "grid has no effect"),
])  # fmt: skip
def test_a_wrong_argument_prints_one_message(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert occupancy.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert word in captured.err
    assert captured.err.count("\n") == 1


def test_defaults_and_keys_of_a_request(tmp_path: Path) -> None:
    request = occupancy.parse([LIGER])
    assert (request.kernels, request.archs) == (["liger:rope"], [*ARCHITECTURES])
    assert (request.model.name, request.tokens, request.dtype) == ("qwen3_8b.yaml", 4096, "bf16")
    assert not any((request.sweep, request.save, request.json, request.grid))
    words = "kernel=my.py:scale,liger:all arch=gfx950,gfx1201 num_warps=4,8 waves_per_eu=0,2 "
    words += f"grid=64x3 tokens=512 save={tmp_path / 'out'} format=json jobs=1"
    request = occupancy.parse([*words.split(), "args=x=*bf16, n=i32:16,BLOCK=128"])
    assert request.sweep == {"num_warps": [4, 8], "waves_per_eu": [0, 2]}
    assert request.args == {"x": "*bf16", "n": "i32:16", "BLOCK": "128"}
    assert (request.grid, request.tokens, request.json, request.jobs) == (("64", "3"), 512, True, 1)
    assert request.save == tmp_path / "out"


def test_a_missing_triton_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if Triton were not installed
    monkeypatch.delitem(sys.modules, "recipes.tune.kernels", raising=False)
    monkeypatch.delattr("recipes.tune.kernels", raising=False)
    assert occupancy.main([LIGER]) == 3
    captured = capsys.readouterr()
    assert "triton is not installed" in captured.err
    assert "make kernels" in captured.err
    assert captured.out == ""


# ---- Compiling in child processes, which inherit the stand-in of the compiler by fork


def compile_with(monkeypatch, tasks: list[str], jobs: int = 2, timeout_s: float = 30):
    monkeypatch.setattr(compiler, "compile_one", stand_in)
    results = compiler.compile_all([(task, "gfx942") for task in tasks], jobs, timeout_s)
    return {tasks[index]: compiled for index, compiled in results}


def stand_in(task: str, arch: str) -> Compiled:
    if task == "raises":
        raise RuntimeError("PassManager::run\n   failed")
    if task == "dies":
        os.write(2, b"a remark\n<unknown>:0: error: ran out of registers\nmore\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "exits":
        os._exit(7)
    if task == "sleeps":
        time.sleep(600)
    return Compiled(isa=f"{task} {arch} {os.getpid()}" + " " * 100_000)


def test_a_failed_compilation_is_a_row_and_the_rest_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = ["raises", "dies", "a", "exits", "sleeps", "b"]
    by_task = compile_with(monkeypatch, tasks, jobs=1, timeout_s=0.5)
    assert {task: compiled.error for task, compiled in by_task.items()} == {
        "raises": "RuntimeError: PassManager::run failed",
        "dies": "the compiler crashed (SIGKILL): <unknown>:0: error: ran out of registers",
        "exits": "the compiler crashed (exit code 7)",
        "sleeps": "still compiling after timeout_s=0.5",
        "a": None,
        "b": None,
    }
    assert by_task["a"].isa.split()[:2] == ["a", "gfx942"]


def test_closing_the_results_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compile_one", stand_in)
    results = compiler.compile_all([("a", "gfx942"), ("sleeps", "gfx942")], 2, 30)
    next(results)
    results.close()
    assert multiprocessing.active_children() == []


# ---- Rows

ISA = """
\tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .group_segment_fixed_size: 0
    .max_flat_workgroup_size: 256
    .private_segment_fixed_size: 0
    .sgpr_count:     30
    .sgpr_spill_count: 0
    .vgpr_count:     130
    .vgpr_spill_count: 0
    .wavefront_size: 64
...
\t.end_amdgpu_metadata
"""
LAUNCH = SimpleNamespace(
    name="k",
    options={"num_warps": 4, "debug": False},
    blocks={"XBLOCK": 64},
    workgroups=8,
    per_compute_unit=False,
)


def test_rows_and_their_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = occupancy_rows.row_of(LAUNCH, "gfx942", Compiled(ISA, "ttgir", 32768, 0.2))
    assert row.code
    # 136 registers allow floor(3 * 4 / 4) = 3 workgroups, but LDS only 2, so 2 * 4 / 4 waves.
    needs, fit = row.code.resources, row.code.occupancy
    assert (needs.lds_bytes, fit.by_vgpr, fit.waves) == (32768, 3, 2)
    assert row.code.instructions.global_loads == {"b128": 1}
    assert (row.small_grid, row.seconds) == (True, 0.2)
    assert row.options == {"XBLOCK": 64, "num_warps": 4}
    # AMD's guide: two stages for one matrix product, one for none or several.
    for dots, stages in ((0, 1), (1, 2), (2, 1)):
        assert (
            occupancy_rows.row_of(LAUNCH, "gfx942", Compiled(ISA, dots=dots)).guide_num_stages
            == stages
        )
    timed = [replace(row, time_us=time_us) for time_us in (3.0, None, 2.0)]
    assert [r.time_us for r in sorted(timed, key=lambda row: row.rank)] == [2.0, 3.0, None]
    large = occupancy_rows.row_of(LAUNCH, "gfx942", Compiled(ISA, "", 65537))
    assert large.code is None
    assert occupancy_rows.row_of(LAUNCH, "gfx950", Compiled(ISA, "", 65537)).error is None
    occupancy_rows.show([row, large], {"triton": "3.7.1"}, tmp_path)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "k gfx942 64 4 8 ! 0/0 1 130 30 32768 3 8 2 2 8 LDS b128=1" in lines
    assert not any("scratch" in line for line in lines)  # nothing spills
    failure = "cannot start: one workgroup exceeds the available LDS"
    assert f"failed: k gfx942 XBLOCK=64 num_warps=4: {failure}" in lines
    assert any(f"{tmp_path}/" in line for line in lines)
