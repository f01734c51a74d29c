"""Causal attention by every back end: time, share of the arithmetic limit, and the error against plain attention in fp32.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=bench/attention
    Heads:   python launch/run.py hardware=mi350x method=bench/attention method.args.heads=[[32,32,128],[64,8,128]]

Operations of the forward pass: 4 s^2 d h for s tokens and h query heads of width d (two matrix products, FlashAttention's count), half of
it where the mask is causal; of the backward pass 2.5 times that (five products in place of two). Both are per row and times the rows.
Computed in the dtype of precision= (fp8: bf16).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
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

from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure_rows, result
from recipes.bench.timing import median_ms
from recipes.bench.training import check_tuples
from recipes.common.device import compute_dtype
from recipes.common.errors import UserError
from recipes.common.names import named
from recipes.common.program import main

Tensor = torch.Tensor
# Takes (rows, heads, tokens, width) of queries, keys and values, and returns (rows, heads, tokens, width).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PASSES = ("forward", "backward")
CHECKED_TOKENS = 256
WRONG = 0.05  # share of the largest value; right kernels in bf16 stay below 0.02


@dataclass
class AttentionConfig(SeriesConfig):
    """`heads`: lists of query heads, key and value heads, and their width. `tokens` of a call: rows times sequence, one row at least.

    Raises UserError.
    """

    backends: list[str] = named(lambda: BACKENDS)
    sequences: list[int] = field(default_factory=list)
    heads: list[list[int]] = field(default_factory=list)
    passes: list[str] = named(lambda: PASSES)
    tokens: int = 16384
    warmup: int = 5
    repetitions: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("backends", "sequences", "heads", "passes")
        check_tuples("heads", self.heads, "query heads", "key heads", "width")
        for shape in self.heads:
            if shape[0] % shape[1]:
                raise UserError(f"method.args.heads: {shape}: {shape[1]} key heads do not divide {shape[0]} query heads.")


def attention(config: DictConfig) -> dict[str, Any]:
    args = AttentionConfig(**config.trainer_args)
    device, dtype = device_of(args), compute_dtype(config)
    table = Table(
        "attention",
        figure="tflops",
        columns=[
            Column("backend", "backend"),
            Column("heads", "q kv width"),
            Column("sequence", "sequence"),
            Column("batch_size", "batch"),
            Column("pass", "pass"),
            Column("ms", "ms", 3),
            Column("tflops", "TFLOPS", 1),
            Column("share_of_peak", "of peak", 2),
            Column("keys", "keys"),
            Column("max_error", "max error", 4),
        ],
        notes=[
            "Operations: 4 s^2 d h forward, halved by the causal mask; backward 2.5 times forward.",
            f"max error: the largest difference from attention in fp32 over its largest value, on {CHECKED_TOKENS} tokens.",
        ],
    )
    name = str(dtype).removeprefix("torch.")
    checked = functools.cache(lambda backend, heads: errors(backend, heads, dtype, device, args.seed))
    peak = config.hardware.peak_tflops.get("bf16" if config.precision.compute == "fp8" else config.precision.compute)
    cases = [
        {"backend": backend, "heads": " ".join(map(str, shape)), "sequence": sequence, "dtype": name, "pass": one_pass}
        for shape, sequence, backend, one_pass in itertools.product(args.heads, args.sequences, args.backends, args.passes)
    ]

    def work(case: Row) -> Row:
        found = one(case, args, dtype, device, peak)
        return {**found, "max_error": checked(case["backend"], case["heads"]).get(case["pass"])}

    rows = measure_rows(config, args, table, cases, work, [])
    wrong = {(row["backend"], row["pass"]): row["max_error"] for row in rows if (row.get("max_error") or 0) > WRONG}
    for (backend, one_pass), error in wrong.items():
        table.notes.append(f"{backend} is wrong in the {one_pass} pass: its error is {error:.2g} of the largest value.")
    return result(config, args, table, rows)


def one(case: Row, args: AttentionConfig, dtype: torch.dtype, device: torch.device, peak: float | None) -> Row:
    """`keys`: grouped as they are, or repeated for each query head where the back end takes no groups. Raises UserError, see `usable`."""
    query_heads, _, width = map(int, case["heads"].split())
    rows = max(1, args.tokens // case["sequence"])
    torch.manual_seed(args.seed)
    inputs = random_inputs(rows, case["sequence"], case["heads"], dtype, device)
    call, keys = usable(case["backend"], inputs, case["pass"])
    ms = median_ms(call, device, args.warmup, args.repetitions)
    tflops = rows * operations(case["sequence"], query_heads, width, case["pass"]) / ms / 1e9
    return {"batch_size": rows, "ms": ms, "tflops": tflops, "share_of_peak": tflops / peak if peak else None, "keys": keys}


def operations(sequence: int, query_heads: int, width: int, one_pass: str, causal: bool = True) -> float:
    """Of one row; the source is this module's docstring."""
    forward = 4 * sequence**2 * width * query_heads / (2 if causal else 1)
    return forward if one_pass == "forward" else 2.5 * forward


def usable(backend: str, inputs: list[Tensor], one_pass: str) -> tuple[Callable[[], object], str]:
    """The call that is timed, and `grouped` or `repeated`. Raises UserError with the reason where the back end refuses these inputs."""
    query, key, _ = inputs
    refused: list[str] = []
    for keys in ("grouped", "repeated") if query.shape[1] != key.shape[1] else ("grouped",):
        try:
            with warnings.catch_warnings(record=True) as said:  # torch warns of the reason for which it has no kernel
                warnings.simplefilter("always")
                return timed(BACKENDS[backend](inputs), inputs, one_pass, keys == "repeated"), keys
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ImportError, AssertionError, TypeError, ValueError) as error:  # each back end has its own way to refuse
            refused.append(reason(error, [str(warning.message) for warning in said if warning.category is UserWarning]))
    raise UserError(refused[-1])


def timed(attend: Attention, inputs: list[Tensor], one_pass: str, repeated: bool) -> Callable[[], object]:
    """The call of one pass, after it has been called once."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1] if repeated else 1

    def forward() -> Tensor:
        return attend(query, repeat(key, group), repeat(value, group))

    if one_pass == "forward":
        for tensor in inputs:
            tensor.requires_grad_(False)
        forward()
        return forward
    for tensor in inputs:
        tensor.requires_grad_(True)
    output = forward()
    gradient = random(output.shape, output.dtype, output.device)  # the same whatever strides a kernel gives its output

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    backward()
    return backward


def reason(error: Exception, said: list[str]) -> str:
    """The error's first sentence, and the warning that tells why there is no kernel."""
    first = re.split(r"(?<=\.)\s", str(error).strip() or type(error).__name__)[0].splitlines()[0]
    causes = [line.split(" (Triggered internally")[0].strip() for line in said]
    causes = [line for line in causes if line and "not used because" not in line and "has been runtime disabled" not in line]
    return f"{first} ({causes[0]})" if causes else first


def errors(backend: str, heads: str, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, float]:
    """Pass -> the largest difference from plain attention in fp32 on the same inputs, over the largest value of that.

    `backward` is over the gradients of queries, keys and values. A pass that the back end lacks is absent.
    """
    torch.manual_seed(seed)
    inputs = random_inputs(1, CHECKED_TOKENS, heads, dtype, device)
    exact = [tensor.detach().float() for tensor in inputs]
    found = {}
    for one_pass in PASSES:
        torch.manual_seed(seed)  # the same random gradient for both
        wanted = timed(eager, exact, one_pass, repeated=False)()
        torch.manual_seed(seed)
        try:
            got = usable(backend, inputs, one_pass)[0]()
        except UserError:  # the row of this pass says so
            continue
        found[one_pass] = max(distance(a, b) for a, b in zip(as_tuple(got), as_tuple(wanted), strict=True))
    return found


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def random_inputs(rows: int, sequence: int, heads: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries, keys and values, normal. `heads` as a row has it.

    In memory a token's heads stand together, as a model's projections leave them: a back end that wants them otherwise pays for the copy.
    """
    query_heads, key_heads, width = map(int, heads.split())
    return [random((rows, number, sequence, width), dtype, device) for number in (query_heads, key_heads, key_heads)]


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, heads, tokens, width = shape
    return torch.randn(rows, tokens, heads, width, device=device).to(dtype).transpose(1, 2)


def repeat(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scores, softmax in fp32 and weighted sum, each written to memory, as transformers does without a kernel."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    masked = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = query @ repeat(key, group).transpose(2, 3) / math.sqrt(query.shape[3])
    shares = F.softmax(scores.masked_fill(masked, -math.inf), dim=-1, dtype=torch.float32).to(query.dtype)
    return shares @ repeat(value, group)


def sdpa(backend: SDPBackend, _inputs: list[Tensor]) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])

    return attend


def flash_attn(_inputs: list[Tensor]) -> Attention:
    """The package; it takes (rows, tokens, heads, width)."""
    func = importlib.import_module("flash_attn").flash_attn_func
    return lambda *inputs: func(*(tensor.transpose(1, 2) for tensor in inputs), causal=True).transpose(1, 2)


def flex(inputs: list[Tensor]) -> Attention:
    """Compiled for these shapes on a GPU; on a CPU as it is, since nothing is learned there from waiting for a compiler."""
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch.donated_buffer = False  # else the compiled backward pass runs once only
    torch._dynamo.reset()  # it compiles a function for eight shapes, and then no more
    query = inputs[0]
    func = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, query.shape[2], query.shape[2], device=query.device)
    return lambda query, key, value: func(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def varlen(inputs: list[Tensor]) -> Attention:
    """Rows one after the other without padding, here all of one length: torch's own since 2.10, else flash-attn's."""
    rows, _, tokens, _ = inputs[0].shape
    ends = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=inputs[0].device)
    func = varlen_function(ends, tokens)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        packed = [tensor.transpose(1, 2).reshape(rows * tokens, tensor.shape[1], tensor.shape[3]) for tensor in (query, key, value)]
        return func(*packed).reshape(rows, tokens, query.shape[1], query.shape[3]).transpose(1, 2)

    return attend


def varlen_function(ends: Tensor, tokens: int) -> Attention:
    """Raises ImportError where neither is there."""
    try:
        func = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        func = importlib.import_module("flash_attn").flash_attn_varlen_func
        return lambda *packed: func(*packed, ends, ends, tokens, tokens, causal=True)
    names = inspect.signature(func).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}  # until torch 2.10

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}  # a TypeError where it takes none: keys are repeated then
        return func(query, key, value, ends, ends, tokens, tokens, **causal, **grouped)

    return call


BACKENDS: dict[str, Callable[[list[Tensor]], Attention]] = {
    "eager": lambda _inputs: eager,
    "sdpa": lambda _inputs: functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),  # what torch chooses
    "math": functools.partial(sdpa, SDPBackend.MATH),
    "efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash-attn": flash_attn,
    "flex": flex,
    "varlen": varlen,
}

if __name__ == "__main__":
    main(attention)
