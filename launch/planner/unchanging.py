"""Where a faster setting would change what a run computes, or cannot work: the reasons that launch/planner/choose.py leaves one alone.

Rounding is no change; another sum is. A change of the order in which random numbers are drawn counts as one for the division of a batch,
since a run with speed=off could then not be compared with.
"""

from __future__ import annotations

from launch.batch import batch, order_by_batch
from launch.planner.memory import generates_with_vllm
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.trainer_args import argument

# Losses of DPO that are a mean over pairs, each by itself (trl 1.16, DPOTrainer). `aot` and `aot_unpaired` sort a micro-batch, `sft`
# averages over its tokens.
OF_A_PAIR = {
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    "discopop",
}
# Losses of GRPO that a division of the generation leaves alone: means over sequences, or sums over what the whole batch has (trl 1.16,
# GRPOTrainer). `bnpo` divides by the tokens of a micro-batch.
OF_THE_BATCH = {"grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"}


def why_eager(config: Config) -> str | None:
    """What keeps layers from being compiled, whoever asks; fp8 in front of a CPU's smoke run too."""
    whole = [name for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode") if argument(config, name)]
    if whole:
        return f"method.args.{whole[0]}={str(argument(config, whole[0])).lower()} compiles the whole model"
    if argument(config, "use_liger_kernel"):
        return "method.args.use_liger_kernel=true: Liger's kernels would be compiled around, which is slower than either"
    if config.smoke or config.hardware.vendor == Vendor.none:
        return "compiling takes longer than it saves on a CPU"
    if not config.hardware.compile:
        return f"hardware.compile=false: {config.hardware.gfx} has no working compiler"
    if config.topology.strategy == "zero3":
        return "ZeRO-3 gathers weights by hooks inside a layer, which a graph cannot hold"
    if config.precision.weights == "nf4":
        return "nobody has measured compiled layers with weights of 4 bits"
    if config.method.name == "grpo" and not generates_with_vllm(config):
        return "transformers generates with the same layers, whose cache has another shape for every token"
    return None


def why_padded(config: Config) -> str | None:
    """What a change of padding would change."""
    if argument(config, "packing"):
        return "method.args.packing=true packs the whole data set"
    if argument(config, "padding_free"):
        return "method.args.padding_free=true has no padding already"
    if argument(config, "neftune_noise_alpha"):
        return "method.args.neftune_noise_alpha: the noise is divided by the padded length"
    if config.method.name == "dpo":
        return _of_pairs(config)
    if config.adapter.dropout:
        return f"adapter.dropout={config.adapter.dropout:g}: masks are drawn for a batch as it is padded"
    return None


def _of_pairs(config: Config) -> str | None:
    other = [name for name in argument(config, "loss_type") or [] if name not in OF_A_PAIR]
    return f"method.args.loss_type={other[0]} is no mean over pairs, so who shares a micro-batch matters" if other else None


def why_batch_stays(config: Config) -> str | None:
    """What another micro-batch, with as many sequences in a step, would change; or why its memory is not known."""
    ordered = order_by_batch(config)
    if ordered:
        return ordered
    if argument(config, "auto_find_batch_size"):
        return "method.args.auto_find_batch_size=true finds it"
    if config.method.selection.metric is not None:
        return "held-out figures are means over batches of the same size"
    if config.adapter.dropout or argument(config, "neftune_noise_alpha"):
        return "random masks or noise are drawn for a micro-batch"
    unbounded = _why_unbounded(config)
    if unbounded:
        return unbounded
    if config.method.name == "dpo":
        return _of_pairs(config)
    return _of_generation(config) if config.method.name == "grpo" else None


def _of_generation(config: Config) -> str | None:
    if argument(config, "loss_type") not in OF_THE_BATCH:
        return f"method.args.loss_type={argument(config, 'loss_type')} averages over the tokens of a micro-batch"
    if (argument(config, "top_entropy_quantile") or 1.0) < 1.0:
        return "method.args.top_entropy_quantile: the quantile is of a micro-batch"
    given = [name for name in ("steps_per_generation", "generation_batch_size") if argument(config, name)]
    return f"method.args.{given[0]} counts micro-batches" if given else None


def _why_unbounded(config: Config) -> str | None:
    if config.method.name != "grpo" and not argument(config, "max_length"):
        return "method.args.max_length=null: nobody knows how long a row may be"
    return None


def why_checkpointing_stays(config: Config) -> str | None:
    if config.topology.fsdp.activation_checkpointing:
        return "topology.fsdp.activation_checkpointing=true: FSDP's own"
    return _why_unbounded(config)


def divides_evenly(config: Config, per_device: int) -> bool:
    """Whether every micro-batch is full, now and with so many rows: a mean of means is the mean then. Only DPO takes such."""
    if config.method.name != "dpo":
        return True
    rows = min(filter(None, (config.data.limit, config.data.num_train)), default=None)
    size = batch(config)
    return rows is not None and all(rows % (size.ranks * n) == 0 for n in (size.per_device, per_device))
