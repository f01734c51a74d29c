"""Test recipes/tune/occupancy.py without Triton: arguments, processes and the table."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["kernl=liger:rope"], "Did you mean kernel"),
        ([LIGER, "arch="], "arch="),
        ([LIGER, LIGER], "kernel="),
        (["arch=gfx942"], "kernel="),
        (["kernel=my.py:"], "kernel=my.py:"),
        (["kernel=liger:rms_nrom"], "Did you mean liger:rms_norm"),
        ([LIGER, "arch=gfx942,gfx943"], "arch=gfx943"),
        ([LIGER, "model=qwen3_9b"], "Did you mean qwen3_8b"),
        ([LIGER, "dtype=bfloat16"], "Did you mean bf16"),
        (["kernel=inductor:layer,liger:rope", "dtype=amp"], "dtype=amp"),
        ([LIGER, "format=yaml"], "Known: json, text"),
        ([LIGER, "jobs=two"], "jobs: two"),
        ([LIGER, "num_stages=0"], "num_stages: 0 "),
        ([LIGER, "num_stages=" + "9" * 5000], "num_stages: 9"),
        ([LIGER, "waves_per_eu=-1"], "from 0 to "),
        ([LIGER, "matrix_instr_nonkdim=8"], "Known: 0, 16, 32"),
        ([LIGER, f"timeout_s={10**18}"], "from 1 to 86400"),
        ([LIGER, f"tokens={10**12}"], "from 1 to 16777216"),
        ([FILE, "args=n"], "args: n has no value"),
        ([FILE, "grid=32xn"], "grid: n "),
        ([FILE, "save=/dev/null/out"], "/dev/null/out"),
        ([FILE, "model=tiny"], "model takes no effect"),
        ([LIGER, "grid=32"], "grid takes no effect"),
    ],
)
def test_a_wrong_argument_is_one_message(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert occupancy.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert word in captured.err
    assert captured.err.count("\n") == 1


def test_defaults_of_a_request() -> None:
    request = occupancy.parse([LIGER])
    assert request.kernels == ("liger:rope",)
    assert request.archs == tuple(ARCHITECTURES)
    assert (request.model.name, request.tokens, request.dtype, request.workgroups) == (
        "qwen3_8b.yaml",
        4096,
        "bf16",
        None,
    )
    assert (request.sweep, request.save, request.json, request.timeout_s) == ({}, None, False, 300)


def test_keys_of_a_request(tmp_path: Path) -> None:
    request = occupancy.parse(
        [
            *(
                "kernel=my.py:scale,liger:all",
                "arch=gfx950,gfx1201",
                "num_warps=4,8",
                "waves_per_eu=0,2",
                "args=x=*bf16, n=i32:16,BLOCK=128",
            ),
            *("grid=64x3", "tokens=512", f"save={tmp_path / 'out'}", "format=json", "jobs=1"),
        ]
    )
    assert request.sweep == {"num_warps": (4, 8), "waves_per_eu": (0, 2)}
    assert request.args == {"x": "*bf16", "n": "i32:16", "BLOCK": "128"}
    assert (request.workgroups, request.tokens, request.json, request.jobs) == (192, 512, True, 1)
    assert request.save == tmp_path / "out"


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0)])
def test_help(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert occupancy.main(arguments) == code
    out = capsys.readouterr().out
    assert all(key in out for key in occupancy.KEYS)
    assert all(arch in out for arch in ARCHITECTURES)


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


FOLDER = Path(__file__).parents[3]
SHOWN = [
    line.split("python -m recipes.tune.occupancy ")[1].split("   ")[0].strip()
    for file in ("docs/kernels.md", "README.md", "recipes/tune/occupancy.py")
    for line in (FOLDER / file).read_text().splitlines()
    if line.startswith("    python -m recipes.tune.occupancy ")
]


def test_commands_of_the_pages_are_understood() -> None:
    assert len(SHOWN) >= 7
    for text in SHOWN:
        assert occupancy.parse(shlex.split(text)).kernels


# ---- Configurations


@dataclass(frozen=True)
class Launch:
    """Stand in for recipes.tune.kernels.Launch, which needs Triton."""

    options: dict[str, int]
    name: str = "scale"


def test_a_sweep_is_every_combination_in_place_of_the_launch_s_own() -> None:
    launch = Launch({"num_warps": 16, "num_stages": 4})
    actual = occupancy.configurations(launch, {"num_warps": (4, 8), "waves_per_eu": (0, 2)})
    assert [one.options for one in actual] == [
        {"num_warps": warps, "num_stages": 4, "waves_per_eu": waves}
        for warps, waves in ((4, 0), (4, 2), (8, 0), (8, 2))
    ]
    assert occupancy.configurations(launch, {}) == [launch]


def test_kernels_of_one_name_get_their_file() -> None:
    requested = [
        ("a.py:scale", Launch({})),
        ("b.py:scale", Launch({})),
        ("b.py:add", Launch({}, "add")),
    ]
    assert [one.name for one in occupancy.named_apart(requested)] == [
        "scale of a.py:scale",
        "scale of b.py:scale",
        "add",
    ]


# ---- Compiling in other processes: workers get the compiler's stand-in by fork


def compile_with(
    monkeypatch: pytest.MonkeyPatch, work, tasks: list[str], jobs: int = 2, timeout_s: float = 30
) -> dict[str, Compiled]:
    monkeypatch.setattr(compiler, "compile_one", work)
    return {
        tasks[index]: actual
        for index, actual in compiler.compile_all(
            [(task, "gfx942") for task in tasks], jobs, timeout_s
        )
    }


def as_told(task: str, arch: str) -> Compiled:
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


def test_each_task_is_compiled_and_workers_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = compile_with(monkeypatch, as_told, ["a", "b", "c", "d", "e"])
    assert {task: one.isa.split()[:2] for task, one in actual.items()} == {
        task: [task, "gfx942"] for task in "abcde"
    }
    workers = {one.isa.split()[2] for one in actual.values()}
    assert len(workers) <= 2
    assert str(os.getpid()) not in workers


def test_a_compilation_that_fails_or_dies_is_a_row_and_the_rest_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actual = compile_with(monkeypatch, as_told, ["raises", "dies", "a", "exits", "b"], jobs=1)
    assert actual["raises"].error == "RuntimeError: PassManager::run failed"
    assert (
        actual["dies"].error
        == "the compiler died (SIGKILL): <unknown>:0: error: ran out of registers"
    )
    assert actual["exits"].error == "the compiler died (exit code 7)"
    assert [actual[task].error for task in "ab"] == [None, None]


def test_a_compilation_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = compile_with(monkeypatch, as_told, ["sleeps", "a"], timeout_s=0.5)
    assert actual["sleeps"].error == "not compiled after 0.5 s (timeout_s)"
    assert actual["a"].error is None


def test_closing_the_results_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compile_one", as_told)
    results = compiler.compile_all([("a", "gfx942"), ("sleeps", "gfx942")], 2, 30)
    _, first = next(results)
    results.close()
    assert not Path(f"/proc/{first.isa.split()[2]}").exists()


def test_too_many_threads_are_rejected_before_compiling() -> None:
    actual = compiler.compile_one(SimpleNamespace(options={"num_warps": 32}), "gfx942")
    assert actual.error == "num_warps=32 makes a workgroup of 2048 threads, and 1024 are the most"


# ---- What is made of it


def a_row(
    kernel: str = "k",
    arch: str = "gfx942",
    vgprs: int = 64,
    lds: int = 0,
    spills: int = 0,
    error: str | None = None,
    **fields,
) -> Row:
    options = fields.pop("options", {"num_warps": 4})
    start = Row(
        kernel,
        arch,
        options,
        fields.pop("workgroups", None),
        fields.pop("per_compute_unit", False),
        0.1,
        error,
    )
    if error:
        return start
    resources = Resources(vgprs, 0, 30, spills, 0, 4 * spills, lds, 256, 64)
    counts = Instructions(
        fields.pop("loads", {"b128": 3, "b32": 1}),
        {},
        {"b128": 2},
        {"2xb64": 6},
        {"v_mfma_f32_32x32x8_bf16": 12},
    )
    actual = occupancy.occupancy(ARCHITECTURES[arch], resources)
    return Row(
        kernel,
        arch,
        options,
        start.workgroups,
        start.per_compute_unit,
        0.1,
        None,
        Code(resources, actual, counts),
    )


def test_the_best_comes_first() -> None:
    spilling = a_row(vgprs=24, spills=1)  # 8 waves, and spills
    failed = a_row(error="no")
    two, four, eight, eight_smaller = (a_row(vgprs=vgprs) for vgprs in (256, 128, 64, 32))
    narrow = a_row(vgprs=24, loads={"b32": 4})
    assert sorted(
        [narrow, failed, spilling, two, eight, four, eight_smaller], key=lambda one: one.rank
    ) == [*(eight_smaller, eight, narrow, four, two, spilling, failed)]


@pytest.mark.parametrize(
    ("workgroups", "per_compute_unit", "small"),
    [(None, False, False), (1023, False, True), (1024, False, False), (None, True, True)],
)
def test_a_grid_that_leaves_compute_units_idle(
    workgroups: int | None, per_compute_unit: bool, small: bool
) -> None:
    assert a_row(workgroups=workgroups, per_compute_unit=per_compute_unit).small_grid is small


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
    blocks={},
    workgroups=8,
    per_compute_unit=False,
)


def test_a_row_of_a_compiled_kernel() -> None:
    actual = occupancy.row(LAUNCH, "gfx942", Compiled(ISA, "ttgir", 32768, 0.2))
    assert actual.code
    # 136 registers: 3 waves, floor(3 * 4 / 4) = 3 workgroups. LDS: 2 of them, 2 * 4 / 4 waves.
    assert (
        actual.code.resources.lds_bytes,
        actual.code.occupancy.by_vgpr,
        actual.code.occupancy.waves,
    ) == (32768, 3, 2)
    assert actual.code.instructions.global_loads == {"b128": 1}
    assert (actual.small_grid, actual.seconds) == (True, 0.2)
    assert actual.options == {"num_warps": 4}


def test_inductor_s_block_sizes_are_options_of_a_row() -> None:
    launch = SimpleNamespace(**vars(LAUNCH) | {"blocks": {"XBLOCK": 64, "R0_BLOCK": 8}})
    assert occupancy.row(launch, "gfx942", Compiled(ISA)).options == {
        "XBLOCK": 64,
        "R0_BLOCK": 8,
        "num_warps": 4,
    }


def test_a_row_of_a_kernel_that_cannot_start() -> None:
    actual = occupancy.row(LAUNCH, "gfx942", Compiled(ISA, "", 65537))
    assert (
        actual.error
        == "cannot start: one workgroup needs 65537 bytes of LDS, which is more than there is"
    )
    assert actual.code is None
    assert occupancy.row(LAUNCH, "gfx950", Compiled(ISA, "", 65537)).error is None


def test_files_of_a_row_have_names_without_spaces() -> None:
    assert occupancy.stem(
        a_row("rope BACKWARD_PASS=True", options={"num_warps": 8, "num_stages": 2})
    ) == ("rope_BACKWARD_PASS=True-gfx942-num_stages2-num_warps8")


def shown(capsys: pytest.CaptureFixture[str], *rows: Row, saved: Path | None = None) -> str:
    table.show(list(rows), {"triton": "3.7.1"}, saved)
    return capsys.readouterr().out


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(
        capsys,
        a_row(vgprs=202, lds=32768, workgroups=512),
        a_row(arch="gfx950", vgprs=202, lds=32768, workgroups=512),
    )
    assert "Compiled by triton 3.7.1" in out
    # gfx950: 32768 bytes are 26 blocks of 1280, which 160 KiB hold 4 times.
    assert [
        " ".join(line.split()) for line in out.splitlines() if line.strip().startswith("k ")
    ] == [
        "k gfx942 4 202 30 0 32768 4 2 8 2 2/8 VGPR LDS MFMA 32x32x8 12 3/4 2/8 512 !",
        "k gfx950 4 202 30 0 32768 4 2 8 4 2/8 VGPR MFMA 32x32x8 12 3/4 2/8 512 !",
    ]
    assert "!: fewer than 1024 workgroups" in out
    assert not any(word in out for word in ("AGPR ", "scratch", "stages", "spills:", "failed"))


def test_the_table_explains_failures_and_spills(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failures = [a_row(error="too [large]", options={"num_warps": warps}) for warps in (16, 32)]
    out = shown(capsys, a_row(spills=28), *failures, saved=tmp_path)
    assert out.count("failed:") == 1
    assert "failed: too [large]\n    k gfx942 num_warps=16; k gfx942 num_warps=32\n" in out
    assert "spills: registers that went to memory" in out
    assert f"{tmp_path}/" in out
    assert "scratch B" in out


def test_json_holds_every_number() -> None:
    actual = json.loads(
        occupancy.as_json(
            [a_row(vgprs=202, workgroups=512), a_row(error="no")], {"triton": "3.7.1"}
        )
    )
    assert (actual["schema"], actual["versions"]) == (1, {"triton": "3.7.1"})
    good, bad = actual["rows"]
    assert good["code"]["resources"]["vgprs"] == 202
    assert good["code"]["occupancy"]["waves"] == 2
    assert good["code"]["instructions"]["lds_stores"] == {"2xb64": 6}
    assert good["small_grid"] is True
    assert (bad["error"], bad["code"]) == ("no", None)
