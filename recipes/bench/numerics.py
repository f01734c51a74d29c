"""Compare the kernels of training steps with fp32 on the same GPU: maximum and mean error.

A model trains like a run of method=sft, on packed rows that it can learn. After each step, every
kernel is computed twice more from the inputs and the output gradient that it had in that step, with
the updated weights: as in the run, and in fp32 by torch's plain operations. So an error belongs to
one kernel and does not include the errors of the kernels before it. Weights are fp32, as in a run
by default.

An error is the largest (or mean) difference, divided by the largest (or mean) absolute value in
fp32. The table has the largest of the maximum errors, and the mean of the mean errors, over all
steps, layers and tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import optimizer
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, grid, measure
from recipes.bench.language_model import MAX_NORM, counting
from recipes.bench.timing import training_step
from recipes.models import head
from recipes.models.layers import decoder_layers
from recipes.models.model_build import build_model
from recipes.rank.device import compute_dtype
from recipes.rank.program import Failed, main
from recipes.training.packing import Collator

# Largest allowed maximum error, in units of torch.finfo(dtype).eps: bf16 0.0078, fp16 0.00098.
# Our choice: correct bf16 attention stays below 0.02 (recipes/bench/attention.py), and a wrong
# kernel is off by a large share of the values.
TOLERANCE = {"attention": 6, "norm": 2, "compiled norm": 2, "loss": 6}
# In fp32, sums of thousands of terms in another order differ by more than eps.
MIN_TOLERANCE = 1e-4
# The optimizer computes in fp32. A weight of 1 is rounded by 6e-4 of an update of 1e-4.
OPTIMIZER_TOLERANCE = 5e-3
PASSES = ("forward", "backward")
UPDATE = ("optimizer", "update")
NAME = "numerics"  # of the watched attention, as attn_implementation

Kernel = Callable[..., Tensor]  # from tensors with gradients to the output


@dataclass
class NumericsConfig(SeriesConfig):
    """Arguments. A step has `batch_size` rows of `sequence` tokens.

    `compiled_norm`: also compare norms that torch.compile has compiled; None: hardware.compile.
    """

    sequence: int = 1024
    batch_size: int = 2
    steps: int = 20
    learning_rate: float = 1e-4
    compiled_norm: bool | None = None


@dataclass
class Call:
    """A call in a training step: its kernel, the same in fp32, its inputs, and the gradient."""

    kernels: dict[str, Kernel]  # by name; the first one computed the step
    exact: Kernel
    inputs: list[Tensor]
    gradient: Tensor | None = None


@dataclass
class Errors:
    """Errors of all calls of a pass, and the reason if a call failed."""

    largest: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    failure: Exception | None = None

    def add(self, actual: Tensor, expected: Tensor) -> None:
        difference, size = (actual.float() - expected).abs(), expected.abs()
        self.largest.append(difference.max() / size.max())
        self.mean.append(difference.mean() / size.mean())

    def figures(self) -> Row:
        if self.failure is not None:
            raise self.failure
        if not self.largest:
            raise RuntimeError("no step had a call of this kernel with finite gradients")
        largest, mean = torch.stack(self.largest).max(), torch.stack(self.mean).mean()
        return {"max_error": largest.item(), "mean_error": mean.item()}


AllErrors = dict[tuple[str, str], Errors]  # by (kernel, pass)
COLUMNS = "kernel pass dtype max_error mean_error tolerance"


def numerics(config: DictConfig) -> dict[str, Any]:
    args = NumericsConfig(**config.trainer_args)
    device, dtype = device_of(args), compute_dtype(config)
    hardware = config.hardware
    if args.compiled_norm is None:
        args.compiled_norm = hardware.compile
    note = (
        f"{args.steps} steps. Errors are shares of the largest (mean) value in fp32. "
        f"hardware.attention={hardware.attention} packed_attention={hardware.packed_attention}"
    )
    table = Table(NAME, COLUMNS, "max_error", higher_is_better=False, notes=[note])
    kernels = [name for name in TOLERANCE if args.compiled_norm or name != "compiled norm"]
    cases = grid(kernel=kernels, **{"pass": PASSES})
    cases.append(dict(zip(("kernel", "pass"), UPDATE, strict=True)))
    errors = functools.cache(lambda: compare_steps(config, args, device))

    def work(case: Row) -> Row:
        figures = errors()[case["kernel"], case["pass"]].figures()
        used = torch.float32 if case["kernel"] == UPDATE[0] else dtype
        allowed = tolerance(case["kernel"], used)
        return {"dtype": str(used).removeprefix("torch."), **figures, "tolerance": allowed}

    content = measure(config, args, table, cases, work)
    wrong = [
        f"{table.name(row)} {row['max_error']}"
        for row in content["rows"]
        # an error that is not finite is None
        if row["error"] is None
        and (row["max_error"] is None or row["max_error"] > row["tolerance"])
    ]
    if wrong:
        raise Failed(f"errors above the tolerance: {'; '.join(wrong)}", **content)
    return content


def tolerance(kernel: str, dtype: torch.dtype) -> float:
    if kernel == UPDATE[0]:
        return OPTIMIZER_TOLERANCE
    return max(TOLERANCE[kernel] * torch.finfo(dtype).eps, MIN_TOLERANCE)


def compare_steps(config: DictConfig, args: NumericsConfig, device: torch.device) -> AllErrors:
    """Train `args.steps` steps, and return the errors of their kernels."""
    dtype = compute_dtype(config)
    # method.name selects the attention of SFT. Weights in 16 bits would hide errors of updates.
    model = build_model(
        OmegaConf.merge(config, {"method": {"name": "sft"}, "precision": {"weights": "fp32"}})
    )
    model = model.to(device).train()
    errors = {(kernel, name): Errors() for kernel in TOLERANCE for name in PASSES}
    errors[UPDATE] = Errors()
    calls: list[Call] = []
    watch_attention(model, calls)
    watch_norms(model, calls, args.compiled_norm)
    watch_loss(model, calls)
    cast = functools.partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss / batch["targets"].numel()

    compute = None if dtype == torch.float32 else dtype
    step = training_step(model, compute, args.learning_rate, MAX_NORM, loss_of)
    with watched_optimizer(errors[UPDATE]):
        for batch in batches(config, args):
            step({name: tensor.to(device) for name, tensor in batch.items()})
            for call in calls:
                # The scaler of fp16 begins with scales that overflow, and skips these steps.
                if dtype != torch.float16 or (
                    call.gradient is not None and call.gradient.isfinite().all()
                ):
                    compare(call, cast, errors)
            calls.clear()
    return errors


def batches(config: DictConfig, args: NumericsConfig) -> Iterator[dict[str, Tensor]]:
    """Yield SFT's batches of rows that count upwards. Every other row is cut into three."""
    packed = config.hardware.packed_attention is not None
    collate, third = Collator(0, packed), max(2, args.sequence // 3)
    for rows in counting(config, args, args.steps).tolist():
        documents = [
            {"input_ids": part}
            for number, row in enumerate(rows)
            for part in (
                (row[:third], row[third : 2 * third], row[2 * third :]) if number % 2 else (row,)
            )
        ]
        batch = collate(documents)
        del batch["num_tokens"]
        yield batch


def watch(calls: list[Call], kernels: dict[str, Kernel], exact: Kernel, *inputs: Tensor) -> Tensor:
    """Return the first kernel's output for `inputs`, and add the call to `calls`."""
    output = next(iter(kernels.values()))(*inputs)
    call = Call(kernels, exact, [tensor.detach() for tensor in inputs])
    output.register_hook(lambda gradient: setattr(call, "gradient", gradient.detach()))
    calls.append(call)
    return output


def watch_attention(model: PreTrainedModel, calls: list[Call]) -> None:
    used = model.config._attn_implementation
    attention = decoder_layers(model)[0].self_attn
    eager = sys.modules[type(attention).__module__].eager_attention_forward
    original = ALL_ATTENTION_FUNCTIONS.get(used, eager)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        def kernel(*inputs: Tensor) -> Tensor:
            return original(module, *inputs, *args, **kwargs)[0]

        # In fp32, SFT's packed attention also computes by sdpa, here by its plain products.
        return watch(calls, {"attention": kernel}, kernel, query, key, value), None

    AttentionInterface.register(NAME, forward)
    if used in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[used])
    model.config._attn_implementation = NAME


def watch_norms(model: nn.Module, calls: list[Call], compiles: bool) -> None:
    @functools.cache  # so that norms of one size are compiled once
    def kernels_of(kind: type[nn.Module], size: int) -> dict[str, Kernel]:
        norm = copy.copy(next(m for m in norms if type(m) is kind and m.weight.numel() == size))

        def kernel(hidden: Tensor, weight: Tensor) -> Tensor:
            return torch.func.functional_call(norm, {"weight": weight}, hidden)

        return {"norm": kernel} | ({"compiled norm": torch.compile(kernel)} if compiles else {})

    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    every_kernel = [kernels_of(type(norm), norm.weight.numel()) for norm in norms]
    for norm, kernels in zip(norms, every_kernel, strict=True):
        norm.forward = lambda hidden, norm=norm, kernels=kernels: watch(
            calls, kernels, kernels["norm"], hidden, norm.weight
        )


def watch_loss(model: PreTrainedModel, calls: list[Call]) -> None:
    def compute(hidden: Tensor, weight: Tensor, targets: Tensor) -> head.Sums:
        def kernel(hidden: Tensor, weight: Tensor) -> Tensor:
            return head.sums(hidden, weight, targets).loss

        def exact(hidden: Tensor, weight: Tensor) -> Tensor:
            return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")

        return head.Sums(watch(calls, {"loss": kernel}, exact, hidden, weight))

    head.add(model, compute)


def compare(call: Call, cast: Callable[[], Any], errors: AllErrors) -> None:
    """Add the errors of a call's kernels. A kernel that fails has no more calls compared."""
    with sdpa_kernel(SDPBackend.MATH):
        exact = [tensor.float() for tensor in call.inputs]
        expected = forward_and_backward(call.exact, exact, call.gradient)
    for name, kernel in call.kernels.items():
        passes = errors[name, "forward"], errors[name, "backward"]
        if passes[0].failure is not None:
            continue
        try:
            with cast():
                actual = forward_and_backward(kernel, call.inputs, call.gradient)
        # Compilers and libraries raise errors of their own classes.
        except Exception as error:
            passes[0].failure = passes[1].failure = RuntimeError(str(error))
            continue
        passes[0].add(actual[0], expected[0])
        for gradient, exact_gradient in zip(actual[1:], expected[1:], strict=True):
            passes[1].add(gradient, exact_gradient)


def forward_and_backward(
    kernel: Kernel, inputs: list[Tensor], gradient: Tensor | None
) -> list[Tensor]:
    """Return the kernel's output and the gradients of its inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = kernel(*leaves)
    gradient = None if gradient is None else gradient.to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@contextlib.contextmanager
def watched_optimizer(errors: Errors) -> Iterator[None]:
    """Compare each step of AdamW with its formula in fp32: moments, and the change of weights."""
    before: list[tuple[Tensor, ...]] = []

    def weights_of(adam: torch.optim.Optimizer) -> list[Tensor]:
        return [weight for group in adam.param_groups for weight in group["params"]]

    def save(adam: torch.optim.Optimizer, *_: Any) -> None:
        for weight in weights_of(adam):
            state = adam.state[weight]
            moments = (state.get(name, torch.zeros_like(weight)) for name in MOMENTS)
            before.append((weight.detach().clone(), *(moment.clone() for moment in moments)))

    def check(adam: torch.optim.Optimizer, *_: Any) -> None:
        group = adam.param_groups[0]
        for weight, (old, mean, square) in zip(weights_of(adam), before, strict=True):
            if weight.grad.isfinite().all():  # otherwise the scaler of fp16 skips the step
                state = adam.state[weight]
                expected = adam_update(group, int(state["step"]), weight.grad, mean, square)
                actual = (weight.detach() - old, *(state[name] for name in MOMENTS))
                for part, exact in zip(actual, expected, strict=True):
                    errors.add(part, exact)
        before.clear()

    hooks = (
        optimizer.register_optimizer_step_pre_hook(save),
        optimizer.register_optimizer_step_post_hook(check),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_update(
    group: dict[str, Any], step: int, gradient: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the change of a weight and its new moments by Adam (arXiv:1412.6980, algorithm 1)."""
    first, second = group["betas"]
    mean = first * mean + (1 - first) * gradient
    square = second * square + (1 - second) * gradient * gradient
    size = (square / (1 - second**step)).sqrt() + group["eps"]
    return -group["lr"] * (mean / (1 - first**step)) / size, mean, square


if __name__ == "__main__":
    main(numerics)
