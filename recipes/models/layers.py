"""Compile each decoder layer separately, and limit how many layers recompute in backward.

`torch.compile` of a whole model takes nine times as long to start and trains slower
(docs/results/speed.md). accelerate's compile_regions wraps layers in other modules, which trainers
and checkpoints would have to unwrap. Here a layer stays the same module and only its forward is
compiled, inside the hooks that FSDP, DeepSpeed and checkpointing put around it.
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
from transformers import TrainerCallback

from launch.core.errors import UserError
from recipes.rank.program import say

# In tokens; launch/schema/trainer_args.py pads batches to a multiple of this (COMPILED_MULTIPLE)
MULTIPLE = 64
NOT_COMPILED = (TorchDynamoException, FailOnRecompileLimitHit, InductorError)
# Attributes that a trainer changes when it computes a loss; the last three belong to GRPO's
# adaptive entropy, and the two before them to its sampling ratio.
FIGURES = (
    *("_metrics", "_sums", "_total_train_tokens", "_differences", "_ratios"),
    *("entropy_coef", "_entropy_window_stats", "_last_world_entropy"),
)
# Allowed relative difference between compiled and eager loss and gradient norm: the accumulated
# rounding of the compute dtype.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 2e-2, "fp8": 5e-2}


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """Return the repeated blocks of `model`, or None if none are found."""
    return next((module for module in model.modules() if is_repeated_blocks(module)), None)


def compile_each(
    layers: Iterable[nn.Module],
    failed: Callable[[str], None],
    backend: str = "inductor",
    dynamic: bool = True,
) -> None:
    """Compile each layer's forward in place, as one graph; with `dynamic`, for any rows and tokens.

    Equal layers share their kernels. Forward passes with a KV cache, as in generation, stay eager.
    If compiling fails, `failed(reason)` is called and the layers stay eager. The fallback is inside
    the hooks of FSDP and DDP, which an exception would leave half-done.
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
        forward = (
            _any_length(kind.forward, options)
            if dynamic
            else torch.compile(kind.forward, **options)
        )
        for layer in (layer for layer in layers if type(layer) is kind):
            layer.forward = types.MethodType(
                _or_eager(kind.forward, forward, failed, dynamic), layer
            )


def _or_eager(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    failed: Callable[[str], None],
    evaluates: bool,
) -> Callable[..., Any]:
    """Return a forward that falls back to `eager`.

    Forwards in evaluation, where lengths are arbitrary, are compiled only if `evaluates`.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and (self.training or evaluates):
            try:
                return compiled(self, *args, **kwargs)
            except NOT_COMPILED as error:
                failed(_first_line(error))
        return eager(self, *args, **kwargs)

    return forward


def _any_length(eager: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return `eager` compiled for lengths that are multiples of MULTIPLE: fp8 is a tenth faster.

    Other lengths use a second compiled version, without that assumption.
    """

    def joined(
        self: nn.Module, blocks: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any
    ) -> Any:
        angles = tuple(part.flatten(1, 2) for part in position_embeddings)
        return eager(self, blocks.flatten(1, 2), *args, position_embeddings=angles, **kwargs)

    of_blocks, of_any = torch.compile(joined, **options), torch.compile(eager, **options)

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        angles = position_embeddings
        if angles is None or hidden_states.shape[1] % MULTIPLE:
            return of_any(self, hidden_states, *args, position_embeddings=angles, **kwargs)
        blocks, *angles = (part.unflatten(1, (-1, MULTIPLE)) for part in (hidden_states, *angles))
        return of_blocks(self, blocks, *args, position_embeddings=angles, **kwargs)

    return forward


def use_eager(layers: Iterable[nn.Module]) -> None:
    """Restore the eager forward of each layer, which undoes compile_each."""
    for layer in layers:
        vars(layer).pop("forward", None)


class CompiledLayers:
    """Compile a TRL trainer's layers if `config.step.compile`: a mixin, placed before the trainer.

    If they cannot be compiled and the user did not request it, the run continues in eager mode, and
    `compiled` holds the reason.
    """

    _layers: Sequence[nn.Module] = ()
    _some: CheckpointSome | None = None
    _fresh = _doubted = False  # compiled but not yet used; must be compared with eager
    compiled: str | None = None  # "yes", or the reason why not; None if never tried

    def compile_layers(self, config: DictConfig) -> None:
        """Compile the layers; call once, before training. Raises UserError as _give_up does."""
        if (number := OmegaConf.select(config, "step.checkpointed_layers")) is not None:
            self._some = CheckpointSome(number)
            self.add_callback(self._some)
        if not OmegaConf.select(config, "step.compile"):
            return
        self._requested = "step.compile" not in [choice.key for choice in config.get("chosen", [])]
        self._precision = config.precision.compute
        models = filter(None, (self.model, getattr(self, "ref_model", None)))
        layers = [decoder_layers(model) for model in models]
        if config.topology.strategy == "zero3":
            self._give_up("ZeRO-3 gathers weights inside the layers, which a graph cannot wait for")
        elif None in layers:
            self._give_up("the model has no list of identical layers")
        else:
            self._layers = [layer for of_model in layers for layer in of_model]
            compile_each(
                self._layers, self._give_up, dynamic=not getattr(self, "one_length", False)
            )
            # torch.autograd.grad, which the comparison uses, rejects reentrant checkpointing
            reentrant = (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
            self.compiled, self._fresh = "yes", not reentrant
            self._doubted = not config.hardware.get("compile_measured", False)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._some:  # TRL turns checkpointing off for a reference, then on again for all layers
            self._some.on_train_begin(model=self.model)
        if self._fresh and model.training:
            self._fresh = False
            self._begin(model, inputs, *args, **kwargs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _begin(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Compile before the first update; on unmeasured hardware, compare with eager.

        The comparison uses the first micro-batch.
        """
        reason, measured = None, (0.0, 0.0)
        try:
            for batch in getattr(self, "_rehearsed", tuple)():
                self._measured(model, batch)
            measured = self._measured(model, inputs, *args, **kwargs)
        except NOT_COMPILED as error:  # raised by the backward pass
            reason = _first_line(error)
        if self._gave_up(reason):
            return
        if self._doubted:
            compiled = [layer.forward for layer in self._layers]
            use_eager(self._layers)
            eager = self._measured(model, inputs, *args, **kwargs)
            for layer, forward in zip(self._layers, compiled, strict=True):
                layer.forward = forward
            figures = (
                "loss and gradient norm of the first micro-batch are "
                f"{_formatted(measured)} compiled and {_formatted(eager)} eager"
            )
            # For losses the tolerance is also absolute: GRPO's first losses cancel to zero except
            # for rounding, and others are of order 1.
            tolerance = TOLERANCE[self._precision]
            agree = all(
                math.isclose(a, b, rel_tol=tolerance, abs_tol=least)
                for a, b, least in zip(eager, measured, (tolerance, 0.0), strict=True)
            )
            reason = None if agree else figures
            say(f"compiled layers: {figures}")
            self._gave_up(reason)

    def _gave_up(self, reason: str | None) -> bool:
        """Return whether any rank has a reason to give up; if one has, all continue uncompiled."""
        own = reason if self.compiled == "yes" else self.compiled
        reasons = [text for text in gather_object([own]) if text]
        if reasons and self.compiled == "yes":
            self._give_up(reasons[0])
        return bool(reasons)

    def _measured(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[float, float]:
        """Return (loss, gradient norm) of a micro-batch.

        Its gradients are discarded, and the step's figures restored.
        """
        saved = {name: copy.deepcopy(vars(self)[name]) for name in FIGURES if name in vars(self)}
        try:
            with same_draws(self.model):
                if self.is_fsdp_enabled:  # FSDP reduces gradients only in a whole backward
                    model.set_requires_gradient_sync(True)
                    loss = super().compute_loss(model, dict(inputs), *args, **kwargs)
                    loss.backward()
                    grads = [
                        weight.grad for weight in model.parameters() if weight.grad is not None
                    ]
                    norm = torch.nn.utils.get_total_norm(grads).full_tensor()
                    model.zero_grad()
                    model.set_requires_gradient_sync(self.accelerator.sync_gradients)
                else:
                    whole = self.accelerator.unwrap_model(model)
                    loss = super().compute_loss(whole, dict(inputs), *args, **kwargs)
                    weights = [weight for weight in whole.parameters() if weight.requires_grad]
                    grads = torch.autograd.grad(loss, weights, allow_unused=True)
                    norm = torch.nn.utils.get_total_norm(
                        [grad for grad in grads if grad is not None]
                    )
        finally:
            vars(self).update(saved)
        return loss.item(), norm.item()

    def _give_up(self, reason: str) -> None:
        """Switch to eager. Raises UserError if the user requested compiled layers, and for fp8."""
        use_eager(self._layers)
        self.compiled, self._doubted = reason, False
        remedy = "step.compile=false" if self._requested else None
        if self._precision == "fp8":  # uncompiled, it takes three times as long as bf16
            remedy = "precision=bf16"
        if remedy:
            raise UserError(f"layers cannot be compiled: {reason}. Use: {remedy}.")
        say(f"warning: layers are not compiled: {reason}")


class CheckpointSome(TrainerCallback):
    """Recompute only the first `number` decoder layers, after checkpointing is on for all."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        for layer in list(decoder_layers(model) or [])[self.number :]:
            layer.gradient_checkpointing = False


@contextlib.contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, which compiled layers draw in a different order.

    Restore dropout and the random generators afterwards.
    """
    rates = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    # fork_rng would initialize every GPU of the node
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        for module, _ in rates:
            module.p = 0.0
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, rate in rates:
            module.p = rate


def _first_line(error: Exception) -> str:
    """Return an error's first line; if that is `backend='inductor' raised:`, with the second."""
    first, *more = str(error).strip().splitlines()
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def _formatted(figures: tuple[float, float]) -> str:
    return ", ".join(f"{figure:.6g}" for figure in figures)
