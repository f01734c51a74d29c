"""Compute GRPO's log-probabilities without padding, with the samples of a micro-batch in one row.

This replaces the TRL method that computes log-probabilities for the policy, the sampling policy and
the reference. Inputs and outputs have TRL's shapes, padded to the longest sample of the generation.
So TRL still computes loss and metrics. sampling_ratio.py can skip the sampling policy's pass.

If all rewards of a group are equal, its advantages and gradients are zero. This is often the case
for 15 to 30% of the rows. They are computed without gradient, only for metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from peft import PeftModel
from torch import nn
from torch.nn import functional
from trl.trainer import utils as trl_utils

from recipes.models import head, packed_attention
from recipes.models.layers import MULTIPLE, without_dropout
from recipes.training import packing
from recipes.training.step import SHORTEST, halves

# Log-probabilities and entropies, each (samples, tokens of the completion).
Pair = tuple[torch.Tensor, torch.Tensor | None]


class PackedCompletions:
    """Compute samples in one row (step.rows=packed), or in groups of similar lengths (grouped).

    This is a mixin, placed between CompiledLayers and GRPOTrainer. TRL's own method is used with
    `padded`, and with `packed` if the model's head or attention is not supported.
    """

    # (samples,): True if the advantage is zero. None if all samples need a gradient
    _idle: torch.Tensor | None = None
    _rehearsed_idle = False  # whether the kernels without gradient have been compiled

    def __init__(self, *args: Any, config: DictConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wrapped = [model for model in (self.model, self.ref_model) if model is not None]
        models = [self.accelerator.unwrap_model(model) for model in wrapped]
        models = [m.get_base_model() if isinstance(m, PeftModel) else m for m in models]
        # ZeRO-3 shards the head, and a head cast to fp32 has its own forward.
        can_pack = (
            config.topology.strategy != "zero3"
            and not self.args.cast_lm_head_to_fp32
            and not self.aux_loss_enabled
            and all(head.fits(model) and packed_attention.fits(model.config) for model in models)
        )
        # TRL's tiles have the width of a large vocabulary. A small one would fill only a part.
        width = models[0].config.get_text_config().vocab_size
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE, width)
        self._rows = OmegaConf.select(config, "step.rows")
        if self._rows == "packed" and not can_pack:
            self._rows = "padded"
        if self._rows == "packed":
            compute = functools.partial(
                head.log_probs,
                temperature=self.temperature,
                entropy_grad=self._entropy_bonus_enabled,
            )
            for model in models:
                head.add(model, compute)
        # Sharded weights are gathered in each pass, so all ranks need the same number of passes.
        self._skips_idle = (
            self._rows == "packed"
            and self.beta == 0.0
            and not self._entropy_bonus_enabled
            and config.topology.strategy in ("none", "ddp")
        )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._idle = inputs["advantages"] == 0 if self._skips_idle else None
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probabilities, entropies and None, like TRL's method.

        `input_ids` and `attention_mask` are (samples, tokens). The last `logits_to_keep` tokens are
        the completion. At most `batch_size` samples are computed together. `others` are arguments
        for images and mixtures of experts, which need TRL's method.
        """
        compute = {"packed": self._packed, "grouped": self._trimmed}.get(self._rows)
        if compute is None or any(
            other is not None and other is not False for other in others.values()
        ):
            settings = (logits_to_keep, batch_size, compute_entropy)
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, *settings, **others
            )
        if self._is_first_batch and not torch.is_grad_enabled():
            self._rehearse(model)
        if self._idle is not None and torch.is_grad_enabled():
            compute = self._packed_twice
        # The host needs the lengths, so it waits for the GPU here.
        mask = attention_mask.bool().cpu().numpy()
        size = batch_size or len(mask)
        parts = []
        for start in range(0, len(mask), size):
            chunk = slice(start, start + size)
            parts.append(
                compute(model, input_ids[chunk], mask[chunk], logits_to_keep, compute_entropy)
            )
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if compute_entropy else None, None

    def _packed(
        self, model: nn.Module, ids: torch.Tensor, mask: np.ndarray, keep: int, entropy: bool = True
    ) -> Pair:
        """Compute all samples as consecutive documents of one row.

        The head is computed only for the last `keep` tokens of each sample.
        """
        lengths = mask.sum(axis=1)
        # A row of only one block would need another graph of the compiled layers.
        filled = self._filled(max(lengths.sum(), 2 * MULTIPLE if self.compiled == "yes" else 0))
        is_completion = np.nonzero(mask)[1] >= mask.shape[1] - keep
        host = {
            "used": np.flatnonzero(mask),
            "completion": np.flatnonzero(is_completion),
            "places": np.flatnonzero(mask[:, -keep:]),
            **packing.boundaries(lengths.tolist(), filled),
        }
        tensors = {name: torch.from_numpy(array).to(ids.device) for name, array in host.items()}
        used, completion, places = (tensors.pop(n) for n in ("used", "completion", "places"))
        padding = (0, filled - len(used))
        row = functional.pad(ids.flatten()[used], padding, value=self._tokenizer.pad_token_id)
        with self.accelerator.autocast():
            output = model(
                input_ids=row[None],
                targets=row[completion],
                target_positions=completion - 1,
                **tensors,
            )
        zeros = output.log_probs.new_zeros(len(mask) * keep)
        log_probs, entropies = (
            zeros.index_copy(0, places, values).view(-1, keep)
            for values in (output.log_probs, output.entropy)
        )
        return log_probs, entropies

    def _packed_twice(
        self, model: nn.Module, ids: torch.Tensor, mask: np.ndarray, keep: int, entropy: bool
    ) -> Pair:
        """Compute like `_packed`, but without gradient for samples whose advantage is zero."""
        idle = self._idle.cpu().numpy()
        if idle.all():
            idle[mask.sum(axis=1).argmin()] = False  # the backward pass needs a gradient
        learning, idle = np.flatnonzero(~idle), np.flatnonzero(idle)
        unwrapped = self.accelerator.unwrap_model(model)  # DDP would exchange buffers
        if len(idle) and self.compiled == "yes" and not self._rehearsed_idle:
            self._rehearsed_idle = True
            with torch.no_grad():
                self._rehearse(unwrapped)
        pairs = [self._packed(model, ids[learning], mask[learning], keep)]
        if len(idle):
            with torch.no_grad():
                pairs.append(self._packed(unwrapped, ids[idle], mask[idle], keep))
        order = np.argsort(np.concatenate((learning, idle)))
        log_probs, entropies = (torch.cat(parts)[order] for parts in zip(*pairs, strict=True))
        return log_probs, entropies

    def _trimmed(
        self, model: nn.Module, ids: torch.Tensor, mask: np.ndarray, keep: int, entropy: bool
    ) -> Pair:
        """Compute with TRL's method, without columns that are padding in all samples."""
        prompt, used = mask.shape[1] - keep, np.flatnonzero(mask.any(axis=0))
        longest = self._filled(max(1, used[-1] + 1 - prompt))
        columns = slice(prompt - self._filled(prompt - used[0]), prompt + longest)
        attention_mask = torch.from_numpy(mask[:, columns]).to(ids)
        log_probs, entropies, _ = super()._get_per_token_logps_and_entropies(
            model, ids[:, columns], attention_mask, longest, None, entropy
        )
        padding = (0, keep - longest)
        if entropies is not None:
            entropies = functional.pad(entropies, padding)
        return functional.pad(log_probs, padding), entropies

    def _filled(self, tokens: int) -> int:
        """Round up to a multiple of `pad_to_multiple_of`, which kernels are compiled for."""
        multiple = self.pad_to_multiple_of or 1
        return -(-int(tokens) // multiple) * multiple

    def _rehearsed(self) -> Iterator[dict[str, Any]]:
        """Yield micro-batches for compiling kernels: the maximum length, half of it, and so on."""
        size, device = self.args.per_device_train_batch_size, self.accelerator.device
        longest = self.args.vllm_max_model_length or self.max_completion_length + SHORTEST
        for length in halves(longest if self._rows == "packed" else 0):
            ones = torch.ones((size, length // 2), device=device)
            ids = torch.full_like(ones, self._tokenizer.pad_token_id, dtype=torch.long)
            yield {
                "prompt_ids": ids,
                "prompt_mask": ones.long(),
                "completion_ids": ids,
                "completion_mask": ones.long(),
                "advantages": ones[:, 0],
                "num_items_in_batch": ones.sum(),
                "importance_sampling_ratio": ones,
                "ref_per_token_logps": -ones,
            }

    def _rehearse(self, model: nn.Module) -> None:
        """Compile the kernels of passes without gradient, which the first generation needs.

        CompiledLayers compiles the kernels of the pass with gradient.
        """
        with without_dropout(self.model):
            for batch in self._rehearsed():
                ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), dim=1)
                self._packed(model, ids, np.ones(ids.shape, dtype=bool), ids.shape[1] // 2)
