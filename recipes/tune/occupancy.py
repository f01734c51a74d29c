"""Compile Triton kernels for AMD GPUs, without a GPU, and report registers, LDS and occupancy.

    python -m recipes.tune.occupancy kernel=liger:rms_norm arch=gfx942
    python -m recipes.tune.occupancy kernel=liger:all,trl:all model=qwen3_8b tokens=8192 format=json
    python -m recipes.tune.occupancy kernel=inductor:layer model=qwen3_4b dtype=amp arch=gfx942
    python -m recipes.tune.occupancy kernel=my.py:scale 'args=x=*bf16,n=i32,BLOCK=128' num_warps=4,8

This program is not a method of launch/run.py, because it starts no ranks and writes no run
directory. kernel, arch and the compiler options accept several values, separated by commas, and
every combination is compiled. Defaults are in parentheses.

    kernel                one of:
      liger:<operation>   a kernel of Liger, such as liger:rms_norm
      liger:all           all kernels that method.args.use_liger_kernel=true turns on
      trl:lm_head         the head of SFT, DPO and GRPO (also: trl:all)
      inductor:layer      the kernels that torch.compile generates for one decoder layer, forward
                          and backward, with the hardware file's attention for padded and for
                          packed rows
      file.py:function    your own kernel
    arch                  gfx908 gfx90a gfx942 gfx950 gfx1100 gfx1151 gfx1201 (all)
    num_warps, num_stages, waves_per_eu, matrix_instr_nonkdim
                          compiler options (as in the kernel's launch)
    save                  a folder for the assembly (.s) and Triton's IR with layouts (.ttgir)
    format                text or json (text)
    jobs                  the number of parallel compilations (one per core)
    timeout_s             the limit for one compilation in seconds (300)

Not for file.py:function:
    model                 the name of a file in conf/model (qwen3_8b)
    tokens                the number of tokens in one pass through a layer (4096)
    dtype                 bf16, fp16 or fp32; for inductor:layer also amp, which is fp32 weights
                          under bf16 autocast (bf16)

Only for file.py:function:
    args                  name=value for each parameter, separated by commas. A value is a type
                          (*bf16, i32, or i32:16 for a multiple of 16) or a constant (128).
                          BLOCK_M=64|128 compiles each of them
    grid                  the number of workgroups, such as 2048, 64x32 or 4096/BLOCK_Mx32

If the machine has the GPU, kernels of file.py:function are timed too. This needs grid= and the
value of each argument: args=m=i32@4096 for a number, args=x=*bf16@65536 for the elements of a
tensor. Timed rows are sorted by time.

Rows of the same kernel and architecture are sorted by occupancy, and kernels that spill come last.
Higher occupancy does not guarantee more speed. It hides latency, but a wave with enough independent
work does not need that. Instructions are counted in the assembly, no matter how often they run. The
table names the version of Triton; the same version compiles the same code on a machine with the
GPU.

Exit codes: 0 done, 2 the request is wrong, 3 Triton or Liger is not installed, 4 nothing compiled
for some kernel and architecture.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from launch.core import key_values
from launch.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER,
    HostError,
    UserError,
    near_or_all,
)
from recipes.tune import occupancy_rows
from recipes.tune.amdgpu import ARCHITECTURES
from recipes.tune.occupancy_rows import Row

if TYPE_CHECKING:  # needs Triton; launches() reports it if missing
    from recipes.tune.kernels import Launch

SWEPT = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
DEFAULTS = {
    "kernel": "", "arch": ",".join(ARCHITECTURES), **dict.fromkeys(SWEPT, ""),
    "model": "qwen3_8b", "tokens": "4096", "dtype": "bf16", "args": "", "grid": "",
    "save": "", "format": "text", "jobs": str(os.cpu_count() or 1), "timeout_s": "300",
}  # fmt: skip
MAXIMUMS = {"tokens": 2**24}  # activations of width 4096 in bf16 would already be 137 GB
MAY_BE_ZERO = ("waves_per_eu", "matrix_instr_nonkdim")
NONKDIMS = ("0", "16", "32")  # values of matrix_instr_nonkdim; with 0, Triton chooses
MODELS = Path(__file__).resolve().parents[2] / "conf/model"

# Prefix of kernel= -> (module, distribution)
LIBRARIES = {
    "liger": ("liger_kernel", "liger-kernel"),
    "trl": ("trl", "trl"),
    "inductor": ("torch", "torch"),
}
KERNELS = """
    liger:rms_norm liger:rope liger:swiglu liger:cross_entropy liger:all
    trl:lm_head trl:all inductor:layer file.py:function
""".split()
# The kernels of liger:all and trl:all. method.args.use_liger_kernel=true uses these Liger kernels
# (liger_kernel.transformers.apply_liger_kernel_to_qwen3, _qwen2 and _llama). It does not use
# Liger's loss, because TRL 1.16 has its own head (liger_kernel_config in SFT, DPO and GRPO
# trainers).
RECIPE_KERNELS = ("liger:rms_norm", "liger:rope", "liger:swiglu", "trl:lm_head")


@dataclass(frozen=True)
class Request:
    kernels: list[str]
    archs: list[str]
    sweep: dict[str, list[int]]
    model: Path
    tokens: int
    dtype: str
    args: dict[str, str]
    grid: tuple[str, ...]
    save: Path | None
    json: bool
    jobs: int
    timeout_s: float

    @property
    def libraries(self) -> list[str]:
        prefixes = {kernel.partition(":")[0] for kernel in self.kernels}
        return [library for library in LIBRARIES if library in prefixes]


def parse(argv: list[str]) -> Request:
    """Parse key=value words. Raise UserError for unknown keys and values."""
    words = key_values.read(argv, DEFAULTS, "kernel=liger:rms_norm")
    kernels = _split(words["kernel"])
    prefixes = {kernel.partition(":")[0] for kernel in kernels}
    for kernel in kernels:
        library, _, name = kernel.partition(":")
        if library in LIBRARIES or not (library and name):
            _checked("kernel", kernel, KERNELS)
    unused_keys = ("model", "tokens") if not prefixes & {*LIBRARIES} else ()
    for key in ("args", "grid") if prefixes <= {*LIBRARIES} else unused_keys:
        if words[key] != DEFAULTS[key]:
            raise UserError(f"{key} has no effect on kernel={words['kernel']}. Leave {key}= out.")
    for value in _split(words["matrix_instr_nonkdim"]):
        _checked("matrix_instr_nonkdim", value, NONKDIMS)
    sides = tuple(words["grid"].split("x")) if words["grid"] else ()
    for side in sides:
        _number("grid", side.partition("/")[0])
    dtypes = ["bf16", "fp16", "fp32", *(["amp"] if prefixes == {"inductor"} else [])]
    models = [file.stem for file in MODELS.glob("*.yaml")]
    arguments = [pair.strip().partition("=") for pair in _split(words["args"])]
    return Request(
        kernels=kernels,
        archs=[_checked("arch", arch, ARCHITECTURES) for arch in _split(words["arch"])],
        sweep={
            key: [_number(key, value) for value in _split(words[key])]
            for key in SWEPT
            if words[key]
        },
        model=MODELS / f"{_checked('model', words['model'], models)}.yaml",
        tokens=_number("tokens", words["tokens"]),
        dtype=_checked("dtype", words["dtype"], dtypes),
        args={name: value for name, _, value in arguments},
        grid=sides,
        save=Path(words["save"]) if words["save"] else None,
        json=_checked("format", words["format"], ("text", "json")) == "json",
        jobs=_number("jobs", words["jobs"]),
        timeout_s=_number("timeout_s", words["timeout_s"]),
    )


def _split(text: str) -> list[str]:
    """Return the distinct values of a comma-separated list."""
    return list(dict.fromkeys(text.split(","))) if text else []


def _checked(key: str, value: str, known: Iterable[str]) -> str:
    """Return the value. Raise UserError if it is not among the known ones."""
    if value not in known:
        raise UserError(f"{key}={value} is not known.{near_or_all(value, known)}")
    return value


def _number(key: str, text: str) -> int:
    minimum, maximum = int(key not in MAY_BE_ZERO), MAXIMUMS.get(key, 2**31 - 1)
    if not (re.fullmatch(r"[0-9]{1,18}", text) and minimum <= int(text) <= maximum):
        raise UserError(f"{key}={text} is out of range. Use a number from {minimum} to {maximum}.")
    return int(text)


def launches(request: Request) -> list[tuple[Launch, str]]:
    """Return every kernel launch to compile, with its architecture.

    Raise HostError if Triton or a library is not installed, and UserError if a kernel does not
    exist.
    """
    try:
        from recipes.tune import file_kernels, kernels

        for library in request.libraries:
            importlib.import_module(LIBRARIES[library][0])
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        raise HostError(
            f"{package} is not installed, but kernel= needs it. In .venv on Linux, run: "
            "make kernels"
        ) from error
    named: list[tuple[str, Launch]] = []
    for kernel in request.kernels:
        library, _, name = kernel.partition(":")
        if library not in LIBRARIES:
            of_file = file_kernels.file_launches(kernel, request.args, request.grid)
            named += [(kernel, launch) for launch in of_file]
        elif library != "inductor":
            in_recipes = [kernel for kernel in RECIPE_KERNELS if kernel.startswith(f"{library}:")]
            shape = (request.model, request.tokens, request.dtype)
            for operation in in_recipes if name == "all" else [kernel]:
                recorded = kernels.library_launches(operation, *shape)
                named += [(kernel, launch) for launch in recorded]
    distinct = kernels.distinct_names(named)
    generated = layer_launches(request) if "inductor" in request.libraries else []
    return [(launch, arch) for launch in distinct for arch in request.archs] + generated


def layer_launches(request: Request) -> list[tuple[Launch, str]]:
    """Return the launches that torch.compile generates for a layer, for each kind of attention."""
    import torch

    from recipes.tune import kernels, layer_kernels

    if torch.version.cuda or torch.version.hip:
        raise HostError(
            "kernel=inductor:layer needs torch's CPU build, which can stand in for any GPU. Run: "
            "make setup TORCH=cpu && make kernels"
        )
    generated = layer_kernels.generate_all(
        {
            arch: [
                layer_kernels.Layer(request.model, attention, request.tokens, request.dtype)
                for attention in layer_kernels.attentions_of(arch)
            ]
            for arch in request.archs
        },
        request.jobs,
    )
    return [
        (launch, arch)
        for arch in request.archs
        for launch in kernels.generated_launches(generated[arch])
    ]


def measure(request: Request) -> list[Row]:
    """Compile every configuration, and return its row.

    Rows are grouped by kernel and architecture, and sorted by rank within a group.
    """
    tasks = [
        (
            replace(launch, options=launch.options | dict(zip(request.sweep, values, strict=True))),
            arch,
        )
        for launch, arch in launches(request)
        for values in itertools.product(*request.sweep.values())
    ]
    # Imported after launches(), which reports missing packages.
    from recipes.tune import kernel_timing
    from recipes.tune.compile import compile_all

    rows: dict[int, Row] = {}
    results = compile_all(tasks, request.jobs, request.timeout_s)
    # auto_refresh would start a thread, but compile_all forks and therefore needs a single thread.
    bar = track(
        results,
        "compiling",
        len(tasks),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=request.json or not sys.stderr.isatty(),
    )
    for index, compiled in bar:
        row = rows[index] = occupancy_rows.row_of(*tasks[index], compiled)
        if request.save and not compiled.error:
            options = "".join(f"-{key}{value}" for key, value in sorted(row.options.items()))
            name = re.sub(r"[^\w.=-]+", "_", f"{row.kernel}-{row.arch}{options}")
            (request.save / f"{name}.s").write_text(compiled.isa)
            (request.save / f"{name}.ttgir").write_text(compiled.ttgir)
    times = kernel_timing.measure(tasks, kernel_timing.present_arch())  # after all forks
    ordered = [replace(rows[index], time_us=times.get(index)) for index in range(len(tasks))]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in ordered:
        groups.setdefault((row.kernel, row.arch), []).append(row)
    return [row for group in groups.values() for row in sorted(group, key=lambda row: row.rank)]


def versions(request: Request) -> dict[str, str]:
    """Return the versions of Triton and of the requested kernels' libraries."""
    names = ["triton", *(LIBRARIES[library][1] for library in request.libraries)]
    return {name: metadata.version(name) for name in names}


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return EXIT_DONE if argv else EXIT_USER
    try:
        request = parse(argv)
        if request.save:
            request.save.mkdir(parents=True, exist_ok=True)
        rows = measure(request)
    except (UserError, HostError, OSError) as error:  # OSError if save= cannot be written
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", EXIT_USER)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if request.json:
        objects = [{**asdict(row), "small_grid": row.small_grid} for row in rows]
        content = {"schema": 1, "versions": versions(request), "rows": objects}
        print(json.dumps(content, indent=1))
    else:
        occupancy_rows.show(rows, versions(request), request.save)
    compiled = {(row.kernel, row.arch) for row in rows if not row.error}
    return EXIT_DONE if compiled == {(row.kernel, row.arch) for row in rows} else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
