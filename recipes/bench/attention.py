"""Measure causal attention with every back end, forward and backward, and compare it with fp32.

Operations are counted as FlashAttention does. For s tokens and h query heads of width d, the two
matrix products of the forward pass are 4 s^2 d h operations per row. A causal mask halves them. The
backward pass has five products instead of two, so it counts 2.5 times as many operations. The dtype
is precision.compute, or bf16 for fp8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from launch.core.errors import UserError
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, grid, measure, rate
from recipes.bench.timing import median_ms
from recipes.rank.device import compute_dtype
from recipes.rank.names import name_field
from recipes.rank.program import main

Tensor = torch.Tensor
# From queries, keys and values (rows, heads, tokens, width) to a result in the queries' shape.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PASSES = ("forward", "backward")
CHECKED_TOKENS = 256
# A larger error, as a share of the largest value, is wrong. Correct bf16 kernels stay below 0.02.
WRONG = 0.05
CK = "ck"  # torch's name of Composable Kernel


@dataclass
class AttentionConfig(SeriesConfig):
    """Arguments. `heads`: lists of [query heads, key and value heads, width of a head].

    `tokens`: tokens in one call, which determine the number of rows (at least one).
    """

    backends: list[str] = name_field(lambda: BACKENDS)
    sequences: list[int] = field(default_factory=list)
    heads: list[list[int]] = field(default_factory=list)
    passes: list[str] = name_field(lambda: PASSES)
    tokens: int = 16384
    warmup: int = 5
    repetitions: int = 20


COLUMNS = "backend heads sequence batch_size pass ms tflops share_of_peak keys max_error"


def attention(config: DictConfig) -> dict[str, Any]:
    args = AttentionConfig(**config.trainer_args)
    device, dtype = device_of(args), compute_dtype(config)
    note = (
        "max error: the largest difference from attention in fp32, divided by the largest fp32 "
        f"value, on {CHECKED_TOKENS} tokens."
    )
    table = Table("attention", COLUMNS, figure="tflops", notes=[note])
    cases = grid(
        dtype=[str(dtype).removeprefix("torch.")],
        heads=[" ".join(map(str, shape)) for shape in args.heads],
        sequence=args.sequences,
        backend=args.backends,
        **{"pass": args.passes},
    )

    cached_errors = functools.cache(
        functools.partial(errors, dtype=dtype, device=device, seed=args.seed)
    )

    def work(case: Row) -> Row:
        query_heads, _, width = map(int, case["heads"].split())
        rows = max(1, args.tokens // case["sequence"])
        inputs = random_inputs(rows, case["sequence"], case["heads"], dtype, device)
        call, keys = supported(case["backend"], inputs, case["pass"])
        ms = median_ms(call, device, args.warmup, args.repetitions)
        tflops = rows * operations(case["sequence"], query_heads, width, case["pass"]) / ms / 1e9
        # None of these back ends computes in fp8.
        compute = "bf16" if config.precision.compute == "fp8" else config.precision.compute
        figures = {"batch_size": rows, "ms": ms, **rate(tflops, config, compute), "keys": keys}
        max_errors = cached_errors(case["backend"], case["heads"])
        return {**figures, "max_error": max_errors.get(case["pass"])}

    def note_wrong(rows: list[Row]) -> None:
        wrong = [row for row in rows if (row.get("max_error") or 0) > WRONG]
        largest = {(row["backend"], row["pass"]): row["max_error"] for row in wrong}
        table.notes.extend(
            f"{backend}: wrong results in the {direction} pass. The max error is {error:.2g}."
            for (backend, direction), error in largest.items()
        )

    return measure(config, args, table, cases, work, note_wrong)


def operations(sequence: int, query_heads: int, width: int, direction: str) -> float:
    """Return the operations of one row, by the formula in this module's docstring."""
    forward = 4 * sequence**2 * width * query_heads / 2
    return forward if direction == "forward" else 2.5 * forward


def supported(
    backend: str, inputs: list[Tensor], direction: str
) -> tuple[Callable[[], tuple[Tensor, ...]], str]:
    """Return the call to time, and how it passes keys and values: `grouped` or `repeated`.

    Grouped heads are preferred. If the back end does not support them, keys and values are repeated
    for each query head. Raise UserError with the reason if it supports neither.
    """
    query, key, _ = inputs
    failure = ""
    prefer_flash_kernels(CK if backend == "flash-ck" else None)
    for keys in ("grouped", "repeated") if query.shape[1] != key.shape[1] else ("grouped",):
        try:
            # torch explains in a warning why it has no kernel.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call = prepare_pass(
                    BACKENDS[backend](inputs), inputs, direction, keys == "repeated"
                )
                return call, keys
        except torch.OutOfMemoryError:
            raise
        # Each back end raises a different error for unsupported inputs.
        except (RuntimeError, ImportError, AssertionError, TypeError, ValueError) as error:
            texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
            failure = reason(error, texts)
    raise UserError(failure)


def prepare_pass(
    attend: Attention, inputs: list[Tensor], direction: str, repeated: bool
) -> Callable[[], tuple[Tensor, ...]]:
    """Run one pass once, and return a call that runs it again and returns its results."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1] if repeated else 1
    for tensor in inputs:
        tensor.requires_grad_(direction == "backward")

    def forward() -> Tensor:
        return attend(query, repeat(key, group), repeat(value, group))

    output = forward()
    if direction == "forward":
        return lambda: (forward(),)
    # randn_like(output) would draw values in an order that depends on the kernel's strides.
    gradient = random(output.shape, output.dtype, output.device)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    backward()
    return backward


def reason(error: Exception, warned: list[str]) -> str:
    """Return the error's first sentence, with the warning that explains it, if any."""
    first = re.split(r"(?<=\.)\s", str(error).strip() or type(error).__name__)[0].splitlines()[0]
    for text in warned:
        cause = text.split(" (Triggered internally")[0].strip()
        if cause and "not used because" not in cause and "has been runtime disabled" not in cause:
            return f"{first} ({cause})"
    return first


def errors(
    backend: str, heads: str, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, float]:
    """Return, by pass, the largest difference from fp32 attention over the largest fp32 value.

    `backward` compares the gradients of queries, keys and values. A pass that the back end does not
    support is missing.
    """
    torch.manual_seed(seed)
    inputs = random_inputs(1, CHECKED_TOKENS, heads, dtype, device)
    exact = [tensor.detach().float() for tensor in inputs]
    largest = {}
    for direction in PASSES:
        torch.manual_seed(seed)  # so that both draw the same gradient
        expected = prepare_pass(eager, exact, direction, repeated=False)()
        torch.manual_seed(seed)
        with contextlib.suppress(UserError):  # this error is reported in the row of the pass
            pairs = zip(supported(backend, inputs, direction)[0](), expected, strict=True)
            shares = [
                (actual.float() - exact).abs().max() / exact.abs().max() for actual, exact in pairs
            ]
            largest[direction] = float(torch.stack(shares).max())  # NaN if any is NaN
    return largest


def random_inputs(
    rows: int, sequence: int, heads: str, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return queries, keys and values with normal random values.

    In memory, the heads of a token are adjacent, because a model's projections write them so. If a
    back end needs another layout, the copy is part of its time.
    """
    query_heads, key_heads, width = map(int, heads.split())
    numbers = (query_heads, key_heads, key_heads)
    return [random((rows, number, sequence, width), dtype, device) for number in numbers]


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, heads, tokens, width = shape
    return torch.randn(rows, tokens, heads, width, device=device).to(dtype).transpose(1, 2)


def repeat(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention like transformers' eager method: scores in memory, softmax in fp32."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    masked = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = query @ repeat(key, group).transpose(2, 3) / math.sqrt(query.shape[3])
    shares = F.softmax(scores.masked_fill(masked, -math.inf), dim=-1, dtype=torch.float32)
    return shares.to(query.dtype) @ repeat(value, group)


def sdpa(backend: SDPBackend, _inputs: list[Tensor]) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=grouped
            )

    return attend


def prefer_flash_kernels(library: str | None) -> None:
    """Let SDPA's flash attention use this library, or with None the one of this environment.

    The setting is global, because the backward pass reads it too.
    """
    if hasattr(torch.backends.cuda, "preferred_rocm_fa_library"):  # torch 2.7 or newer
        torch.backends.cuda.preferred_rocm_fa_library(library or _environments_flash_library())


@functools.cache
def _environments_flash_library() -> Any:
    return torch.backends.cuda.preferred_rocm_fa_library()


def flash_ck(inputs: list[Tensor]) -> Attention:
    """Return SDPA's flash attention by AMD's Composable Kernel instead of AOTriton."""
    is_available = getattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False)
    if not is_available():
        raise RuntimeError("torch has Composable Kernel's attention only for gfx942 and gfx950")
    return sdpa(SDPBackend.FLASH_ATTENTION, inputs)


def flash_attn(_inputs: list[Tensor]) -> Attention:
    """Return attention by the flash-attn package, which takes (rows, tokens, heads, width)."""
    func = importlib.import_module("flash_attn").flash_attn_func

    def attend(*inputs: Tensor) -> Tensor:
        return func(*(tensor.transpose(1, 2) for tensor in inputs), causal=True).transpose(1, 2)

    return attend


def flex(inputs: list[Tensor]) -> Attention:
    """Return the output of flex attention, compiled for the shapes on a GPU, eager on a CPU."""
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch.donated_buffer = False  # otherwise the compiled backward pass can run only once
    tokens, device = inputs[0].shape[2], inputs[0].device
    func = torch.compile(flex_attention, dynamic=False) if inputs[0].is_cuda else flex_attention
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device)
    return lambda query, key, value: func(
        query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )


def varlen(inputs: list[Tensor]) -> Attention:
    """Return attention on packed rows by torch's varlen_attn (torch 2.11 or newer)."""
    func = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    rows, _, tokens, _ = inputs[0].shape
    ends = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=inputs[0].device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        packed = [
            tensor.transpose(1, 2).reshape(rows * tokens, tensor.shape[1], tensor.shape[3])
            for tensor in (query, key, value)
        ]
        # A torch without enable_gqa raises TypeError, and `supported` then repeats the keys.
        grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        output = func(*packed, ends, ends, tokens, tokens, window_size=(-1, 0), **grouped)
        return output.reshape(rows, tokens, query.shape[1], query.shape[3]).transpose(1, 2)

    return attend


BACKENDS: dict[str, Callable[[list[Tensor]], Attention]] = {
    "eager": lambda _inputs: eager,
    "sdpa": lambda _inputs: functools.partial(  # torch chooses the kernel
        F.scaled_dot_product_attention, is_causal=True, enable_gqa=True
    ),
    "math": functools.partial(sdpa, SDPBackend.MATH),
    "efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "flash-ck": flash_ck,
    "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash-attn": flash_attn,
    "flex": flex,
    "varlen": varlen,
}

if __name__ == "__main__":
    main(attention)
