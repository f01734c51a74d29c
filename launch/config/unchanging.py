"""Give reasons for launch/config/choose.py to leave a setting alone, from unchanging.yaml."""

from __future__ import annotations

from launch.config.conditions import Facts, hold, setting, table
from launch.estimate.batch_counts import batch, order_by_batch
from launch.estimate.rank_memory import generates_with_vllm
from launch.schema import Config
from launch.schema.trainer_args import argument

# DPO losses that are a mean of independent terms, one per pair (trl 1.16, DPOTrainer). `aot` and
# `aot_unpaired` sort a micro-batch; `sft` averages over its tokens.
OF_A_PAIR = {
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"),
    *("sppo_hard", "apo_zero", "apo_down", "discopop"),
}
# GRPO losses that do not depend on how a generation is divided: means over sequences, or sums
# divided by a total of the whole batch (trl 1.16, GRPOTrainer). `bnpo` divides by the tokens of a
# micro-batch.
OF_THE_BATCH = {"grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"}


def _loss_of_several_pairs(config: Config) -> str | None:
    losses = argument(config, "loss_type") if config.method.sequences_per_example == 2 else []
    return next((name for name in losses or [] if name not in OF_A_PAIR), None)


def _loss_of_micro_batch(config: Config) -> str | None:
    loss = argument(config, "loss_type") if config.method.generates else None
    return loss if loss not in (None, *OF_THE_BATCH) else None


FACTS: Facts = {
    "generates_with_vllm": generates_with_vllm,
    "has_quantile": lambda c: (argument(c, "top_entropy_quantile") or 1.0) < 1.0,
    "loss_of_micro_batch": _loss_of_micro_batch,
    "loss_of_several_pairs": _loss_of_several_pairs,
    "order_by_batch": order_by_batch,
}


def why(question: str, config: Config) -> str | None:
    """Return the first reason in a section of unchanging.yaml; None if there is none."""
    for row in table(__file__, "unchanging")[question]:
        if hold(config, row["when"], FACTS):
            value = setting(config, next(iter(row["when"])), FACTS)
            value = str(value).lower() if isinstance(value, bool) else value
            return str(row["why"].format(config=config, value=value))
    return None


def divides_evenly(config: Config, per_device: int) -> bool:
    """Return whether all micro-batches are full, now and with `per_device` rows.

    Only then is a mean of means the mean. Only a mean over pairs needs that.
    """
    if config.method.sequences_per_example != 2:
        return True
    rows = min(filter(None, (config.data.limit, config.data.num_train)), default=None)
    size = batch(config)
    return rows is not None and all(
        rows % (size.ranks * n) == 0 for n in (size.per_device, per_device)
    )
