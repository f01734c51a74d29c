"""Test recipes/tune/occupancy.py without Triton: arguments, processes and the table."""

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
from recipes.tune import occupancy, table
from recipes.tune.amdgpu import ARCHITECTURES, Instructions, Resources
from recipes.tune.compile import Compiled
from recipes.tune.occupancy import Code, Row

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
    ([LIGER, "matrix_instr_nonkdim=8"], "Known: 0, 16, 32"),
    ([LIGER, f"tokens={10**12}"], "1 to 16777216"),
    ([FILE, "grid=32xn"], "grid=n "),
    ([FILE, "save=/dev/null/out"], "/dev/null/out"),
    ([FILE, "model=tiny"], "model takes no effect"),
    ([LIGER, "grid=32"], "grid takes no effect"),
])  # fmt: skip
def test_a_wrong_argument_is_one_message(
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
    assert not any((request.sweep, request.save, request.json, request.workgroups))
    words = "kernel=my.py:scale,liger:all arch=gfx950,gfx1201 num_warps=4,8 waves_per_eu=0,2 "
    words += f"grid=64x3 tokens=512 save={tmp_path / 'out'} format=json jobs=1"
    request = occupancy.parse([*words.split(), "args=x=*bf16, n=i32:16,BLOCK=128"])
    assert request.sweep == {"num_warps": [4, 8], "waves_per_eu": [0, 2]}
    assert request.args == {"x": "*bf16", "n": "i32:16", "BLOCK": "128"}
    assert (request.workgroups, request.tokens, request.json, request.jobs) == (192, 512, True, 1)
    assert request.save == tmp_path / "out"


def test_without_triton_the_target_that_installs_it_is_named(
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


# ---- Configurations


# ---- Compiling in other processes: workers get the compiler's stand-in by fork


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
        "dies": "the compiler died (SIGKILL): <unknown>:0: error: ran out of registers",
        "exits": "the compiler died (exit code 7)",
        "sleeps": "not compiled after 0.5 s (timeout_s)",
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


# ---- What is made of it


def a_row(
    kernel: str = "k",
    arch: str = "gfx942",
    vgprs: int = 64,
    lds: int = 0,
    spills: int = 0,
    error: str | None = None,
    loads: dict[str, int] | None = None,
    **fields,
) -> Row:
    fields = {"options": {"num_warps": 4}, "workgroups": None, "per_compute_unit": False} | fields
    row = Row(kernel, arch, seconds=0.1, error=error, **fields)
    if error:
        return row
    resources = Resources(vgprs, 0, 30, spills, 0, 4 * spills, lds, 256, 64)
    loads = loads or {"b128": 3, "b32": 1}
    matrix = {"v_mfma_f32_32x32x8_bf16": 12}
    counts = Instructions(loads, {}, {"b128": 2}, {"2xb64": 6}, matrix)
    return replace(
        row, code=Code(resources, occupancy.occupancy(ARCHITECTURES[arch], resources), counts)
    )


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


def test_a_row_of_a_compiled_kernel_and_of_one_that_cannot_start() -> None:
    row = occupancy.row(LAUNCH, "gfx942", Compiled(ISA, "ttgir", 32768, 0.2))
    assert row.code
    # 136 registers: 3 waves, floor(3 * 4 / 4) = 3 workgroups. LDS: 2 of them, 2 * 4 / 4 waves.
    needs, fit = row.code.resources, row.code.occupancy
    assert (needs.lds_bytes, fit.by_vgpr, fit.waves) == (32768, 3, 2)
    assert row.code.instructions.global_loads == {"b128": 1}
    assert (row.small_grid, row.seconds) == (True, 0.2)
    assert row.options == {"XBLOCK": 64, "num_warps": 4}
    large = occupancy.row(LAUNCH, "gfx942", Compiled(ISA, "", 65537))
    assert "a workgroup needs more LDS" in large.error
    assert large.code is None
    assert occupancy.row(LAUNCH, "gfx950", Compiled(ISA, "", 65537)).error is None


def shown(capsys: pytest.CaptureFixture[str], *rows: Row, saved: Path | None = None) -> str:
    table.show(list(rows), {"triton": "3.7.1"}, saved)
    return capsys.readouterr().out


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide = {"vgprs": 202, "lds": 32768, "workgroups": 512}
    failure = a_row(error="too [large]", options={"num_warps": 16})
    out = shown(capsys, a_row(**wide), a_row(arch="gfx950", **wide), failure, saved=tmp_path)
    assert "Compiled by triton 3.7.1" in out
    # gfx950: 32768 bytes are 26 blocks of 1280, which 160 KiB hold 4 times.
    assert [
        " ".join(line.split()) for line in out.splitlines() if line.strip().startswith("k ")
    ] == [
        "k gfx942 4 512 ! 202 30 32768 4 2 8 2 2/8 VGPR LDS MFMA 32x32x8 12 3/4 2/8",
        "k gfx950 4 512 ! 202 30 32768 4 2 8 4 2/8 VGPR MFMA 32x32x8 12 3/4 2/8",
        "k gfx942 16",
    ]
    assert not any(word in out for word in ("AGPR ", "scratch", "spills "))
    assert "failed: k gfx942 num_warps=16: too [large]\n" in out
    assert f"{tmp_path}/" in out
    assert "scratch B" in shown(capsys, a_row(spills=28))
