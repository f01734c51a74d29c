"""Which Triton kernels there are to compile and with which arguments: Liger's and TRL's as they themselves would launch them, or one of a
user's file.

Needs Triton, torch, and for Liger's kernels liger-kernel. Nothing is launched: the library's host code runs on tensors that have shapes and
no memory, and where it would launch a kernel, what it would launch is written down.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction, KernelParam

from recipes.common.errors import UserError, near
from recipes.tune import layer_kernels
from recipes.tune.layer_kernels import Generated

# Triton's names of types. A pointer is `*` and the type of what it points to.
POINTEES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
TYPES = (*POINTEES.values(), "u16", "u32", "u64", "fp8e4nv", "fp8e4b8", "fp8e5", "fp8e5b16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# What Triton's launcher tells its compiler of arguments: an address or a number is a multiple of 16, a tensor is smaller than 2 GB
# (HIPBackend.get_tensor_specialization of Triton 3.7). torch allocates at multiples of 512 bytes.
DIVISIBLE = ["tt.divisibility", 16]
SMALL = ["tt.pointer_range", 32]
ANY_NUMBER = 17  # neither 1 nor a multiple of 16: nothing is known of it


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that its compilation depends on, but for the architecture."""

    name: str
    function: JITFunction
    signature: dict[str, str]  # parameter -> type; "constexpr" for what is compiled in
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]  # by position of the parameter
    options: dict[str, int] = field(default_factory=dict)  # num_warps, num_stages, waves_per_eu, matrix_instr_nonkdim
    workgroups: int | None = None  # of the grid; None: not known
    per_compute_unit: bool = False  # the grid is one workgroup a compute unit, however large the input

    @property
    def same(self) -> str:
        """Equal for launches that compile to the same code."""
        code = self.function.src.partition("(")[2]  # without its name, in which Inductor counts
        return repr((code, self.signature, self.constants, self.attributes, self.options))

    @property
    def blocks(self) -> dict[str, int]:
        """Inductor's block sizes, which are constants of its kernels and what its configurations differ in."""
        return {name: value for name, value in self.constants.items() if name.endswith("BLOCK")}


# ---- Liger's and TRL's


@dataclass(frozen=True)
class Shapes:
    """Of a model's step: `tokens` go through the layers at once, in `dtype`."""

    tokens: int
    dtype: torch.dtype
    model: SimpleNamespace  # a file of conf/model

    def empty(self, *size: int, **options: Any) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device="meta", **options)


def _rms_norm(shapes: Shapes) -> None:
    from liger_kernel.ops import rms_norm

    model, norms = shapes.model, [(shapes.tokens, shapes.model.hidden_size)]
    if model.architecture.startswith("qwen3"):  # normalizes each head of queries and of keys
        norms += [(shapes.tokens * heads, model.head_dim) for heads in (model.num_heads, model.num_kv_heads)]
    for rows, columns in norms:
        x, weight = shapes.empty(rows, columns), shapes.empty(columns)
        _, x, rstd, block, warps, casting = rms_norm.rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)
        rms_norm.rms_norm_backward(shapes.empty(rows, columns), x, weight, rstd, 0.0, casting, block, warps, True, None)


def _rope(shapes: Shapes) -> None:
    from liger_kernel.ops import rope

    model = shapes.model
    query, key = (shapes.empty(1, heads, shapes.tokens, model.head_dim) for heads in (model.num_heads, model.num_kv_heads))
    angles = shapes.empty(1, shapes.tokens, model.head_dim)
    rope.rope_forward(query, key, angles, angles)
    rope.rope_backward(query, key, angles, angles)


def _swiglu(shapes: Shapes) -> None:
    from liger_kernel.ops import swiglu

    gate = shapes.empty(shapes.tokens, shapes.model.intermediate_size)
    swiglu.swiglu_forward(gate, gate)
    swiglu.swiglu_backward(gate, gate, gate)


def _cross_entropy(shapes: Shapes) -> None:
    from liger_kernel.ops import cross_entropy

    logits = shapes.empty(shapes.tokens, shapes.model.vocab_size, requires_grad=True)
    labels = torch.zeros(shapes.tokens, dtype=torch.int64)  # real: Liger looks for labels that are out of range
    cross_entropy.cross_entropy_forward(logits, labels, None, -100, 0.0, 0.0, "mean", None, False)
    cross_entropy.cross_entropy_backward(logits, torch.tensor(2.0))  # not 1: the gradient of a loss that is averaged on needs a kernel


def _fused_linear_cross_entropy(shapes: Shapes) -> None:
    from liger_kernel.ops import fused_linear_cross_entropy as fused

    model = shapes.model
    hidden = shapes.empty(shapes.tokens, model.hidden_size, requires_grad=True)
    head = shapes.empty(model.vocab_size, model.hidden_size, requires_grad=True)
    labels = torch.zeros(shapes.tokens, dtype=torch.int64)
    _, _, _, _, grad_input, grad_weight, grad_bias = fused.fused_linear_cross_entropy_forward(hidden, head, labels)
    fused.fused_linear_cross_entropy_backward(torch.tensor(2.0), grad_input, grad_weight, grad_bias)


# What TRL 1.16's trainers ask of their head, beside log-probabilities: a reference model, SFT, DPO, DPO with use_weighting, GRPO.
_ASKED = (
    (),
    ("entropy", "is_top1"),
    ("entropy", "mean_logits", "is_top1"),
    ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs"),
    ("entropy",),
)


def _lm_head(shapes: Shapes) -> None:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    model = shapes.model
    with FakeTensorMode(), head_takes_triton():  # no memory either; the head asks whether autocast is on, which meta has no answer to
        hidden = torch.empty(shapes.tokens, model.hidden_size, dtype=shapes.dtype, requires_grad=True)
        head = torch.empty(model.vocab_size, model.hidden_size, dtype=shapes.dtype, requires_grad=True)
        targets = torch.empty(shapes.tokens, dtype=torch.int64)
        for asked in _ASKED:
            found = ChunkedLogProbFunction.apply(hidden, head, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, asked)
            found[0].sum().backward(retain_graph=True)
        (found[0] + found[1]).sum().backward()  # GRPO with entropy_coef


@contextlib.contextmanager
def head_takes_triton() -> Iterator[None]:
    """Inside, TRL's head launches kernels wherever its tensors are. Of itself it does so on GPUs alone."""
    from trl.kernels import chunked_logprob

    saved = chunked_logprob._use_triton
    chunked_logprob._use_triton = lambda device: True
    try:
        yield
    finally:
        chunked_logprob._use_triton = saved


_OPERATIONS: dict[str, Callable[[Shapes], None]] = {
    "liger:rms_norm": _rms_norm,
    "liger:rope": _rope,
    "liger:swiglu": _swiglu,
    "liger:cross_entropy": _cross_entropy,
    "liger:fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "trl:lm_head": _lm_head,
}

# Their grid is torch's count of compute units, which these tensors have none of, and so are the rows that each program goes through.
_PER_COMPUTE_UNIT = ("_rms_norm_backward_kernel", "_block_rms_norm_backward_kernel")


def library_launches(operation: str, model: Path, tokens: int, dtype: str) -> list[Launch]:
    """What a library launches on ROCm for one operation, forward and backward, each distinct kernel once with its smallest grid.

    `model` is a file of conf/model, whose shape is taken.
    """
    if operation.startswith("trl:"):
        import trl.trainer.utils  # noqa: F401  before recording(): what it imports looks for ROCm's tools where torch is a ROCm one
    shapes = Shapes(tokens, DTYPES[dtype], SimpleNamespace(**yaml.safe_load(model.read_text())))
    with recording() as found:
        _OPERATIONS[operation](shapes)
    distinct: dict[str, Launch] = {}
    for launch in found:
        earlier = distinct.setdefault(launch.same, launch)
        if (launch.workgroups or 0) < (earlier.workgroups or 0):
            distinct[launch.same] = launch
    return _named_apart(list(distinct.values()))


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, a launch is written down instead of made, and Liger takes this torch for a ROCm one (it chooses fewer warps there)."""
    found: list[Launch] = []

    def record(function: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(function.arg_names, args, strict=False)) | {k: v for k, v in named.items() if k in function.arg_names}
        options = {key: value for key, value in named.items() if key not in function.arg_names}
        per_compute_unit = function.__name__ in _PER_COMPUTE_UNIT
        if "rows_per_program" in values and per_compute_unit:
            values["rows_per_program"] = ANY_NUMBER
        workgroups = None if per_compute_unit else math.prod(grid(values) if callable(grid) else grid)
        found.append(replace(specialize(function, values, options), workgroups=workgroups, per_compute_unit=per_compute_unit))

    saved = JITFunction.run, torch.version.hip
    JITFunction.run, torch.version.hip = record, torch.version.hip or "0"
    try:
        yield found
    finally:
        JITFunction.run, torch.version.hip = saved


def specialize(function: JITFunction, values: dict[str, Any], options: dict[str, int]) -> Launch:
    """What Triton's launcher makes of the arguments of a call: types, constants, and what is known of each number and address."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, parameter in enumerate(function.params):
        value = values.get(parameter.name, parameter.default)
        signature[parameter.name], known = _argument(parameter, value)
        if signature[parameter.name] == "constexpr":
            constants[parameter.name] = value
        if known:
            attributes[position,] = known
    return Launch(function.__name__.removeprefix("_"), function, signature, constants, attributes, options)


def _argument(parameter: KernelParam, value: Any) -> tuple[str, list[list[Any]]]:
    """The type of one argument and what is known of it. None and 1 are compiled in: a tensor that is left out, a contiguous stride."""
    free = not parameter.do_not_specialize
    if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and free):
        return "constexpr", []
    if isinstance(value, torch.Tensor):
        return f"*{POINTEES[value.dtype]}", [DIVISIBLE, SMALL] if value.untyped_storage().size() <= 2**31 - 1 else [DIVISIBLE]
    if isinstance(value, bool):
        return "u1", []
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", [DIVISIBLE] if value % 16 == 0 and free else []
    return "fp32", []


def _named_apart(launches: list[Launch]) -> list[Launch]:
    """The same kernel twice is told apart by the constants that differ."""
    named = []
    for launch in launches:
        twins = [other for other in launches if other.name == launch.name]
        apart = [key for key, value in launch.constants.items() if any(other.constants.get(key) != value for other in twins)]
        suffix = " ".join(f"{key}={launch.constants[key]}" for key in apart)
        named.append(replace(launch, name=f"{launch.name} {suffix}".strip()))
    return named


# ---- Inductor's


def generated_launches(generated: Iterable[Generated]) -> list[Launch]:
    """Return the launches of what recipes.tune.layer_kernels has generated in another process."""
    functions = {one.source: generated_function(one) for one in generated}
    return [
        Launch(f"{one.layer.attention} {one.label}", functions[one.source], one.signature, one.constants, one.attributes, one.options)
        for one in generated
    ]


def generated_function(generated: Generated) -> JITFunction:
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(layer_kernels.without_driver(generated.source)), generated.function).fn


# ---- A user's


def file_launch(place: str, arguments: dict[str, str], workgroups: int | None) -> Launch:
    """`file.py:function` with its arguments as text: a type (`*bf16`, `i32`, `i32:16` for a multiple of 16) or a constant.

    Pointers are taken for torch's: multiples of 16, to less than 2 GB. A parameter that is not named has the type of its annotation, or its
    default. Raises UserError for what does not exist, and for a parameter of which nothing is known.
    """
    file, _, name = place.rpartition(":")
    functions = _functions_of(Path(file))
    if name not in functions:
        raise UserError(f"{file} has no Triton kernel named {name}: no function under @triton.jit. {near(name, functions)}")
    function = functions[name]
    unknown = [key for key in arguments if key not in function.arg_names]
    if unknown:
        raise UserError(f"args: {name} has no parameter {unknown[0]}. {near(unknown[0], function.arg_names)}")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, parameter in enumerate(function.params):
        text = arguments.get(parameter.name) or parameter.annotation_type
        kind, _, multiple = text.partition(":")
        known: list[list[Any]] = []
        if not text and parameter.has_default:
            constants[parameter.name] = parameter.default
            kind, known = _argument(parameter, parameter.default)
        elif not text:
            raise UserError(
                f"args: nothing is known of {name}'s parameter {parameter.name}. Say what it is, as args={parameter.name}="
                f"{'128' if parameter.is_constexpr else '*bf16'} (types: {', '.join(TYPES)}; a pointer has a * before it)"
            )
        elif parameter.is_constexpr or not re.fullmatch(rf"(\**|\*k)({'|'.join(TYPES)})", kind):
            constants[parameter.name], kind = _constant(parameter.name, text), "constexpr"
        elif multiple not in ("", "16"):
            raise UserError(f"args: {parameter.name}={text}: Triton tells apart multiples of 16 only. Write {kind}:16, or {kind}")
        elif kind.startswith("*"):
            known = [DIVISIBLE, SMALL]
        elif multiple:
            known = [DIVISIBLE]
        signature[parameter.name] = kind
        if known:
            attributes[position,] = known
    constants = {key: value for key, value in constants.items() if signature[key] == "constexpr"}
    return Launch(name, function, signature, constants, attributes, {}, workgroups)


def _functions_of(file: Path) -> dict[str, JITFunction]:
    if not file.is_file():
        raise UserError(f"There is no file {file}. A kernel is named as kernel=path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"kernels_of_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is no Python file. A kernel is named as kernel=path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    sys.path.insert(0, str(file.parent))  # as `python file.py` does: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's own code raises is the user's to mend
        raise UserError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    functions = {name: _below(value) for name, value in vars(module).items()}
    return {name: value for name, value in functions.items() if isinstance(value, JITFunction)}


def _below(value: Any) -> Any:
    """The kernel under @triton.autotune and @triton.heuristics, which keep it in `fn`; their choices have to be given as arguments."""
    while not isinstance(value, JITFunction) and type(value).__module__.startswith("triton.") and hasattr(value, "fn"):
        value = value.fn
    return value


def _constant(name: str, text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("tl.") and isinstance(getattr(tl, text[3:], None), tl.dtype):
        return getattr(tl, text[3:])
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    raise UserError(
        f"args: {name}={text} is neither a type ({', '.join(TYPES)}, with * before it for a pointer) nor a constant "
        f"(a number, true, false, none, tl.float32). {near(text.lstrip('*'), TYPES)}"
    )
