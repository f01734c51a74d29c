"""Compute TRL's importance-sampling ratio in the training pass.

The ratio of the trainer's to vLLM's probability corrects for the difference between both. TRL runs
an additional pass without gradient for the trainer's probability, a quarter of a step's
computation. If a generation is used for only one optimizer step, the training pass computes the
same log-probabilities (under dropout, with different masks).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from launch.core.errors import UserError

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class SamplingRatio:
    """Skip TRL's additional pass. This is a mixin, placed before PackedCompletions.

    TRL's pass is still used in evaluation, and if weights change within a generation.
    """

    _pending_inputs: dict[str, Any] | None = None  # the batch that needs the ratio

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mode = self.vllm_importance_sampling_mode
        if mode not in MODES:
            raise UserError(
                f"method.args.vllm_importance_sampling_mode={mode}: unknown mode. "
                f"Use one of {', '.join(MODES)}."
            )
        # Values of this step, one per token or sequence.
        self._differences: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch, without the ratio if the training pass computes it."""
        generation = self.args.steps_per_generation * self.num_iterations
        aligned = self.args.gradient_accumulation_steps % generation == 0
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        if not (corrected and aligned and self.model.training):
            return super()._generate_and_score_completions(inputs)
        self.vllm_importance_sampling_correction = False
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        self._pending_inputs = (
            inputs if corrected and "importance_sampling_ratio" not in inputs else None
        )
        loss = super()._compute_loss(model, inputs)
        if self._ratios and self.accelerator.sync_gradients:
            self._log_ratios()
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        """Return the parent's result. Add the ratio to the batch, where TRL's loss reads it."""
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._pending_inputs is not None:
            inputs, self._pending_inputs = self._pending_inputs, None
            inputs["importance_sampling_ratio"] = self._ratio(result[0].detach(), inputs)
        return result

    def _ratio(self, log_probs: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the trainer's over vLLM's probability, clipped as in TRL.

        The shape is (samples, tokens), or (samples, 1) for ratios of sequences.
        """
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        difference = log_probs - inputs["sampling_per_token_logps"]
        # For tokens without a probability from vLLM, the ratio is 1.
        has_both = mask & ~difference.isnan()
        level, bounding = self.vllm_importance_sampling_mode.split("_")
        logs = torch.where(has_both, difference, 0.0)
        ratio = (logs.sum(dim=-1, keepdim=True) if level == "sequence" else logs).exp()
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        ratio = (
            ratio.clamp(low, high)
            if bounding == "truncate"
            else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        )
        self._differences.append(difference[has_both].abs())
        self._ratios.append(ratio.flatten() if level == "sequence" else ratio[mask])
        return ratio

    def _log_ratios(self) -> None:
        """Log the step's metrics under TRL's names."""
        difference, ratio = torch.cat(self._differences), torch.cat(self._ratios)
        self._differences, self._ratios = [], []
        zero = difference.new_zeros(1)  # for a rank whose completions are all truncated
        difference, ratio = (values if values.numel() else zero for values in (difference, ratio))
        rank_values = torch.stack(
            [difference.mean(), difference.max(), ratio.min(), ratio.mean(), ratio.max()]
        )
        mean, largest, low, average, high = self.accelerator.gather(rank_values[None]).unbind(dim=1)
        values = {
            "sampling_logp_difference/mean": mean.mean(),
            "sampling_logp_difference/max": largest.max(),
            "importance_sampling_ratio/min": low.min(),
            "importance_sampling_ratio/mean": average.mean(),
            "importance_sampling_ratio/max": high.max(),
        }
        for name, value in values.items():
            self._metrics["train"][f"sampling/{name}"].append(value.item())
