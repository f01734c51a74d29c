"""Test the kernels of a user's file: arguments, tiles, and the call that is timed on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.tune import kernel_timing, occupancy
from tests.integration.add_ons.test_kernels import MATMUL, pytestmark, rows

__all__ = ["pytestmark"]


def test_tiles_are_swept_and_timed_where_a_gpu_is_present(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "args=a_ptr=*bf16@65536,b_ptr=*bf16@65536,c_ptr=*bf16@65536,m=i32@256,n=i32@256"
    sizes += ",k=i32@256,BLOCK_M=32|64,BLOCK_N=64"
    argv = [f"kernel={MATMUL}:matmul", sizes, "grid=256/BLOCK_Mx256/BLOCK_N", "arch=gfx942"]
    found = rows(capsys, *argv, "num_stages=1,2")
    grids = {(one["options"]["BLOCK_M"], one["workgroups"]) for one in found}
    assert grids == {(32, 8 * 4), (64, 4 * 4)}
    assert len({one["kernel"] for one in found}) == 1
    assert {one["guide_num_stages"] for one in found} == {2}
    assert all(sum(one["code"]["instructions"]["waits"].values()) for one in found)
    timed = kernel_timing.present_arch() == "gfx942"
    assert [one["time_us"] is not None for one in found] == [timed] * 4
    assert occupancy.main([*argv[:2], "grid=256/BLOCK", "arch=gfx942"]) == 2
    assert "grid=256/BLOCK" in capsys.readouterr().err


def test_arguments_of_a_timed_kernel() -> None:
    import torch

    from recipes.tune.file_kernels import file_launch

    given = dict.fromkeys(("a_ptr", "b_ptr"), "*fp32@64")
    given |= {"c_ptr": "*i32@8", "m": "i32@8", "n": "i32@48", "k": "i32@16", "BLOCK_M": "16"}
    launch = file_launch(f"{MATMUL}:matmul", given, ["8/BLOCK_M", "3"])
    assert (launch.grid, launch.workgroups) == ((1, 3), 3)
    assert [position for (position,) in launch.attributes] == [0, 1, 2, 4, 5]  # m=8 is no multiple
    named = kernel_timing.arguments(launch, "cpu")
    assert (named["m"], named["BLOCK_M"], named["BLOCK_N"]) == (8, 16, 128)
    assert (len(named["a_ptr"]), named["c_ptr"].dtype) == (64, torch.int32)
    assert named["a_ptr"].std() > 0.5
    assert kernel_timing.can_time(launch)
    unknown = file_launch(f"{MATMUL}:matmul", given | {"n": "i32:16"}, ["1"])
    assert not kernel_timing.can_time(unknown)


# Runs the kernel as it is timed, in Triton's interpreter, which needs a process of its own.
INTERPRETED = """
from recipes.tune import file_kernels, kernel_timing, kernels
from triton.runtime.interpreter import InterpretedFunction
file_kernels.JITFunction = InterpretedFunction
kernel = file_kernels.load_kernels(file_kernels.Path({file!r}))["matmul"]
numbers = dict.fromkeys(("m", "n", "k"), 64)
tensors = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), 4096)
kinds = dict.fromkeys(tensors, "*fp32") | dict.fromkeys(numbers, "i32")
blocks = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), 32)
kinds |= dict.fromkeys(blocks, "constexpr")
launch = kernels.Launch(
    "matmul", kernel, kinds, blocks, {{}}, {{"num_warps": 4}}, values=tensors | numbers, grid=(2, 2)
)
named = kernel_timing.arguments(launch, "cpu")
kernel_timing.run(launch, named)
a, b, c = (named[name].view(64, 64) for name in tensors)
assert (c - a @ b).abs().max() < 1e-4
"""


def test_a_timed_kernel_computes_its_result() -> None:
    program = INTERPRETED.format(file=str(MATMUL))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(MATMUL.parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=env)
    assert done.returncode == 0


def test_annotations_defaults_and_decorators(tmp_path: Path) -> None:
    from recipes.tune.file_kernels import file_launch

    file = tmp_path / "annotated.py"
    file.write_text(
        "import triton\nimport triton.language as tl\n\n"
        "@triton.autotune(configs=[triton.Config({'BLOCK': 64})], key=[])\n"
        "@triton.heuristics({'EVEN': lambda args: True})\n@triton.jit\n"
        "def kernel(x, n: 'i64', scale, BLOCK: tl.constexpr, EVEN: tl.constexpr, "
        "TYPE: tl.constexpr = tl.float32,\n"
        "           bias=None, eps=1e-6, rows=32, step=1):\n    pass\n"
    )
    found = file_launch(
        f"{file}:kernel", {"x": "*kfp16", "scale": "fp32", "BLOCK": "64", "EVEN": "true"}, ["7"]
    )
    types = {name: kind for name, kind in found.signature.items() if kind != "constexpr"}
    assert types == {"x": "*kfp16", "n": "i64", "scale": "fp32", "eps": "fp32", "rows": "i32"}
    assert list(found.constants) == ["BLOCK", "EVEN", "TYPE", "bias", "step"]
    assert [str(value) for value in found.constants.values()] == ["64", "True", "fp32", "None", "1"]
    assert {*types, *found.constants} == set(found.signature)
    assert found.attributes == {
        (0,): [["tt.divisibility", 16], ["tt.pointer_range", 32]],
        (8,): [["tt.divisibility", 16]],
    }
    assert found.workgroups == 7
