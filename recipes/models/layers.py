"""Compile each decoder layer separately, and checkpoint the activations of some layers only.

Layers of one shape share one compilation, which the entire model could not. accelerate's
compile_regions wraps layers in other modules, which trainers and checkpoints would have to unwrap.
Here only a layer's forward is compiled, inside the hooks of FSDP, DeepSpeed and checkpointing.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from accelerate.utils.other import is_repeated_blocks
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import InductorError
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from launch.core.errors import UserError
from recipes.models import packed_attention
from recipes.rank.program import say

# In tokens. Equal to COMPILED_MULTIPLE of launch/schema/trainer_args.py, for padding batches.
MULTIPLE = 64
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit, InductorError)
# Attributes of a trainer that compute_loss changes. The last three belong to GRPO's adaptive
# entropy, and the two before them to its sampling ratio.
LOSS_STATE = (
    *("_metrics", "_sums", "_total_train_tokens", "_differences", "_ratios"),
    *("entropy_coef", "_entropy_window_stats", "_last_world_entropy"),
)
# Relative difference in loss and gradient norm that rounding may cause between compiled and eager
# layers, by compute dtype.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 2e-2, "fp8": 5e-2}

MIN_ADVANTAGE = 0.01  # more than rounding leaves of equal rewards


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """Return the model's list of decoder layers, or None if it has none."""
    return next((module for module in model.modules() if is_repeated_blocks(module)), None)


def compile_each(
    layers: Iterable[nn.Module],
    on_failure: Callable[[str], None],
    backend: str = "inductor",
    dynamic: bool = True,
) -> None:
    """Compile each layer's forward in place, as one graph; if `dynamic`, for any batch shape.

    Layers of the same class share kernels. Forward passes with a KV cache, as in generation, stay
    eager. If compiling fails, the forward calls `on_failure(reason)` and runs eagerly. An exception
    would leave the hooks of FSDP and DDP unfinished.
    """
    # A layer is smaller than DDP's buckets, so splitting it would only break its graph.
    torch._dynamo.config.optimize_ddp = False
    # Otherwise each graph is traced twice, first with the norms' epsilon as a variable.
    torch._dynamo.config.specialize_float = True
    options = {"backend": backend, "dynamic": dynamic, "fullgraph": True}
    # GRPO needs up to nine graphs: with and without gradient, with and without adapter, and for a
    # reference model.
    torch._dynamo.config.recompile_limit = 16
    for kind in {type(layer) for layer in layers}:
        compiled = (
            _compiled_for_any_length(kind.forward, options)
            if dynamic
            else torch.compile(kind.forward, **options)
        )
        forward = _with_fallback(kind.forward, compiled, on_failure, dynamic)
        for layer in (layer for layer in layers if type(layer) is kind):
            layer.forward = types.MethodType(forward, layer)


def _with_fallback(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    on_failure: Callable[[str], None],
    in_evaluation: bool,
) -> Callable[..., Any]:
    """Return a forward that runs `compiled`, or `eager` if that fails.

    In evaluation, where lengths vary, it runs `compiled` only if `in_evaluation`.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and (self.training or in_evaluation):
            try:
                return compiled(self, *args, **kwargs)
            except COMPILE_ERRORS as error:
                on_failure(_first_line(error))
        return eager(self, *args, **kwargs)

    return forward


def _compiled_for_any_length(
    eager: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Return `eager` compiled twice: for multiples of MULTIPLE tokens, and for other lengths.

    fp8 is a tenth faster if the compiler knows the multiple.
    """

    def from_blocks(
        self: nn.Module, blocks: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any
    ) -> Any:
        angles = tuple(part.flatten(1, 2) for part in position_embeddings)
        return eager(self, blocks.flatten(1, 2), *args, position_embeddings=angles, **kwargs)

    compiled_blocks = torch.compile(from_blocks, **options)
    compiled_any = torch.compile(eager, **options)

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        angles = position_embeddings
        if angles is None or hidden_states.shape[1] % MULTIPLE:
            return compiled_any(self, hidden_states, *args, position_embeddings=angles, **kwargs)
        blocks, *angles = (part.unflatten(1, (-1, MULTIPLE)) for part in (hidden_states, *angles))
        return compiled_blocks(self, blocks, *args, position_embeddings=angles, **kwargs)

    return forward


def use_eager(layers: Iterable[nn.Module]) -> None:
    """Restore the eager forward of each layer, which undoes compile_each."""
    for layer in layers:
        vars(layer).pop("forward", None)


class CompiledLayers:
    """Compile a trainer's layers if `config.step.compile`. Mixin, listed before a TRL trainer.

    If compiling fails and the user did not request it, the run continues with eager layers.
    """

    _layers: Sequence[nn.Module] = ()
    _checkpointing: CheckpointFirstLayers | None = None
    _is_first_batch = _compares = _checks_attention = False
    compiled: str | None = None  # "yes", or the reason why not, or None if not requested

    def compile_layers(self, config: DictConfig) -> None:
        """Compile the layers. Call once, before training. Raises UserError as _use_eager does."""
        if (number := OmegaConf.select(config, "step.checkpointed_layers")) is not None:
            self._checkpointing = CheckpointFirstLayers(number)
            self.add_callback(self._checkpointing)
        unmeasured = not config.hardware.get("kernels_measured", False)
        self._precision, strategy = config.precision.compute, config.topology.strategy
        has_kernel = config.hardware.get("packed_attention") in packed_attention.KERNELS
        joins = config.trainer_args.get("packing", False)
        packs = joins or OmegaConf.select(config, "step.rows") == "packed"
        # ZeRO-3 gathers weights in hooks that torch.autograd.grad does not call.
        self._checks_attention = unmeasured and packs and has_kernel and strategy != "zero3"
        # torch.autograd.grad rejects reentrant checkpointing.
        reentrant = (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        self._compares = self._checks_attention and not reentrant
        if not OmegaConf.select(config, "step.compile"):
            return
        self._requested = "step.compile" not in [choice.key for choice in config.get("chosen", [])]
        models = filter(None, (self.model, getattr(self, "ref_model", None)))
        layers = [decoder_layers(model) for model in models]
        if strategy == "zero3":
            self._use_eager(
                "ZeRO-3 gathers weights inside the layers, which a graph cannot contain"
            )
        elif None in layers:
            self._use_eager("the model has no list of identical layers")
        else:
            self._layers = [layer for model_layers in layers for layer in model_layers]
            compile_each(
                self._layers, self._use_eager, dynamic=not getattr(self, "one_length", False)
            )
            self.compiled, self._is_first_batch = "yes", not reentrant
            self._compares = unmeasured and not reentrant

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._checkpointing:  # TRL's reference forward pass re-enables all layers
            self._checkpointing.on_train_begin(model=self.model)
        if self._is_first_batch and model.training:
            self._is_first_batch = False
            self._try_first_batch(model, inputs, *args, **kwargs)
        if self._compares and model.training and _has_gradient(inputs):
            self._compares = False
            self._compare_kernels(model, inputs, *args, **kwargs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _try_first_batch(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Run the compiled layers before the first update."""
        reason = None
        try:
            for batch in getattr(self, "_rehearsed", tuple)():
                self._loss_and_norm(model, batch)
            self._loss_and_norm(model, inputs, *args, **kwargs)
        except COMPILE_ERRORS as error:  # raised by the backward pass
            reason = _first_line(error)
        if reason := _of_any_rank(reason if self.compiled == "yes" else self.compiled):
            self._use_eager_if_compiled(reason)

    def _compare_kernels(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Compare with eager layers and the attention of padded rows. Use them if they differ."""
        if self.compiled != "yes" and not self._checks_attention:
            return
        figures = self._loss_and_norm(model, inputs, *args, **kwargs)
        forwards = [layer.forward for layer in self._layers]
        use_eager(self._layers)
        with packed_attention.by_document():
            expected = self._loss_and_norm(model, inputs, *args, **kwargs)
        problem = _of_any_rank(self._difference(figures, expected))
        eager = self._loss_and_norm(model, inputs, *args, **kwargs) if problem else figures
        for layer, forward in zip(self._layers, forwards, strict=True):
            layer.forward = forward
        say(
            "kernels of this GPU: loss and gradient norm of a micro-batch are "
            f"{_formatted(figures)}, and {_formatted(expected)} with eager layers and the "
            "attention of padded rows"
        )
        if problem:
            self._use_eager_if_compiled(problem)
            if self._checks_attention and _of_any_rank(self._difference(eager, expected)):
                packed_attention.use_by_document()
                say("warning: packed rows use the attention of padded rows, which is slower")

    def _difference(
        self, figures: tuple[float, float], expected: tuple[float, float]
    ) -> str | None:
        """Return how (loss, gradient norm) differ by more than rounding may cause, or None."""
        # GRPO's first losses are zero except for rounding, so losses have an absolute tolerance.
        tolerance = TOLERANCE[self._precision]
        agree = all(
            math.isclose(a, b, rel_tol=tolerance, abs_tol=absolute)
            for a, b, absolute in zip(expected, figures, (tolerance, 0.0), strict=True)
        )
        if agree:
            return None
        return (
            f"loss and gradient norm of a micro-batch are {_formatted(figures)} in place of "
            f"{_formatted(expected)}"
        )

    def _loss_and_norm(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[float, float]:
        """Return (loss, gradient norm) of a micro-batch. Leave gradients and metrics unchanged."""
        saved = {name: copy.deepcopy(vars(self)[name]) for name in LOSS_STATE if name in vars(self)}
        try:
            with without_dropout(self.model):
                if self.is_fsdp_enabled:  # FSDP reduces gradients only in a full backward
                    model.set_requires_gradient_sync(True)
                    model.set_reshard_after_backward(True)
                    loss = super().compute_loss(model, dict(inputs), *args, **kwargs)
                    loss.backward()
                    grads = [
                        weight.grad for weight in model.parameters() if weight.grad is not None
                    ]
                    norm = torch.nn.utils.get_total_norm(grads).full_tensor()
                    model.set_requires_gradient_sync(self.accelerator.sync_gradients)
                else:
                    unwrapped = self.accelerator.unwrap_model(model)
                    loss = super().compute_loss(unwrapped, dict(inputs), *args, **kwargs)
                    weights = [weight for weight in unwrapped.parameters() if weight.requires_grad]
                    if isinstance(model, DistributedDataParallel):
                        loss.backward()  # into its gradients, because a copy may not fit
                        grads = [weight.grad for weight in weights]
                    else:
                        grads = torch.autograd.grad(loss, weights, allow_unused=True)
                    norm = torch.nn.utils.get_total_norm(
                        [grad for grad in grads if grad is not None]
                    )
        finally:
            vars(self).update(saved)
            if self.is_fsdp_enabled or isinstance(model, DistributedDataParallel):
                model.zero_grad()
        return loss.item(), norm.item()

    def _use_eager_if_compiled(self, reason: str) -> None:
        if self.compiled == "yes":
            self._use_eager(reason)

    def _use_eager(self, reason: str) -> None:
        """Switch to eager. Raises UserError for fp8, and if the user requested compiled layers."""
        use_eager(self._layers)
        self.compiled = reason
        remedy = "step.compile=false" if self._requested else None
        if self._precision == "fp8":  # uncompiled, it takes three times as long as bf16
            remedy = "precision=bf16"
        if remedy:
            raise UserError(
                f"step.compile=true: layers cannot be compiled: {reason}. Use: {remedy}."
            )
        say(f"warning: layers are not compiled: {reason}")


class CheckpointFirstLayers(TrainerCallback):
    """Limit activation checkpointing, which is on for all layers, to the first `number` layers."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        for layer in list(decoder_layers(model) or [])[self.number :]:
            layer.gradient_checkpointing = False


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, since compiled layers draw in another order. Restore random generators."""
    rates = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    # by default, fork_rng would initialize every GPU of the node
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        for module, _ in rates:
            module.p = 0.0
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, rate in rates:
            module.p = rate


def _has_gradient(inputs: dict[str, Any]) -> bool:
    """Return whether a micro-batch of any rank has a gradient. GRPO's equal rewards have none."""
    advantages = inputs.get("advantages")
    has = advantages is None or bool((advantages.abs() > MIN_ADVANTAGE).any())
    return _of_any_rank("yes" if has else None) is not None


def _of_any_rank(reason: str | None) -> str | None:
    """Return the first reason that a rank has. All ranks must call this."""
    return next((text for text in gather_object([reason]) if text), None)


def _first_line(error: Exception) -> str:
    """Return an error's first line, and the second line if the first ends with a colon."""
    first, *more = str(error).strip().splitlines()
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def _formatted(figures: tuple[float, float]) -> str:
    return ", ".join(f"{figure:.6g}" for figure in figures)
