"""Give reasons for launch/config/choose.py to leave a setting alone.

Another value would change what a run computes, or would not work. Different rounding is not a
change; a different sum is. For the division of a batch, so is drawing random numbers in another
order: the run could no longer be compared with one under speed=off.
"""

from __future__ import annotations

from launch.estimate.batch_counts import batch, order_by_batch
from launch.estimate.rank_memory import generates_with_vllm
from launch.schema import Config
from launch.schema.enums import Vendor
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


def why_eager(config: Config) -> str | None:
    """Return why layers cannot be compiled; None if they can.

    This outweighs precision=fp8 too, in a smoke run on a CPU.
    """
    for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        if value := argument(config, name):
            return f"method.args.{name}={str(value).lower()} compiles the whole model"
    if argument(config, "use_liger_kernel"):
        return (
            "method.args.use_liger_kernel=true: compiling around Liger's kernels is slower "
            "than either alone"
        )
    if config.smoke or config.hardware.vendor == Vendor.none:
        return "on a CPU, compiling takes longer than it saves"
    if not config.hardware.compile:
        return f"hardware.compile=false: {config.hardware.gfx} has no working compiler"
    if config.topology.strategy == "zero3":
        return "ZeRO-3 gathers weights in hooks inside a layer, which a graph cannot contain"
    if config.precision.weights == "nf4":
        return "compiled layers have not been measured with 4-bit weights"
    if config.method.generates and not generates_with_vllm(config):
        return (
            "transformers generates with the same layers, and its cache changes shape with "
            "every token"
        )
    return None


def why_padded(config: Config) -> str | None:
    """Return why rows must be padded as TRL does; None if they need not."""
    if not config.method.row_layouts:
        return f"method={config.method.name} has no other layout"
    if argument(config, "packing"):
        return "method.args.packing=true already packs the whole data set"
    if argument(config, "padding_free"):
        return "method.args.padding_free=true already avoids padding"
    if argument(config, "neftune_noise_alpha"):
        return "method.args.neftune_noise_alpha: the noise is divided by the padded length"
    if _pairs(config):
        return _of_pairs(config)
    if config.adapter.dropout:
        return (
            f"adapter.dropout={config.adapter.dropout:g}: dropout masks depend on how a batch "
            "is padded"
        )
    return None


def _pairs(config: Config) -> bool:
    return config.method.sequences_per_example == 2


def _of_pairs(config: Config) -> str | None:
    for name in argument(config, "loss_type") or []:
        if name not in OF_A_PAIR:
            why = "is not a mean over pairs, so it depends on which pairs share a micro-batch"
            return f"method.args.loss_type={name} {why}"
    return None


def why_batch_stays(config: Config) -> str | None:
    """Return why the micro-batch must stay; None if it may change.

    The result may depend on its size, or the memory of another size may be unknown.
    """
    if not config.method.batch_invariant:
        return f"the loss of method={config.method.name} may depend on it (method.batch_invariant)"
    ordered = order_by_batch(config)
    if ordered:
        return ordered
    if argument(config, "auto_find_batch_size"):
        return "method.args.auto_find_batch_size=true sets it"
    if config.method.selection.metric is not None:
        return "held-out metrics are means over batches, so they depend on the batch size"
    if config.adapter.dropout or argument(config, "neftune_noise_alpha"):
        return "random masks or noise are drawn per micro-batch"
    unbounded = _why_unbounded(config)
    if unbounded:
        return unbounded
    if _pairs(config):
        return _of_pairs(config)
    return _of_generation(config) if config.method.generates else None


def _of_generation(config: Config) -> str | None:
    if argument(config, "loss_type") not in OF_THE_BATCH:
        return (
            f"method.args.loss_type={argument(config, 'loss_type')} averages over the tokens "
            "of a micro-batch"
        )
    if (argument(config, "top_entropy_quantile") or 1.0) < 1.0:
        return "method.args.top_entropy_quantile: the quantile is taken per micro-batch"
    for name in ("steps_per_generation", "generation_batch_size"):
        if argument(config, name):
            return f"method.args.{name} counts micro-batches"
    return None


def _why_unbounded(config: Config) -> str | None:
    if not config.method.generates and not argument(config, "max_length"):
        return "method.args.max_length=null: rows may have any length"
    return None


def why_checkpointing_stays(config: Config) -> str | None:
    """Return why gradient checkpointing must stay as it is; None if it may change."""
    if config.topology.fsdp.activation_checkpointing:
        return "topology.fsdp.activation_checkpointing=true: FSDP recomputes instead"
    return _why_unbounded(config)


def divides_evenly(config: Config, per_device: int) -> bool:
    """Return whether all micro-batches are full, now and with `per_device` rows.

    Only then is a mean of means the mean. Only a mean over pairs needs that.
    """
    if not _pairs(config):
        return True
    rows = min(filter(None, (config.data.limit, config.data.num_train)), default=None)
    size = batch(config)
    return rows is not None and all(
        rows % (size.ranks * n) == 0 for n in (size.per_device, per_device)
    )
