"""Scale any composition down for smoke=true, so that a CPU runs the same code path in seconds.

Only sizes change. Arguments of the algorithm (loss, beta, scheduler ...) and the keys in
smoke_keeps stay as composed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
from typing import Any

from launch.config.compose import leaf
from launch.estimate import batch_counts
from launch.machine import this_python
from launch.schema import Config, Topology, shapes, trainer_args
from launch.schema.enums import Debug, Init, Link, Profile, Rocprof, Vendor
from launch.schema.trainer_args import value_or_none

SIZES = {
    "max_steps": 2,
    "warmup_steps": 0,  # its first step has learning rate 0, so nothing would be learned
    "logging_steps": 1,
    "save_strategy": "no",  # the final model is saved anyway
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_generations": 2,
    "max_completion_length": 8,
    "max_new_tokens": 8,
    "samples_per_prompt": 1,
    "batch_size": 8,
}
# Rows keep their text, which the small vocabulary splits into about three times as many tokens as a
# real one. max_length is multiplied by this.
LENGTH_FACTOR = 4
MIN_ROWS = 32  # of the training data
# Tokens of a sequence. DPO's batch of this length takes 2.2 GB, and memory grows with the square.
MAX_TOKENS = 2048
# Arguments of vLLM's engine that also work on a CPU, unlike those for kernels and dtypes.
CPU_ENGINE_ARGS = (
    *("max_num_seqs", "enable_prefix_caching", "async_scheduling", "skip_tokenizer_init"),
)
NEEDS_VLLM = "`make vllm` installs vLLM's build for the CPU"
LOW_PRECISION = {"fp8": "torchao", "nf4": "bitsandbytes"}  # precision -> required package
DATA_SIZES = ("data.num_train", "data.num_heldout", "data.limit")
# argument -> its only value on a CPU, and the reason; smoke_keeps does not protect it
CPU_VALUES = {
    "torch_compile": (False, "compiling takes minutes on a CPU"),
    "use_liger_kernel": (False, "Liger's kernels need a GPU"),
    "activation_offloading": (False, "activations are in the host's memory already"),
    "dataloader_persistent_workers": (False, "the rank loads data itself"),
    "dataloader_prefetch_factor": (None, "the rank loads data itself"),
    "fail_below": (None, "results on a CPU are not compared"),
    "optim": ("adamw_torch", "this optimizer runs on every device"),
    "models": (["tiny"], "a CPU would need hours or all of its memory for the others"),
}
MODEL_SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,  # the smallest that vLLM accepts
    "vocab_size": 512,
}


def scale_down(config: Config) -> tuple[Config, list[str]]:
    """Return the small composition, and a line for each setting that a CPU does not support.

    A line has the form `<setting>: <replacement or reason>`.
    """
    small = copy.deepcopy(config)
    _shrink_model(small)
    has_small_vocabulary = small.model.vocab_size < config.model.vocab_size
    replaced = _shrink_arguments(small, LENGTH_FACTOR if has_small_vocabulary else 1)
    if small.adapter.rank is not None and small.adapter.path is None:  # else the file sets it
        _set(small, "adapter.rank", min(small.adapter.rank, 4))
    if config.precision.name != "fp32" and not _has_precision(config):
        limits = " (in fp16 only to train without DeepSpeed and vLLM)"
        limits = limits if config.precision.name == "fp16" else ""
        replaced.append(f"precision={config.precision.name}: a CPU computes in fp32{limits}")
        small.precision.name = small.precision.compute = small.precision.weights = "fp32"
        small.adapter.quantize_base = False
    if value_or_none(small, "engine") == "vllm" and not _has_vllm(small):
        replaced.append(f"method.args.engine=vllm: transformers generates ({NEEDS_VLLM})")
        small.method.args["engine"], old = "transformers", small.topology
        # without the keys of vLLM, which transformers does not read
        small.topology = Topology(
            old.name, old.num_gpus, old.strategy, numa_binding=old.numa_binding
        )
    replaced += _shrink_topology(small)
    replaced += _shrink_effective_batch(small)
    _shrink_data(small)  # after the batch, which needs its rows
    if small.debug == Debug.memory_fault:
        replaced.append(f"debug={small.debug.name}: its variables only affect a GPU")
        small.debug = Debug.none
    if small.profile in (Profile.memory, Profile.rocprof):
        replaced.append(f"profile={small.profile.name}: profile=torch, because it needs a GPU")
        small.profile, small.rocprof, small.rocprof_counters = Profile.torch, Rocprof.v3, []
    if small.step.checkpointed_layers is not None:
        small.step.checkpointed_layers = min(small.step.checkpointed_layers, small.model.num_layers)
    if small.targets:
        replaced.append("targets: none, because figures of a CPU are not compared with a GPU's")
        small.targets = {}
    hardware = small.hardware
    hardware.vendor, hardware.link = Vendor.none, Link.none
    hardware.attention, hardware.env = "sdpa", {}
    hardware.gpus_per_node = max(1, small.topology.num_gpus or 1)
    hardware.dataloader.num_workers, hardware.dataloader.pin_memory = 0, False
    hardware.peak_tflops, hardware.precisions = {}, [small.precision.name]
    # Pack rows on the CPU if they would be packed on the GPU.
    hardware.packed_attention = hardware.packed_attention and "sdpa"
    # Avoid rules about GPUs that lack these.
    hardware.compile = hardware.triton = hardware.vllm = True
    return small, replaced


def with_topology(config: Config, small: Config) -> Config:
    """Return the scaled-down copy of a composition, but with the topology as it was composed."""
    hardware = dataclasses.replace(small.hardware, gpus_per_node=config.hardware.gpus_per_node)
    return dataclasses.replace(small, hardware=hardware, topology=config.topology)


def changed_sizes(config: Config, small: Config) -> list[str]:
    """Return a line `<key> <before> -> <after>` for every size that scale_down changed."""
    arguments = {*config.method.args, *small.method.args} - {*CPU_VALUES}
    sizes = {
        *(f"method.args.{name}" for name in arguments),
        *(f"model.{name}" for name in MODEL_SIZES),
        *DATA_SIZES,
        "data.pairs_of_any",
        "adapter.rank",
    }
    lines = []
    for key in sorted(sizes):
        before, after = leaf(config, key), leaf(small, key)
        if before != after:
            grows = isinstance(before, int) and isinstance(after, int) and before < after
            is_longer = grows and key.endswith(".max_length")
            reason = " (the small vocabulary needs more tokens)" * is_longer
            lines.append(f"{key} {before} -> {after}{reason}")
    return lines


def _set(config: Config, key: str, value: Any) -> None:
    """Set a key of the schema unless it is in smoke_keeps."""
    if key not in config.smoke_keeps:
        *groups, name = key.split(".")
        setattr(functools.reduce(getattr, groups, config), name, value)


def _shrink_model(config: Config) -> None:
    """Replace the model by a small one with random weights, unless its weights are local."""
    model = config.model
    if model.path:
        return
    model.hub_id = model.revision = None
    model.init = Init.random
    for name, size in MODEL_SIZES.items():
        _set(config, f"model.{name}", size)
    _set(config, "model.num_parameters", shapes.parameters(model))


def _shrink_data(config: Config) -> None:
    data, rows = config.data, max(MIN_ROWS, _rows_of_a_step(config))
    if data.kind == "samples":  # samples of random weights have equal scores
        _set(config, "data.pairs_of_any", True)
    _set(config, "data.num_train", data.num_train and min(data.num_train, rows))
    _set(config, "data.num_heldout", min(data.num_heldout, 8))
    if "data.num_train" not in config.smoke_keeps:  # data.limit would cut the user's number
        _set(config, "data.limit", min(data.limit or rows, rows))


def _rows_of_a_step(config: Config) -> int:
    """Return the rows that a generation or an optimizer step needs. TRL drops smaller batches."""
    if not config.method.trains:
        return 0
    if config.method.generates:
        group = int(trainer_args.value(config, "num_generations"))
        return batch_counts.generation_batch(config) // group
    return batch_counts.batch(config).sequences


def _shrink_arguments(config: Config, length_factor: int) -> list[str]:
    """Set the arguments to SIZES, overridden by method.smoke and then by smoke_keeps.

    Return a line for each argument that a CPU does not support.
    """
    args, arguments = config.method.args, trainer_args.known(config)
    method_sizes = {k: v for k, v in config.method.smoke.items() if k not in CPU_VALUES}
    # If the user sets part of a mapping, keep all of it, because method.smoke would replace it.
    keys = [key.split(".") for key in config.smoke_keeps]
    names = {parts[2] for parts in keys if parts[:2] == ["method", "args"] and len(parts) > 2}
    user_args = {k: v for k, v in args.items() if k in names and k not in CPU_VALUES}
    if config.method.kind == "bench":  # whose sizes for a GPU may take all memory of a CPU
        user_args = {
            k: v
            for k, v in user_args.items()
            if not 0 < _largest(method_sizes.get(k)) < _largest(v)
        }
    sizes = {name: value for name, value in SIZES.items() if name in arguments}
    longest = trainer_args.value(config, "max_length") if "max_length" in arguments else None
    if longest:
        sizes["max_length"] = min(length_factor * longest, MAX_TOKENS, config.model.max_positions)
    if config.method.selection.metric is not None and config.method.trains:
        # saves and evaluates models to choose from
        sizes |= {"save_strategy": "steps", "save_steps": user_args.get("eval_steps") or 1}
        sizes |= {"eval_steps": None} if args.get("eval_steps") else {}
    if args.get("num_generations_eval"):  # the batch must be a multiple of this group
        sizes["per_device_eval_batch_size"] = args["num_generations_eval"]
    overrides = {**method_sizes, **user_args}
    args |= sizes | overrides
    if "num_train_epochs" in overrides and "max_steps" not in overrides:
        args.pop("max_steps", None)
    elif "num_train_epochs" not in user_args:
        args.pop("num_train_epochs", None)
    replaced = []
    for name, (value, reason) in CPU_VALUES.items():
        if name in arguments:
            if args.get(name, value) != value:
                replaced.append(f"method.args.{name}={args[name]}: {reason}")
            args[name] = value
    return replaced


def _largest(value: Any) -> int:
    """Return the largest whole number in a value, its lists and its mappings; 0 if it has none."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return max(map(_largest, value), default=0)
    return value if isinstance(value, int) else 0


def _shrink_topology(config: Config) -> list[str]:
    """Reduce the topology to two trainers and one server of vLLM's build for the CPU.

    Return a line for each setting that changes.
    """
    topology, replaced = config.topology, []
    if topology.numa_binding:
        replaced.append(
            f"topology.numa_binding={topology.numa_binding.value}: ranks may use every core"
        )
        topology.numa_binding = None
    gpu_args = {k: v for k, v in topology.server_args.items() if k not in CPU_ENGINE_ARGS}
    if gpu_args:
        replaced.append(f"topology.server_args={gpu_args}: vLLM's defaults on a CPU")
        for name in gpu_args:
            del topology.server_args[name]
    if topology.name == "colocate" or (topology.servers and not _has_vllm(config)):
        reason = (
            "vLLM shares memory with a trainer only on a GPU"
            if topology.name == "colocate"
            else NEEDS_VLLM
        )
        replaced.append(
            f"topology={topology.name}: one trainer that generates with transformers ({reason})"
        )
        config.topology = Topology("single", num_gpus=1, strategy="none")
        return replaced
    if topology.name == "single":
        return replaced
    if topology.servers:
        if (topology.servers, topology.server_tensor_parallel) != (1, 1):
            replaced.append(
                f"topology.servers={topology.servers}, "
                f"server_tensor_parallel={topology.server_tensor_parallel}: one process"
            )
        topology.servers, topology.server_tensor_parallel = 1, 1
        topology.server_cache_gb = topology.server_cache_gb and min(topology.server_cache_gb, 1)
        # The user may have kept a longer completion, which needs as much again for its prompt.
        tokens = max(MAX_TOKENS, 2 * int(value_or_none(config, "max_completion_length") or 0))
        _set(config, "topology.server_max_length", min(tokens, config.model.max_positions))
        if not config.model.path:
            # With a tied head, vLLM's CPU kernels would keep using its old weights after a reload.
            config.model.tied_embeddings = False
            config.model.num_parameters = shapes.parameters(config.model)
    if topology.num_gpus is None or topology.num_gpus > 2:
        num_gpus = topology.num_gpus or config.hardware.gpus_per_node
        replaced.append(f"topology.num_gpus={num_gpus}: two processes")
        topology.num_gpus = 2
    return replaced


def _shrink_effective_batch(config: Config) -> list[str]:
    """Unset effective_batch, unless the user set it and the ranks of the smoke run divide it.

    Return a line if it is unset.
    """
    sequences, config.effective_batch = config.effective_batch, None
    if sequences is None or trainer_args.recipe_name(config):
        return []
    size = batch_counts.batch(config)
    if "effective_batch" not in config.smoke_keeps or sequences % (size.ranks * size.per_device):
        return [
            f"effective_batch={sequences}: {size.sequences}, {size.ranks} rank(s) x "
            f"{size.per_device} x {size.accumulation}"
        ]
    config.effective_batch = sequences
    batch_counts.apply_effective_batch(config)
    return []


def _has_precision(config: Config) -> bool:
    """Return whether a CPU can run this precision.

    torch casts to fp16 and scales the loss on any CPU. DeepSpeed needs a CPU with native fp16, and
    vLLM has not been tried. nf4 and fp8 need bitsandbytes and torchao, which support CPUs.
    """
    if config.precision.name == "fp16":
        zero = config.topology.strategy.startswith("zero")
        return config.method.trains and not zero and not config.topology.servers
    package = LOW_PRECISION.get(config.precision.name)
    return package is not None and _is_installed(package, config)


def _has_vllm(config: Config) -> bool:
    """Return whether local ranks can import vLLM's build for the CPU. No image has it."""
    return config.runtime.on_node == "local" and this_python.has_vllm_of_cpu()


def _is_installed(package: str, config: Config) -> bool:
    """Return whether ranks can import the package.

    Local ranks use the launcher's Python. The cpu image has none of these packages.
    """
    return config.runtime.on_node == "local" and importlib.util.find_spec(package) is not None
