"""Registers, LDS and occupancy of a Triton kernel on AMD GPUs, found by compiling it. Needs no GPU.

    python -m recipes.tune.occupancy kernel=liger:rms_norm arch=gfx942
    python -m recipes.tune.occupancy kernel=liger:all,trl:all model=qwen3_8b tokens=8192 format=json
    python -m recipes.tune.occupancy kernel=inductor:layer model=qwen3_4b dtype=amp arch=gfx942
    python -m recipes.tune.occupancy kernel=my.py:scale 'args=x=*bf16,n=i32:16,BLOCK=128' grid=4096 num_warps=4,8 waves_per_eu=0,2 save=out

A program of its own, not a method of launch/run.py: it starts no ranks, takes no GPU and leaves a table, not a run.
Keys (several values, separated by commas, are all tried):
    kernel                liger:<operation>, liger:all for what use_liger_kernel=true turns on, trl:lm_head (trl:all) for the head that
                          SFT, DPO and GRPO compute on a GPU where there is Triton, inductor:layer for what torch.compile generates for
                          one decoder layer, forward and backward, or file.py:function (several). inductor:layer takes the attention that
                          the hardware file names for padded and for packed rows; inductor:flash, math, eager, varlen and flex take theirs
    arch                  gfx908 gfx90a gfx942 gfx950 gfx1100 gfx1151 gfx1201 (several; default: all)
    num_warps, num_stages, waves_per_eu, matrix_instr_nonkdim     (several; default: what the launch says)
    model, tokens, dtype  of all but a file's: a file of conf/model (qwen3_8b), tokens in a layer at once (4096), bf16 fp16 fp32 (bf16);
                          amp, of inductor's only, is fp32 weights under bf16 autocast
    args                  of a file's kernel: name=*bf16, name=i32, name=i32:16 (a multiple of 16), name=128 (a constant); commas between
    grid                  of a file's kernel: its number of workgroups, or 64x32
    save                  a folder for the assembly (.s) and Triton's representation with layouts (.ttgir)
    format                text or json
    jobs, timeout_s       compilations at once (default: a core each), and the longest one may take (300)

Of one kernel on one architecture the highest occupancy stands first, and what spills last. That promises no speed: occupancy hides latency,
and a wave with enough independent work needs none of it. Counts of instructions are of the text, not of what runs. The same Triton compiles
the same for a GPU that is there: the table names the version.

Exit codes: 0 done, 2 the request is wrong, 3 Triton or Liger is not installed, 4 for some kernel and architecture nothing has compiled.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.common.errors import UserError, near
from recipes.tune import table
from recipes.tune.amdgpu import (
    ARCHITECTURES,
    ENOUGH_WORKGROUPS,
    Instructions,
    Occupancy,
    Resources,
    count_instructions,
    occupancy,
    read_resources,
)

if TYPE_CHECKING:  # both need Triton, which is missing on most machines: the rest has to say so
    from recipes.tune.compile import Compiled
    from recipes.tune.kernels import Launch

EXIT_DONE, EXIT_USER, EXIT_HOST, EXIT_FAILED, EXIT_INTERRUPTED = 0, 2, 3, 4, 75
SWEPT = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
KEYS = ("kernel", "arch", *SWEPT, "model", "tokens", "dtype", "args", "grid", "save", "format", "jobs", "timeout_s")
LIBRARY_KEYS, FILE_KEYS = ("model", "tokens", "dtype"), ("args", "grid")
DTYPES = ("bf16", "fp16", "fp32", "amp")
NONKDIMS = (0, 16, 32)  # 0: Triton chooses
MOST_TOKENS = 2**24  # Liger looks at a label of each; in bf16 4096 wide they are 137 GB
MOST_SECONDS = 86400  # a day
MODELS = Path(__file__).resolve().parents[2] / "conf/model"

# In kernel= -> module, distribution.
LIBRARIES = {"liger": ("liger_kernel", "liger-kernel"), "trl": ("trl", "trl"), "inductor": ("torch", "torch")}
KERNELS = (
    *("liger:rms_norm", "liger:rope", "liger:swiglu", "liger:cross_entropy", "liger:fused_linear_cross_entropy"),
    "trl:lm_head",
)
# `layer`: with the attention of the hardware file; the others are keys of recipes.tune.layer_kernels.ATTENTIONS.
LAYERS = ("inductor:layer", "inductor:flash", "inductor:math", "inductor:eager", "inductor:varlen", "inductor:flex")
# liger:all and trl:all. What method.args.use_liger_kernel=true puts into our models: liger_kernel.transformers.apply_liger_kernel_to_qwen3,
# _qwen2 and _llama, less their loss, which TRL 1.16 turns off for its own (liger_kernel_config in its SFT, DPO and GRPO trainers): a head
# that launches kernels on any GPU where Triton is installed. TRL's other kernels (selective_log_softmax) none of these trainers calls.
RECIPE_KERNELS = ("liger:rms_norm", "liger:rope", "liger:swiglu", "trl:lm_head")


class HostError(Exception):
    """This machine lacks what the request needs."""


@dataclass(frozen=True)
class Request:
    kernels: tuple[str, ...]
    archs: tuple[str, ...]
    sweep: dict[str, tuple[int, ...]]
    model: Path
    tokens: int
    dtype: str
    args: dict[str, str]
    workgroups: int | None
    save: Path | None
    json: bool
    jobs: int
    timeout_s: float


@dataclass(frozen=True)
class Code:
    """What a compiled kernel is."""

    resources: Resources
    occupancy: Occupancy
    instructions: Instructions


@dataclass(frozen=True)
class Row:
    """One kernel, compiled for one architecture with one set of options; or `error`, why there is no `code`."""

    kernel: str
    arch: str
    options: dict[str, int]
    workgroups: int | None
    per_compute_unit: bool
    seconds: float
    error: str | None = None
    code: Code | None = None

    @property
    def small_grid(self) -> bool:
        """Fewer workgroups than AMD's guide asks for; no AMD GPU has as many compute units as that."""
        return self.per_compute_unit or (self.workgroups is not None and self.workgroups < ENOUGH_WORKGROUPS)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Best first: what compiles, without spills, by occupancy, then by the share of wide loads, then with the fewest registers."""
        if not self.code:
            return (2,)
        needs, loads = self.code.resources, self.code.instructions.global_loads
        wide = loads.get("b128", 0) / max(sum(loads.values()), 1)
        return (bool(needs.spills), -self.code.occupancy.waves, -wide, needs.vgprs)


# ---- The request


def parse(argv: list[str]) -> Request:
    """Raises UserError for anything that is not understood."""
    given: dict[str, str] = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key not in KEYS:
            raise UserError(f"{key} is no key. {near(key, KEYS)} --help explains them")
        if not equals or not value:
            raise UserError(f"{key} has no value. Write {key}=<value>")
        if key in given:
            raise UserError(f"{key} is given twice. Several values are separated by commas: {key}={given[key]},{value}")
        given[key] = value
    if "kernel" not in given:
        raise UserError("kernel is missing: kernel=liger:rms_norm, or kernel=file.py:function. --help explains the rest")
    kernels = _kernels(given["kernel"])
    files = [kernel for kernel in kernels if not _libraries([kernel])]
    for keys, needs, kind in ((LIBRARY_KEYS, _libraries(kernels), "Liger's and TRL's kernels"), (FILE_KEYS, files, "a kernel of a file")):
        for key in keys:
            if key in given and not needs:
                raise UserError(f"{key} is for {kind}, and kernel={given['kernel']} names none")
    if given.get("dtype") == "amp" and set(_libraries(kernels)) - {"inductor"}:
        raise UserError(f"dtype=amp is for inductor's kernels, and kernel={given['kernel']} names others. Run the two apart")
    return Request(
        kernels=kernels,
        archs=tuple(_one_of("arch", arch, ARCHITECTURES) for arch in _several("arch", given.get("arch", ",".join(ARCHITECTURES)))),
        sweep={key: _values(key, given[key]) for key in SWEPT if key in given},
        model=MODELS / f"{_one_of('model', given.get('model', 'qwen3_8b'), [file.stem for file in MODELS.glob('*.yaml')])}.yaml",
        tokens=_number("tokens", given.get("tokens", "4096"), most=MOST_TOKENS),
        dtype=_one_of("dtype", given.get("dtype", "bf16"), DTYPES),
        args=_arguments(given.get("args", "")),
        workgroups=math.prod(_number("grid", side) for side in given["grid"].split("x")) if "grid" in given else None,
        save=_folder(given["save"]) if "save" in given else None,
        json=_one_of("format", given.get("format", "text"), ("text", "json")) == "json",
        jobs=_number("jobs", given.get("jobs", str(os.cpu_count() or 1))),
        timeout_s=_number("timeout_s", given.get("timeout_s", "300"), most=MOST_SECONDS),
    )


def _kernels(text: str) -> tuple[str, ...]:
    kernels = _several("kernel", text)
    for kernel in kernels:
        before, colon, name = kernel.partition(":")
        if not (before and colon and name):
            raise UserError(f"kernel={kernel} names no kernel. Write kernel=liger:rms_norm, or kernel=file.py:function")
        if before in LIBRARIES:
            own = [known.partition(":")[2] for known in (*KERNELS, *LAYERS) if known.startswith(f"{before}:")]
            _one_of(f"kernel={before}", name, (*own, "all"), ":")
    return kernels


def _libraries(kernels: Iterable[str]) -> list[str]:
    """Those whose kernels are asked for."""
    named = {kernel.partition(":")[0] for kernel in kernels}
    return [library for library in LIBRARIES if library in named]


def _several(key: str, text: str) -> tuple[str, ...]:
    """The values between the commas, each once."""
    values = tuple(text.split(","))
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise UserError(f"{key}: {twice} is given twice. Leave one of the two out")
    return values


def _one_of(key: str, value: str, known: Any, separator: str = "=") -> str:
    if value not in known:
        raise UserError(f"{key}{separator}{value} is not known. {near(value, known)}")
    return value


def _number(key: str, text: str, least: int = 1, most: int = 2**31 - 1) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise UserError(f"{key}: {text} is no whole number from {least} to {most}")
    return int(text)


def _values(key: str, text: str) -> tuple[int, ...]:
    values = tuple(_number(key, value, 0 if key in ("waves_per_eu", "matrix_instr_nonkdim") else 1) for value in _several(key, text))
    for value in values:
        if key == "num_warps" and value & (value - 1):
            raise UserError(f"num_warps: {value} is no power of two, which Triton asks for")
        if key == "matrix_instr_nonkdim" and value not in NONKDIMS:
            raise UserError(f"matrix_instr_nonkdim: {value} is no size of a matrix instruction: 16, 32, or 0 to leave it to Triton")
    return values


def _arguments(text: str) -> dict[str, str]:
    pairs = [pair.strip().partition("=") for pair in text.split(",") if pair.strip()]
    for name, _, value in pairs:
        if not value:
            raise UserError(f"args: {name} has no value. Write args={name}=i32 for a type, or args={name}=128 for a constant")
        if [other for other, _, _ in pairs].count(name) > 1:
            raise UserError(f"args: {name} is given twice. Leave one of the two out")
    return {name: value for name, _, value in pairs}


def _folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"save={text}: no folder can be made there ({error.strerror}). Name another") from error
    return folder


# ---- The work


def launches(request: Request) -> list[tuple[Launch, str]]:
    """Return every launch with its architecture.

    Raises HostError where Triton or a library is missing, UserError for a kernel that does not exist.
    """
    try:
        from recipes.tune import kernels

        for library in _libraries(request.kernels):
            importlib.import_module(LIBRARIES[library][0])
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        raise HostError(f"{package} is not installed, and this program compiles with it. In .venv on Linux: make kernels") from error
    found: list[tuple[str, Launch]] = []
    attentions: list[str] = []
    for asked in request.kernels:
        library, _, name = asked.partition(":")
        if library not in LIBRARIES:
            found.append((asked, kernels.file_launch(asked, request.args, request.workgroups)))
            continue
        if library == "inductor":
            attentions.append("layer" if name == "all" else name)
            continue
        for one in [known for known in RECIPE_KERNELS if known.startswith(f"{library}:")] if name == "all" else [asked]:
            found += [(asked, launch) for launch in kernels.library_launches(one, request.model, request.tokens, request.dtype)]
    apart = [(launch, arch) for launch in named_apart(found) for arch in request.archs]
    return apart + (layer_launches(request, attentions) if attentions else [])


def layer_launches(request: Request, attentions: list[str]) -> list[tuple[Launch, str]]:
    """Return what torch.compile generates for one decoder layer with each attention; `layer`: those of the hardware file."""
    import torch

    from recipes.tune import kernels, layer_kernels

    if torch.version.cuda or torch.version.hip:
        raise HostError(
            "kernel=inductor:... needs torch's CPU build, which can take itself for another. make setup TORCH=cpu, make kernels"
        )
    layers = {
        arch: [
            layer_kernels.Layer(request.model, attention, request.tokens, request.dtype)
            for attention in dict.fromkeys(
                one for name in attentions for one in (layer_kernels.attentions_of(arch) if name == "layer" else (name,))
            )
        ]
        for arch in request.archs
    }
    generated = layer_kernels.generate_all(layers, request.jobs)
    return [(launch, arch) for arch in request.archs for launch in kernels.generated_launches(generated[arch])]


def named_apart(found: list[tuple[str, Launch]]) -> list[Launch]:
    """Kernels of one name, from two files or two of Liger's operations, by what was asked for too: they share no row and no file."""
    times = Counter(launch.name for _, launch in found)
    return [launch if times[launch.name] == 1 else replace(launch, name=f"{launch.name} of {asked}") for asked, launch in found]


def configurations(launch: Launch, sweep: dict[str, tuple[int, ...]]) -> list[Launch]:
    """The launch with every combination of the values of `sweep` in place of its own options."""
    return [
        replace(launch, options={**launch.options, **dict(zip(sweep, values, strict=True))})
        for values in itertools.product(*sweep.values())
    ]


def row(launch: Launch, arch: str, compiled: Compiled) -> Row:
    options = launch.blocks | {key: value for key, value in launch.options.items() if type(value) is int}  # not debug and other switches
    start = Row(launch.name, arch, options, launch.workgroups, launch.per_compute_unit, compiled.seconds, compiled.error)
    if compiled.error:
        return start
    needs = read_resources(compiled.isa, compiled.lds_bytes)
    found = occupancy(ARCHITECTURES[arch], needs)
    if not found.workgroups:
        needed = {"VGPR": f"{needs.vgprs} VGPRs", "SGPR": f"{needs.sgprs} SGPRs", "LDS": f"{needs.lds_bytes} bytes of LDS"}
        lacking = " and ".join(needed[limit] for limit in found.limits)
        return replace(start, error=f"cannot start: one workgroup needs {lacking}, which is more than there is")
    return replace(start, code=Code(needs, found, count_instructions(compiled.isa)))


def measure(request: Request, on_progress: Callable[[int, int], None]) -> list[Row]:
    """Every kernel, architecture and configuration, in the order of the request, the best of each group first."""
    tasks = [(one, arch) for launch, arch in launches(request) for one in configurations(launch, request.sweep)]
    from recipes.tune import compile as compiler  # after launches(), which says what is missing

    rows: dict[int, Row] = {}
    on_progress(0, len(tasks))
    for index, compiled in compiler.compile_all(tasks, request.jobs, request.timeout_s):
        rows[index] = row(*tasks[index], compiled)
        if request.save and not compiled.error:
            try:
                compiler.save(request.save, stem(rows[index]), compiled)
            except OSError as error:
                raise UserError(f"save={request.save}: no file can be written there ({error.strerror}). Name another folder") from error
        on_progress(len(rows), len(tasks))
    groups = itertools.groupby((rows[index] for index in range(len(tasks))), key=lambda one: (one.kernel, one.arch))
    return [one for _, group in groups for one in sorted(group, key=lambda one: one.rank)]


def stem(one: Row) -> str:
    """Name of a row's files, without the ending."""
    options = "".join(f"-{key}{value}" for key, value in sorted(one.options.items()))
    return re.sub(r"[^\w.=-]+", "_", f"{one.kernel}-{one.arch}{options}")


def versions(request: Request) -> dict[str, str]:
    """Of what has compiled, and of where the kernels are from."""
    import triton

    distributions = [LIBRARIES[library][1] for library in _libraries(request.kernels)]
    return {"triton": triton.__version__, **{name: importlib.metadata.version(name) for name in distributions}}


def as_json(rows: list[Row], compiled_by: dict[str, str]) -> str:
    objects = [{**asdict(one), "small_grid": one.small_grid} for one in rows]
    return json.dumps({"schema": 1, "versions": compiled_by, "rows": objects}, indent=1)


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return EXIT_DONE if argv else EXIT_USER
    try:
        request = parse(argv)
        with table.progress(shown=not request.json) as on_progress:
            rows = measure(request, on_progress)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_HOST
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if request.json:
        print(as_json(rows, versions(request)))
    else:
        table.show(rows, versions(request), request.save)
    compiled = {(one.kernel, one.arch) for one in rows if not one.error}
    return EXIT_DONE if compiled == {(one.kernel, one.arch) for one in rows} else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
