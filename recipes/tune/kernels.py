"""Find the Triton kernels of a library to compile, with their arguments.

Kernels of Liger and TRL are found by running these libraries on tensors without memory. Their
launches are recorded instead of executed. This needs Triton, torch and, for its kernels, Liger.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction, KernelParam

from recipes.rank.device import DTYPES
from recipes.tune import layer_kernels
from recipes.tune.layer_kernels import Generated

# torch's dtypes -> Triton's names. The type of a pointer is `*` and one of these names.
POINTEES = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.uint8: "u8",
    **{getattr(torch, f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)},
}
TYPES = (*POINTEES.values(), "u16", "u32", "u64", "fp8e4nv", "fp8e4b8", "fp8e5", "fp8e5b16")

# Attributes of arguments that Triton's launcher passes to its compiler
# (HIPBackend.get_tensor_specialization of Triton 3.7).
DIVISIBLE = ["tt.divisibility", 16]  # a number, or an address, is a multiple of 16
SMALL = ["tt.pointer_range", 32]  # a tensor is smaller than 2 GB
ANY_NUMBER = 17  # Triton specializes on 1 and on multiples of 16 only


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that its compilation depends on, except the architecture."""

    name: str
    function: JITFunction
    signature: dict[str, str]  # parameter -> type; "constexpr" for compile-time constants
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]  # by the parameter's position
    # num_warps, num_stages, waves_per_eu, matrix_instr_nonkdim
    options: dict[str, int] = field(default_factory=dict)
    workgroups: int | None = None  # in the grid; None if unknown
    per_compute_unit: bool = False  # the grid has one workgroup per compute unit
    # of a user's file: constants that args= sweeps, values of the other arguments, and the grid
    tiles: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] | None = None

    @property
    def identity(self) -> str:
        """Return a text that is equal for all launches that compile to the same code."""
        code = self.function.src.partition("(")[2]  # without the name, which Inductor numbers
        return repr((code, self.signature, self.constants, self.attributes, self.options))

    @property
    def blocks(self) -> dict[str, int]:
        """Return Inductor's block sizes and the swept constants, which configurations differ in."""
        constants = self.constants.items()
        return {k: v for k, v in constants if k.endswith("BLOCK") or k in self.tiles}


# ---- Kernels of Liger and TRL


@dataclass(frozen=True)
class Shapes:
    """The sizes in one pass of `tokens` through a model's layers, in `dtype`."""

    tokens: int
    dtype: torch.dtype
    model: SimpleNamespace  # a file of conf/model

    def leaf(self, *size: int) -> torch.Tensor:
        """Return a tensor without memory that requires a gradient."""
        return torch.empty(size, dtype=self.dtype, device="meta", requires_grad=True)


def run_rms_norm(shapes: Shapes) -> None:
    from liger_kernel.ops import LigerRMSNormFunction

    model, norms = shapes.model, [(shapes.tokens, shapes.model.hidden_size)]
    if model.architecture.startswith("qwen3"):  # Qwen3 also normalizes query and key heads
        numbers = (model.num_heads, model.num_kv_heads)
        norms += [(shapes.tokens * heads, model.head_dim) for heads in numbers]
    for norm in norms:
        inputs = shapes.leaf(*norm), shapes.leaf(norm[1])
        LigerRMSNormFunction.apply(*inputs, 1e-6, 0.0, "llama").sum().backward()


def run_rope(shapes: Shapes) -> None:
    from liger_kernel.ops import LigerRopeFunction

    heads, width = (shapes.model.num_heads, shapes.model.num_kv_heads), shapes.model.head_dim
    inputs = [shapes.leaf(1, number, shapes.tokens, width) for number in heads]
    angles = shapes.leaf(1, shapes.tokens, width).detach()
    sum(out.sum() for out in LigerRopeFunction.apply(*inputs, angles, angles)).backward()


def run_swiglu(shapes: Shapes) -> None:
    from liger_kernel.ops import LigerSiLUMulFunction

    gate = shapes.leaf(shapes.tokens, shapes.model.intermediate_size)
    LigerSiLUMulFunction.apply(gate, gate).sum().backward()


def run_cross_entropy(shapes: Shapes) -> None:
    from liger_kernel.ops import cross_entropy

    logits = shapes.leaf(shapes.tokens, shapes.model.vocab_size)
    # A tensor with memory, because Liger checks that labels are in range.
    labels = torch.zeros(shapes.tokens, dtype=torch.int64)
    cross_entropy.cross_entropy_forward(logits, labels, None, -100, 0.0, 0.0, "mean", None, False)
    # With a gradient of 1, Liger would skip the kernel that scales gradients.
    cross_entropy.cross_entropy_backward(logits, torch.tensor(2.0))


# Outputs of the head that TRL 1.16 requests in addition to log-probabilities.
OUTPUTS = (
    (),  # reference model
    ("entropy", "is_top1"),  # SFT
    ("entropy", "mean_logits", "is_top1"),  # DPO
    ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs"),  # DPO with use_weighting
    ("entropy",),  # GRPO
)


def run_lm_head(shapes: Shapes) -> None:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    model = shapes.model
    # Fake tensors, because the head queries autocast, which the meta device does not support.
    with FakeTensorMode(), head_uses_triton():
        like = {"dtype": shapes.dtype, "requires_grad": True}
        hidden = torch.empty(shapes.tokens, model.hidden_size, **like)
        head = torch.empty(model.vocab_size, model.hidden_size, **like)
        targets = torch.empty(shapes.tokens, dtype=torch.int64)
        for names in OUTPUTS:
            outputs = ChunkedLogProbFunction.apply(
                hidden, head, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, names
            )
            outputs[0].sum().backward(retain_graph=True)
        (outputs[0] + outputs[1]).sum().backward()  # GRPO with entropy_coef


def head_uses_triton() -> contextlib.AbstractContextManager[Any]:
    """Return a patch that makes TRL's head launch Triton kernels on any device."""
    return mock.patch("trl.kernels.chunked_logprob._use_triton", return_value=True)


OPERATIONS: dict[str, Callable[[Shapes], None]] = {
    "liger:rms_norm": run_rms_norm,
    "liger:rope": run_rope,
    "liger:swiglu": run_swiglu,
    "liger:cross_entropy": run_cross_entropy,
    "trl:lm_head": run_lm_head,
}

# The grid of these kernels is the number of compute units. Neither this number nor the number of
# rows per program is known here.
PER_COMPUTE_UNIT = ("_rms_norm_backward_kernel", "_block_rms_norm_backward_kernel")


def library_launches(operation: str, model: Path, tokens: int, dtype: str) -> list[Launch]:
    """Return the launches of a library's operation on ROCm, forward and backward.

    Each distinct kernel is returned once, with its smallest grid. `model` is a file of conf/model.
    """
    if operation.startswith("trl:"):
        # Import before recording() makes torch look like ROCm, because the imports would then look
        # for ROCm's tools.
        import trl.trainer.utils  # noqa: F401
    shapes = Shapes(tokens, DTYPES[dtype], SimpleNamespace(**yaml.safe_load(model.read_text())))
    with recording() as recorded:
        OPERATIONS[operation](shapes)
    distinct: dict[str, Launch] = {}
    for launch in recorded:
        earlier = distinct.setdefault(launch.identity, launch)
        if (launch.workgroups or 0) < (earlier.workgroups or 0):
            distinct[launch.identity] = launch
    return list(distinct.values())


def distinct_names(launches: list[tuple[str, Launch]]) -> list[Launch]:
    """Make the names of launches distinct.

    To equal names, append the constants that differ, and the value of kernel= if it differs.
    """
    renamed = []
    for key, launch in launches:
        namesakes = [pair for pair in launches if pair[1].name == launch.name]
        words = [
            f"{name}={value}"
            for name, value in launch.constants.items()
            if name not in launch.tiles
            and any(namesake.constants.get(name) != value for _, namesake in namesakes)
        ]
        words += [f"of {key}"] if any(other_key != key for other_key, _ in namesakes) else []
        renamed.append(replace(launch, name=" ".join([launch.name, *words])))
    return renamed


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record kernel launches instead of executing them, and yield the list of launches.

    Meanwhile torch looks like a ROCm build, so that Liger chooses ROCm's number of warps.
    """
    recorded: list[Launch] = []

    def record(function: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = function.arg_names
        values = dict(zip(names, args, strict=False))
        values |= {key: value for key, value in named.items() if key in names}
        options = {key: value for key, value in named.items() if key not in names}
        per_compute_unit = function.__name__ in PER_COMPUTE_UNIT
        if per_compute_unit and "rows_per_program" in values:
            values["rows_per_program"] = ANY_NUMBER
        launch = specialize(function, values, options)
        if per_compute_unit:
            recorded.append(replace(launch, per_compute_unit=True))
        else:
            sides = grid(values) if callable(grid) else grid
            recorded.append(replace(launch, workgroups=math.prod(sides)))

    rocm = mock.patch.object(torch.version, "hip", torch.version.hip or "0")
    with rocm, mock.patch.object(JITFunction, "run", record):
        yield recorded


def specialize(function: JITFunction, values: dict[str, Any], options: dict[str, int]) -> Launch:
    """Return the launch of a call, specialized on its arguments as by Triton's launcher."""
    arguments = []
    for parameter in function.params:
        value = values.get(parameter.name, parameter.default)
        arguments.append((*argument_of(parameter, value), value))
    return launch_of(function.__name__.removeprefix("_"), function, arguments, options)


def launch_of(
    name: str,
    function: JITFunction,
    arguments: list[tuple[str, list[list[Any]], Any]],
    options: dict[str, int],
    workgroups: int | None = None,
) -> Launch:
    """Return a launch from the type, attributes and value of each parameter."""
    by_name = dict(zip(function.arg_names, arguments, strict=True))
    signature = {key: kind for key, (kind, _, _) in by_name.items()}
    constants = {key: value for key, (kind, _, value) in by_name.items() if kind == "constexpr"}
    attributes = {(i,): known for i, (_, known, _) in enumerate(arguments) if known}
    return Launch(name, function, signature, constants, attributes, options, workgroups)


def argument_of(parameter: KernelParam, value: Any) -> tuple[str, list[list[Any]]]:
    """Return the type and attributes of an argument.

    None (an omitted tensor) and 1 (a contiguous stride) become compile-time constants.
    """
    may_specialize = not parameter.do_not_specialize
    is_one = type(value) is int and value == 1
    if parameter.is_constexpr or value is None or (is_one and may_specialize):
        return "constexpr", []
    if isinstance(value, torch.Tensor):
        small = [SMALL] if value.untyped_storage().size() <= 2**31 - 1 else []
        return f"*{POINTEES[value.dtype]}", [DIVISIBLE, *small]
    if isinstance(value, bool):
        return "u1", []
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return kind, [DIVISIBLE] if value % 16 == 0 and may_specialize else []
    return "fp32", []


# ---- Kernels of Inductor


def generated_launches(generated: Iterable[Generated]) -> list[Launch]:
    """Return the launches of kernels that were generated by recipes.tune.layer_kernels."""
    from torch._inductor.codecache import PyCodeCache

    launches = []
    for kernel in generated:
        module = PyCodeCache.load(kernel.source.replace(layer_kernels.DRIVER, ""))
        function = getattr(module, kernel.function).fn
        name = f"{kernel.layer.attention} {kernel.label}"
        fields = (kernel.signature, kernel.constants, kernel.attributes, kernel.options)
        launches.append(Launch(name, function, *fields))
    return launches
