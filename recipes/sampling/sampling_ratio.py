"""Compute the sampling ratio of vLLM's completions in the pass that trains on them.

TRL corrects for the difference between vLLM and the trainer by the ratio of their probabilities.
For the trainer's probability it runs a pass without gradient, a quarter of a step's computation. If
a generation is used for one optimizer step, the training pass gives the same log-probabilities
(with dropout, under its own masks).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from launch.core.errors import UserError

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class SamplingRatio:
    """Skip TRL's extra pass: a mixin, placed before PackedCompletions.

    TRL's pass stays in evaluation, and if weights change within a generation.
    """

    _unweighed: dict[str, Any] | None = None  # inputs that wait for their log-probabilities

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mode = self.vllm_importance_sampling_mode
        if mode not in MODES:
            raise UserError(
                f"method.args.vllm_importance_sampling_mode={mode}: no such mode. "
                f"Use: {', '.join(MODES)}."
            )
        # Values of this step, one per token, or per sequence for a ratio of sequences.
        self._differences: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch without its extra pass and the ratio."""
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
        self._unweighed = (
            inputs if corrected and "importance_sampling_ratio" not in inputs else None
        )
        loss = super()._compute_loss(model, inputs)
        if self._ratios and self.accelerator.sync_gradients:
            self._log_ratios()
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        """Return the parent's result, after adding the ratio that TRL's loss reads next."""
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._unweighed is not None:
            inputs, self._unweighed = self._unweighed, None
            inputs["importance_sampling_ratio"] = self._ratio(result[0].detach(), inputs)
        return result

    def _ratio(self, log_probs: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return policy over sampling probability, bounded as in TRL.

        The shape is (samples, tokens), or (samples, 1) for whole sequences.
        """
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        difference = log_probs - inputs["sampling_per_token_logps"]
        # vLLM gives no probability for some tokens; their ratio is 1.
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
        """Append the step's metrics, as TRL names them."""
        difference, ratio = torch.cat(self._differences), torch.cat(self._ratios)
        self._differences, self._ratios = [], []
        zero = difference.new_zeros(1)  # if all of a rank's completions are truncated
        difference, ratio = (values if values.numel() else zero for values in (difference, ratio))
        of_rank = torch.stack(
            [difference.mean(), difference.max(), ratio.min(), ratio.mean(), ratio.max()]
        )
        mean, most, low, middle, high = self.accelerator.gather(of_rank[None]).unbind(dim=1)
        values = {
            "sampling_logp_difference/mean": mean.mean(),
            "sampling_logp_difference/max": most.max(),
            "importance_sampling_ratio/min": low.min(),
            "importance_sampling_ratio/mean": middle.mean(),
            "importance_sampling_ratio/max": high.max(),
        }
        for name, value in values.items():
            self._metrics["train"][f"sampling/{name}"].append(value.item())
