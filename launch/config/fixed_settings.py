"""Decide which settings speed=auto must not change, from the reasons in fixed_settings.yaml."""

from __future__ import annotations

from launch.config.conditions import Facts, all_met, setting, table
from launch.estimate.batch_counts import batch, why_order_depends_on_batch
from launch.estimate.rank_state import generates_with_vllm
from launch.schema import Config
from launch.schema.trainer_args import value_or_none

# DPO losses that are a mean of independent terms, one per pair (trl 1.16, DPOTrainer). Among
# the others, `aot` and `aot_unpaired` sort a micro-batch, and `sft` averages over its tokens.
PAIR_LOSSES = {
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"),
    *("sppo_hard", "apo_zero", "apo_down", "discopop"),
}
# GRPO losses that do not depend on the division into micro-batches: means over sequences, or sums
# divided by a total of the complete batch (trl 1.16, GRPOTrainer). `bnpo` divides by the tokens of
# a micro-batch.
BATCH_LOSSES = {"grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"}


def _loss_of_several_pairs(config: Config) -> str | None:
    losses = value_or_none(config, "loss_type") if config.method.sequences_per_example == 2 else []
    return next((name for name in losses or [] if name not in PAIR_LOSSES), None)


def _loss_of_micro_batch(config: Config) -> str | None:
    loss = value_or_none(config, "loss_type") if config.method.generates else None
    return loss if loss not in (None, *BATCH_LOSSES) else None


FACTS: Facts = {
    "generates_with_vllm": generates_with_vllm,
    "has_quantile": lambda c: (value_or_none(c, "top_entropy_quantile") or 1.0) < 1.0,
    "loss_of_micro_batch": _loss_of_micro_batch,
    "loss_of_several_pairs": _loss_of_several_pairs,
    "why_order_depends_on_batch": why_order_depends_on_batch,
}


def reason_to_keep(section: str, config: Config) -> str | None:
    """Return the first reason of a section that applies; None means that speed=auto may choose."""
    for row in table(__file__, "fixed_settings")[section]:
        if all_met(config, row["when"], FACTS):
            value = setting(config, next(iter(row["when"])), FACTS)
            value = str(value).lower() if isinstance(value, bool) else value
            return str(row["why"].format(config=config, value=value))
    return None


def divides_evenly(config: Config, per_device: int) -> bool:
    """Return whether micro-batches of `per_device` rows give the same loss as the current ones.

    A mean over pairs is computed as a mean of micro-batch means, which equals it only if all
    micro-batches are full.
    """
    if config.method.sequences_per_example != 2:
        return True
    rows = min(filter(None, (config.data.limit, config.data.num_train)), default=None)
    size = batch(config)
    return rows is not None and all(
        rows % (size.ranks * n) == 0 for n in (size.per_device, per_device)
    )
