"""Exchange gradients and gather weights without copies and repetitions that cost memory or time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class LeanCommunication:
    """Store DDP's gradients in its buckets, and keep FSDP's weights. Mixin before a TRL trainer.

    Otherwise DDP has a copy of all gradients. A trained weight that the loss does not use has a
    gradient of zero then, and not None, so weight decay applies to it. With
    topology.fsdp.reshard_after_forward=false, FSDP gathers weights once in an optimizer step and
    not once in each micro-batch.
    """

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = super()._build_accelerator_args(**kwargs)
        for handler in args["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
        return args

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
        """Wrap the model. Gradients exist before and stay, because new ones are not in buckets."""
        if self.accelerator.distributed_type in DDP:
            for weight in self.model.parameters():
                if weight.requires_grad:
                    weight.grad = torch.zeros_like(weight)
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if isinstance(model, DistributedDataParallel):
            model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)
        return model, loader

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(model, FSDPModule):
            plugin = self.accelerator.state.fsdp_plugin
            is_last = self.accelerator.sync_gradients
            model.set_reshard_after_backward(plugin.reshard_after_forward or is_last)
        return super().training_step(model, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Shard the weights again afterwards, because the state may be saved or loaded then."""
        metrics = super().evaluate(*args, **kwargs)
        reshard(self.model)
        return metrics


def reshard(model: nn.Module) -> None:
    """Free gathered weights of FSDP, which a forward without a backward may leave."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
