"""GRPO's forward passes without padding: the samples of a micro-batch, each a prompt and a completion, laid end to end in one row.

TRL runs all passes in one method: the policy's, and without gradient those of the policy that sampled and of the reference. It takes
rows padded to the longest of the generation, and returns log-probabilities of the same shape. Only what happens in between is
replaced here, so loss and metrics are TRL's.

sampling_ratio.py leaves out the pass of the policy that sampled if it is the policy of this step.
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

from recipes.common import attention, head, rows
from recipes.common.layers import MULTIPLE, same_draws
from recipes.common.step import SHORTEST, halves

Pair = tuple[torch.Tensor, torch.Tensor | None]  # log-probabilities and entropies, each (samples, tokens of the completion)


class PackedCompletions:
    """Mixin to stand between CompiledLayers and GRPOTrainer. `step.rows=packed` packs samples, `grouped` pads them to the longest of
    their micro-batch.

    TRL's own passes stay under `padded`, and under `packed` if the head or the attention is not plain.
    """

    def __init__(self, *args: Any, config: DictConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        models = [self.accelerator.unwrap_model(model) for model in (self.model, self.ref_model) if model is not None]
        models = [model.get_base_model() if isinstance(model, PeftModel) else model for model in models]
        self._rows = OmegaConf.select(config, "step.rows")
        # ZeRO-3 shards the head, and a head cast to fp32 has its own forward.
        whole = config.topology.strategy != "zero3" and not self.args.cast_lm_head_to_fp32 and not self.aux_loss_enabled
        if self._rows == "packed" and not (whole and all(head.fits(model) and attention.fits(model) for model in models)):
            self._rows = "padded"
        if self._rows == "packed":
            compute = functools.partial(head.log_probs, temperature=self.temperature, of_entropy=self._entropy_bonus_enabled)
            for model in models:
                head.add(model, compute)

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
        """Replace TRL's method. input_ids and attention_mask: (samples, tokens), the last `logits_to_keep` of them the completion's;
        samples are taken `batch_size` at a time. `others`: for images, and the loss of a mixture of experts."""
        compute = {"packed": self._packed, "grouped": self._trimmed}.get(self._rows)
        if compute is None or any(value is not None and value is not False for value in others.values()):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **others
            )
        if self._fresh and not torch.is_grad_enabled():
            self._rehearse(model)
        mask = attention_mask.bool().cpu().numpy()  # the host needs the lengths, so it waits for the GPU, once
        size = batch_size or len(mask)
        chunks = [slice(start, start + size) for start in range(0, len(mask), size)]
        parts = [compute(model, input_ids[chunk], mask[chunk], logits_to_keep, compute_entropy) for chunk in chunks]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if compute_entropy else None, None

    def _packed(self, model: nn.Module, input_ids: torch.Tensor, mask: np.ndarray, keep: int, compute_entropy: bool) -> Pair:
        """Lay the samples end to end as documents of one row. The head is computed only where completion tokens are predicted."""
        lengths = mask.sum(axis=1)
        filled = self._filled(max(lengths.sum(), 2 * MULTIPLE if self.compiled == "yes" else 0))  # one block would need another graph
        of_completion = np.nonzero(mask)[1] >= mask.shape[1] - keep
        host = {
            "kept": np.flatnonzero(mask),
            "completion": np.flatnonzero(of_completion),
            "places": np.flatnonzero(mask[:, -keep:]),
            **rows.boundaries(lengths.tolist(), filled),
        }
        at = {name: torch.from_numpy(found).to(input_ids.device) for name, found in host.items()}
        kept, completion, places = (at.pop(name) for name in ("kept", "completion", "places"))
        ids = functional.pad(input_ids.flatten()[kept], (0, filled - len(kept)), value=self._tokenizer.pad_token_id)
        with self.accelerator.autocast():
            found = model(input_ids=ids[None], targets=ids[completion], target_positions=completion - 1, **at)
        nothing = found.log_probs.new_zeros(len(mask) * keep)
        log_probs, entropies = (nothing.index_copy(0, places, values).view(-1, keep) for values in (found.log_probs, found.entropy))
        return log_probs, entropies

    def _trimmed(self, model: nn.Module, input_ids: torch.Tensor, mask: np.ndarray, keep: int, compute_entropy: bool) -> Pair:
        """Call TRL's pass without the columns that are padding in all samples."""
        prompt, used = mask.shape[1] - keep, np.flatnonzero(mask.any(axis=0))
        longest = self._filled(max(1, used[-1] + 1 - prompt))
        columns = slice(prompt - self._filled(prompt - used[0]), prompt + longest)
        attention_mask = torch.from_numpy(mask[:, columns]).to(input_ids)
        found = super()._get_per_token_logps_and_entropies(model, input_ids[:, columns], attention_mask, longest, None, compute_entropy)
        log_probs, entropies = (values if values is None else functional.pad(values, (0, keep - longest)) for values in found[:2])
        return log_probs, entropies

    def _filled(self, tokens: int) -> int:
        """Round `tokens` up to the multiple that kernels are made for."""
        multiple = self.pad_to_multiple_of or 1
        return -(-int(tokens) // multiple) * multiple

    def _rehearsed(self) -> Iterator[dict[str, Any]]:
        """Yield full micro-batches of the longest samples, samples half as long, and so on, as FastStep does."""
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
        """Rehearse the passes without gradient as CompiledLayers does the one with it; the first generation needs them earlier."""
        with same_draws(self.model):
            for batch in self._rehearsed():
                ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), dim=1)
                self._packed(model, ids, np.ones(ids.shape, dtype=bool), ids.shape[1] // 2, False)
