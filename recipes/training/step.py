"""Run SFT's optimizer step without waiting for the GPU.

head.py computes the loss, and packing.py collates the batches. Metrics are copied to the host while
the next step runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from omegaconf import OmegaConf
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from recipes.models import head, packed_attention
from recipes.training import packing

SHORTEST = 128  # tokens of the shortest row whose kernels are compiled in advance
COUNTED = ("entropy", "mean_token_accuracy")


def halves(length: int) -> Iterator[int]:
    """Yield `length`, half of it, and so on down to SHORTEST."""
    while length >= SHORTEST:
        yield length
        length //= 2


class OrderedRows:
    """Order rows by length unless step.rows=padded. This is a mixin, placed before PreparedRows."""

    def _get_dataloader(
        self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> DataLoader:
        loader = super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        if is_training and self._rows != "padded" and isinstance(dataset, Dataset):
            number = self.args.gradient_accumulation_steps * self.args.world_size
            packing.arrange(
                loader, dataset, self._train_batch_size, number, balanced=self._rows == "packed"
            )
        return loader

    @property
    def _rows(self) -> str:
        return OmegaConf.select(self._config, "step.rows") or "padded"


class FastStep(OrderedRows):
    """Replace SFTTrainer's loss and logging. This is a mixin, placed before SFTTrainer.

    TRL's loss is used if this one does not support the model or the arguments.
    """

    _late: LateLine | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums = {"train": _no_sums(), "eval": _no_sums()}
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self._fast = self._supports(base)
        # TRL marks documents only by their positions, which sdpa turns into a mask.
        is_maskless = base.config._attn_implementation == packed_attention.NAME
        if self.padding_free and not self._fast and is_maskless:
            base.set_attn_implementation("sdpa")
        if self._fast:
            head.add(base)
            packs = self._joins_documents() or (self._rows == "packed" and not self.one_length)
            collator = functools.partial(
                packing.Collator,
                self._tokenizer.pad_token_id,
                multiple=self.args.pad_to_multiple_of or 1,
            )
            self.data_collator = collator(packed=packs)
            self._eval_collator = collator(packed=self._joins_documents())

    @functools.cached_property
    def one_length(self) -> bool:
        """Return whether all rows have the same length, except perhaps the last row of packing.

        Such rows need no packing, and kernels without document boundaries are a tenth faster.
        """
        if self.args.packing:
            return not self._joins_documents()
        if isinstance(self.train_dataset, IterableDataset):
            return False
        lengths = packing.lengths(self.train_dataset)
        return bool(lengths.min() == lengths.max())

    def _joins_documents(self) -> bool:
        """Return whether TRL's packing joins several documents in a row."""
        return self.args.packing and self.args.packing_strategy != "wrapped"

    def _supports(self, model: PreTrainedModel) -> bool:
        # With several ranks, accelerate slices the batches of a stream by rows.
        dispatched = isinstance(self.train_dataset, IterableDataset) and self.args.world_size > 1
        attends_packed = self._config.hardware.get("packed_attention") is not None
        return (
            self.args.loss_type == "nll"
            and not self.args.label_smoothing_factor
            and not self.aux_loss_enabled
            and not dispatched
            and self._config.topology.strategy != "zero3"  # ZeRO-3 shards the head
            and (attends_packed or not self._joins_documents())
            and head.fits(model)
            and packed_attention.fits(model.config)
        )

    def _rehearsed(self) -> Iterator[dict[str, Any]]:
        """Yield micro-batches for compiling kernels, of the maximum length, half of it, and so on.

        Yield nothing if all rows have the same length. Kernels are compiled for ranges of lengths,
        and depend on the first length in each range. With these lengths, resumed runs get the same
        kernels.
        """
        for length in halves(0 if not self._fast or self.one_length else self.args.max_length or 0):
            row = {"input_ids": [self._tokenizer.pad_token_id] * length}
            rows = [row] * self.args.per_device_train_batch_size
            yield self._prepare_inputs(self.data_collator(rows))

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """Return the loader. Do not pack held-out rows, to average over the same batches as TRL."""
        collator = self.data_collator
        self.data_collator = collator if is_training or not self._fast else self._eval_collator
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.data_collator = collator

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of targets in the step on all ranks, without waiting for the GPU."""
        if not self._fast:
            return super()._get_num_items_in_batch(batch_samples, device)
        number = sum(batch["targets"].numel() for batch in batch_samples)
        if self.args.world_size == 1 or not self.args.average_tokens_across_devices:
            return max(1, number)  # a step without targets has a loss of zero
        return self.accelerator.reduce(torch.full((), float(number), device=device), "sum").clamp(
            min=1
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if not self._fast:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs, targets = dict(inputs), inputs["targets"].numel()
        sums = self._sums["train" if self.model.training else "eval"]
        sums["tokens"] += inputs.pop("num_tokens")
        output = model(**inputs)
        sums["targets"] += targets
        sums["counted"] = sums["counted"] + output.counted
        loss = output.loss / (max(1, targets) if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # DDP and FSDP average gradients over the ranks.
            loss = loss * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def _take_sums(self, mode: str) -> torch.Tensor:
        """Return this rank's sums of (entropies, correct, targets, tokens), and reset them."""
        sums, self._sums[mode] = self._sums[mode], _no_sums()
        device = self.args.device  # a copy from the host would wait for the GPU
        counts = [
            torch.full((1,), float(sums[name]), device=device, dtype=torch.float64)
            for name in ("targets", "tokens")
        ]
        return torch.cat((sums["counted"].double(), *counts))

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        return sums if self.args.world_size == 1 else self.accelerator.reduce(sums, "sum")

    def _set_metrics(self, mode: str, sums: list[float]) -> None:
        """Set the metrics that TRL's `log` adds to its line, from the sums of all ranks."""
        *counted, targets, tokens = sums
        self._total_train_tokens += int(tokens) if mode == "train" else 0
        self._metrics[mode].update(
            {name: [value / max(1, targets)] for name, value in zip(COUNTED, counted, strict=True)}
        )
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log like TRL, with metrics since the last line. This waits for the GPU."""
        mode = "train" if self.model.training else "eval"
        if self._sums[mode]["tokens"]:  # equally true on all ranks, which the reduction needs
            self._set_metrics(mode, self._over_ranks(self._take_sums(mode)).tolist())
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys: Any,
        start: float,
        **kwargs: Any,
    ) -> None:
        """Log each step during the next one, so that the host does not wait for the GPU.

        Log the last step immediately, and steps after which the run saves or evaluates.
        """
        control, state, should_log = self.control, self.state, self.control.should_log
        self._write_late_line()
        control.should_log = should_log  # _write_late_line has reset it
        log_now = (
            control.should_save
            or control.should_evaluate
            or control.should_training_stop
            or state.global_step >= state.max_steps
        )
        on_gpu = isinstance(grad_norm, torch.Tensor) and tr_loss.device.type == "cuda"
        if log_now or not control.should_log or not self._fast or not on_gpu:
            super()._maybe_log_save_evaluate(
                tr_loss, grad_norm, model, trial, epoch, ignore_keys, start, **kwargs
            )
            return
        steps = state.global_step - self._globalstep_last_logged
        self._globalstep_last_logged = state.global_step
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        means = torch.stack((tr_loss, norm)).double() / self.args.world_size
        sums = self._over_ranks(torch.cat((means, self._take_sums("train"))))
        self._late = LateLine(state.global_step, state.epoch, steps, start, kwargs, sums)
        tr_loss.zero_()
        # Only logging would reset this flag, and an epoch's end calls this method again.
        control.should_log = False

    def _write_late_line(self) -> None:
        """Wait until the GPU has finished the previous step, and log it."""
        late, self._late = self._late, None
        if late is None:
            return
        state, now = self.state, (self.state.global_step, self.state.epoch)
        loss, norm, *sums = late.read()
        state.global_step, state.epoch, state.logged_at = late.step, late.epoch, late.ended_at()
        self._total_loss_scalar += loss
        self._set_metrics("train", sums)
        # should_evaluate is about the current step, not about the logged one.
        evaluates, self.control.should_evaluate = self.control.should_evaluate, False
        super().log({"loss": loss / late.steps, "grad_norm": norm, **late.kwargs}, late.start)
        self.control.should_evaluate = evaluates
        (state.global_step, state.epoch), state.logged_at = now, None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the gradients.

        transformers would compute it by clipping at infinity, which rewrites all gradients.
        """
        unsharded = self._config.topology.strategy in ("none", "ddp")
        if grad_norm is None and unsharded and self.accelerator.scaler is None:
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            return torch.nn.utils.get_total_norm(gradients)
        return super()._get_grad_norm(model, grad_norm)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0. transformers would count parameters at every batch for this unused figure."""
        return 0

    def store_flos(self) -> None:
        """Do nothing. transformers would wait for the GPU to sum this unused figure."""


@dataclass
class LateLine:
    """A log line whose sums are being copied from the GPU."""

    # A CUDA event and the time.monotonic() of its completion, to convert event times to host times
    _clock: ClassVar[tuple[torch.cuda.Event, float] | None] = None

    step: int
    epoch: float
    steps: int  # number of steps since the previous line
    start: float
    kwargs: dict[str, Any]
    sums: torch.Tensor

    def __post_init__(self) -> None:
        """Start the copy to the host."""
        if LateLine._clock is None:
            reference = torch.cuda.Event(enable_timing=True)
            reference.record()
            reference.synchronize()
            LateLine._clock = reference, time.monotonic()
        on_host = torch.empty(self.sums.shape, dtype=self.sums.dtype, pin_memory=True)
        self.sums = on_host.copy_(self.sums, non_blocking=True)
        self.ended = torch.cuda.Event(enable_timing=True)
        self.ended.record()

    def read(self) -> list[float]:
        self.ended.synchronize()
        return self.sums.tolist()

    def ended_at(self) -> float:
        """Return the time.monotonic() at which the GPU finished the step."""
        reference, reference_s = LateLine._clock
        return reference_s + reference.elapsed_time(self.ended) / 1000


def _no_sums() -> dict[str, Any]:
    return {"counted": 0.0, "targets": 0, "tokens": 0}
