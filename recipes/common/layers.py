"""Compile each decoder layer by itself, and limit how many recompute in the backward.

`torch.compile` of a whole model takes nine times as long to start and trains slower (docs/results/speed.md). accelerate's
compile_regions replaces layers with modules of its own, which trainers and checkpoints would have to see through. Here a layer
stays the same module and only its forward is compiled, inside the hooks that FSDP, DeepSpeed and checkpointing put around it.
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
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import InductorError
from transformers import TrainerCallback

from recipes.common.errors import UserError
from recipes.common.program import say

MULTIPLE = 64  # tokens; launch/trainer_args.py pads batches to a multiple of it (COMPILED_MULTIPLE)
NOT_COMPILED = (TorchDynamoException, FailOnRecompileLimitHit, InductorError)
# State that a trainer changes while it computes a loss; the last three belong to GRPO's adaptive entropy, the two before to its ratio.
FIGURES = (
    *("_metrics", "_sums", "_total_train_tokens", "_differences", "_ratios"),
    *("entropy_coef", "_entropy_window_stats", "_last_world_entropy"),
)
# How far loss and gradient norm of a compiled micro-batch may be from the eager ones, as a share: rounding of the compute dtype, summed.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 2e-2, "fp8": 5e-2}


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """Return the repeated blocks of `model`, or None if none are found."""
    return next((module for module in model.modules() if is_repeated_blocks(module)), None)


def compile_each(layers: Iterable[nn.Module], failed: Callable[[str], None], backend: str = "inductor", dynamic: bool = True) -> None:
    """Compile each layer's forward in place, as one graph; with `dynamic`, for any number of rows and tokens.

    Equal layers share their kernels. Forwards with a cache of keys and values, as in generation, stay eager. So do those that cannot be
    compiled, after `failed(reason)`. They fall back inside the hooks of FSDP and DDP, which an exception would leave half-done.
    """
    torch._dynamo.config.optimize_ddp = False  # a layer is smaller than DDP's buckets; splitting it would only break its graph
    torch._dynamo.config.specialize_float = True  # else each graph is traced twice: the first trace treats the norms' epsilon as a variable
    options = {"backend": backend, "dynamic": dynamic, "fullgraph": True}
    # GRPO's passes need up to nine graphs: with and without gradient or adapter, and for a reference.
    torch._dynamo.config.recompile_limit = 16
    for kind in {type(layer) for layer in layers}:
        forward = _any_length(kind.forward, options) if dynamic else torch.compile(kind.forward, **options)
        for layer in (layer for layer in layers if type(layer) is kind):
            layer.forward = types.MethodType(_or_eager(kind.forward, forward, failed, dynamic), layer)


def _or_eager(
    eager: Callable[..., Any], compiled: Callable[..., Any], failed: Callable[[str], None], evaluates: bool
) -> Callable[..., Any]:
    """Return a forward that falls back to `eager`. Held-out rows, which may have any length, are compiled only if `evaluates`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and (self.training or evaluates):
            try:
                return compiled(self, *args, **kwargs)
            except NOT_COMPILED as error:
                failed(_first_line(error))
        return eager(self, *args, **kwargs)

    return forward


def _any_length(eager: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile `eager` for lengths that the compiler knows to be multiples of MULTIPLE, which makes fp8 a tenth faster.

    Other lengths are compiled without that knowledge.
    """

    def joined(self: nn.Module, blocks: torch.Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        angles = tuple(part.flatten(1, 2) for part in position_embeddings)
        return eager(self, blocks.flatten(1, 2), *args, position_embeddings=angles, **kwargs)

    of_blocks, of_any = torch.compile(joined, **options), torch.compile(eager, **options)

    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        if position_embeddings is None or hidden_states.shape[1] % MULTIPLE:
            return of_any(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        blocks, *angles = (part.unflatten(1, (-1, MULTIPLE)) for part in (hidden_states, *position_embeddings))
        return of_blocks(self, blocks, *args, position_embeddings=angles, **kwargs)

    return forward


def use_eager(layers: Iterable[nn.Module]) -> None:
    """Undo compile_each."""
    for layer in layers:
        vars(layer).pop("forward", None)


class CompiledLayers:
    """Compile the layers of a TRL trainer, which this mixin precedes, if `config.step.compile` says so.

    If they cannot be compiled and the user did not request it, the run continues eager, and `compiled` says why.
    """

    _layers: Sequence[nn.Module] = ()
    _some: CheckpointSome | None = None
    _fresh = _doubted = False  # compiled but not used yet; to be compared with eager
    compiled: str | None = None  # "yes", or why not; None if it was never tried

    def compile_layers(self, config: DictConfig) -> None:
        """Compile; call once, before training. Raises UserError if the user requested it and the layers cannot be compiled."""
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
            self._layers = [layer for found in layers for layer in found]
            compile_each(self._layers, self._give_up, dynamic=not getattr(self, "one_length", False))
            reentrant = (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")  # torch.autograd.grad rejects it
            self.compiled, self._fresh = "yes", not reentrant
            self._doubted = not config.hardware.get("compile_measured", False)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._some:  # TRL turns checkpointing off for a reference, then on again for all layers
            self._some.on_train_begin(model=self.model)
        if self._fresh and model.training:
            self._fresh = False
            self._begin(model, inputs, *args, **kwargs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _begin(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Compile without updating weights. On hardware that was not measured, compare the first micro-batch with an eager one."""
        reason, found = None, (0.0, 0.0)
        try:
            for batch in getattr(self, "_rehearsed", tuple)():
                self._measured(model, batch)
            found = self._measured(model, inputs, *args, **kwargs)
        except NOT_COMPILED as error:  # in the backward
            reason = _first_line(error)
        if self._gave_up(reason):
            return
        if self._doubted:
            compiled = [layer.forward for layer in self._layers]
            use_eager(self._layers)
            eager = self._measured(model, inputs, *args, **kwargs)
            for layer, forward in zip(self._layers, compiled, strict=True):
                layer.forward = forward
            figures = f"loss and gradient norm of the first micro-batch are {_formatted(found)} compiled and {_formatted(eager)} eager"
            reason = None if _agree(eager, found, TOLERANCE[self._precision]) else figures
            say(f"compiled layers: {figures}")
            self._gave_up(reason)

    def _gave_up(self, reason: str | None) -> bool:
        """Continue eager on all ranks if one has a reason, and return whether one has."""
        reasons = [text for text in gather_object([reason if self.compiled == "yes" else self.compiled]) if text]
        if reasons and self.compiled == "yes":
            self._give_up(reasons[0])
        return bool(reasons)

    def _measured(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[float, float]:
        """Return (loss, gradient norm) of a micro-batch. Discard its gradients, and leave the step's figures as they were."""
        with self._figures_kept(), same_draws(self.model):
            if self.is_fsdp_enabled:  # FSDP reduces gradients only in a whole backward
                model.set_requires_gradient_sync(True)
                loss = super().compute_loss(model, dict(inputs), *args, **kwargs)
                loss.backward()
                grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
                norm = torch.nn.utils.get_total_norm(grads).full_tensor()
                model.zero_grad()
                model.set_requires_gradient_sync(self.accelerator.sync_gradients)
            else:
                whole = self.accelerator.unwrap_model(model)
                loss = super().compute_loss(whole, dict(inputs), *args, **kwargs)
                weights = [weight for weight in whole.parameters() if weight.requires_grad]
                grads = torch.autograd.grad(loss, weights, allow_unused=True)
                norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
        return loss.item(), norm.item()

    @contextlib.contextmanager
    def _figures_kept(self) -> Iterator[None]:
        kept = {name: copy.deepcopy(vars(self)[name]) for name in FIGURES if name in vars(self)}
        try:
            yield
        finally:
            vars(self).update(kept)

    def _give_up(self, reason: str) -> None:
        """Continue eager. Raises UserError if the user requested compiled layers, and for fp8."""
        use_eager(self._layers)
        self.compiled, self._doubted = reason, False
        if self._precision == "fp8":
            raise UserError(
                f"precision=fp8 needs compiled layers, without which it takes three times as long as bf16: {reason}. Use: precision=bf16."
            )
        if self._requested:
            raise UserError(f"step.compile=true: {reason}. Use: step.compile=false.")
        say(f"warning: layers are not compiled: {reason}")


class CheckpointSome(TrainerCallback):
    """Recompute only the first `number` decoder layers, once the trainer has turned checkpointing on for all."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        for layer in list(decoder_layers(model) or [])[self.number :]:
            layer.gradient_checkpointing = False


@contextlib.contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, which a compiled layer draws in another order, and restore the random generators afterwards."""
    rates = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []  # fork_rng would initialize every GPU of the node
    try:
        for module, _ in rates:
            module.p = 0.0
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, rate in rates:
            module.p = rate


def _agree(eager: tuple[float, float], found: tuple[float, float], tolerance: float) -> bool:
    """Return whether (loss, gradient norm) agree within the relative `tolerance`. For losses it is an absolute one too: GRPO's first are
    sums that cancel to rounding errors of zero, and others are of the order of 1.
    """
    close = (math.isclose(a, b, rel_tol=tolerance, abs_tol=least) for a, b, least in zip(eager, found, (tolerance, 0.0), strict=True))
    return all(close)


def _first_line(error: Exception) -> str:
    """Return the first line of an error, with the next one after `backend='inductor' raised:`."""
    first, *more = str(error).strip().splitlines()
    return f"{first} {more[0]}" if first.endswith(":") and more else first


def _formatted(figures: tuple[float, float]) -> str:
    return ", ".join(f"{figure:.6g}" for figure in figures)
