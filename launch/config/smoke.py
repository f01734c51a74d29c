"""Scale any composition down until a CPU runs it in seconds, along the same code path.

This is smoke=true. Only sizes change. What an argument means for the algorithm (loss, beta,
scheduler ...) stays as composed, and so does every key of smoke_keeps.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

from launch.config.compose import leaf
from launch.estimate import batch_counts
from launch.schema import Config, Topology, shapes, trainer_args
from launch.schema.enums import Debug, Init, Link, Profile, Rocprof, Vendor

SIZES = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",  # the model at the end is enough
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
# Rows keep their length, because a prompt has to fit. The small vocabulary needs about three tokens
# for one of a real vocabulary.
TOKENS_FOR_ONE = 4
# Tokens of a sequence. DPO's batch of this length takes 2.2 GB, and memory grows with the square.
MOST_TOKENS = 2048
# Arguments of vLLM's engine that also work on a CPU, unlike those for kernels and dtypes.
ENGINE = ("max_num_seqs", "enable_prefix_caching", "async_scheduling", "skip_tokenizer_init")
LOW_PRECISION = {"fp8": "torchao", "nf4": "bitsandbytes"}  # the packages that compute in them
DATA_SIZES = ("data.num_train", "data.num_heldout", "data.limit")
# argument -> its value on a CPU, and why no other is possible, even if smoke_keeps names it
NOT_ON_A_CPU = {
    "torch_compile": (False, "compiling takes minutes of a CPU"),
    "use_liger_kernel": (False, "Liger's kernels are for a GPU"),
    "fail_below": (None, "figures of a CPU are not compared"),
    "optim": ("adamw_torch", "the optimizer that runs everywhere"),
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
    """Return the small composition, and a line for each setting that a CPU cannot have.

    Such a line reads `what was given: what replaces it`.
    """
    small = copy.deepcopy(config)
    _shrink_model(small)
    fewer_words = small.model.vocab_size < config.model.vocab_size
    left_out = _shrink_arguments(small, TOKENS_FOR_ONE if fewer_words else 1)
    _shrink_data(small)
    if small.adapter.rank is not None and small.adapter.path is None:  # a loaded one has a rank
        _set(small, "adapter.rank", min(small.adapter.rank, 4))
    if config.precision.name != "fp32" and not _has_precision(config):
        fp16 = config.precision.name == "fp16"
        where = ", fp16 only where it trains, without DeepSpeed or vLLM" if fp16 else ""
        left_out.append(f"precision={config.precision.name}: a CPU computes in fp32{where}")
        small.precision.name = small.precision.compute = small.precision.weights = "fp32"
        small.adapter.quantize_base = False
    left_out += _shrink_topology(small)
    left_out += _shrink_effective_batch(small)
    if small.debug != Debug.none:
        left_out.append(f"debug={small.debug.name}: its variables only affect a GPU")
        small.debug = Debug.none
    if small.profile in (Profile.memory, Profile.rocprof):
        left_out.append(f"profile={small.profile.name}: it needs a GPU; smoke uses profile=torch")
        small.profile, small.rocprof = Profile.torch, Rocprof.v3
    if small.step.checkpointed_layers is not None:
        small.step.checkpointed_layers = min(small.step.checkpointed_layers, small.model.num_layers)
    hardware = small.hardware
    hardware.vendor, hardware.link = Vendor.none, Link.none
    hardware.attention, hardware.env = "sdpa", {}
    hardware.gpus_per_node = max(1, small.topology.num_gpus or 1)
    hardware.dataloader.num_workers, hardware.dataloader.pin_memory = 0, False
    hardware.peak_tflops, hardware.precisions = {}, [small.precision.name]
    # Pack rows on the CPU if they are packed on the GPU.
    hardware.packed_attention = hardware.packed_attention and "sdpa"
    # A CPU has these, so no rule about the GPU applies.
    hardware.compile = hardware.triton = hardware.vllm = True
    return small, left_out


def smaller(config: Config, small: Config) -> list[str]:
    """Return `key given -> here` for every size that scale_down changed."""
    arguments = {*config.method.args, *small.method.args} - {*NOT_ON_A_CPU}
    sizes = {
        *(f"method.args.{name}" for name in arguments),
        *(f"model.{name}" for name in MODEL_SIZES),
        *DATA_SIZES,
        "data.pairs_of_any",
        "adapter.rank",
    }
    return [
        f"{key} {leaf(config, key)} -> {leaf(small, key)}"
        for key in sorted(sizes)
        if leaf(config, key) != leaf(small, key)
    ]


def _set(config: Config, key: str, value: Any) -> None:
    """Set a key of the schema unless smoke_keeps names it."""
    if key not in config.smoke_keeps:
        *groups, name = key.split(".")
        setattr(functools.reduce(getattr, groups, config), name, value)


def _shrink_model(config: Config) -> None:
    """Replace the model by a small one of random weights, unless its weights are local."""
    model = config.model
    if model.path:
        return
    model.hub_id = model.revision = None
    model.init = Init.random
    for name, size in MODEL_SIZES.items():
        _set(config, f"model.{name}", size)
    _set(config, "model.num_parameters", shapes.parameters(model))


def _shrink_data(config: Config) -> None:
    data = config.data
    if data.kind == "samples":  # random weights give no correct answer
        _set(config, "data.pairs_of_any", True)
    _set(config, "data.num_train", data.num_train and min(data.num_train, 32))
    _set(config, "data.num_heldout", min(data.num_heldout, 8))
    if "data.num_train" not in config.smoke_keeps:  # else data.limit would cut these rows
        _set(config, "data.limit", min(data.limit or 32, 32))


def _shrink_arguments(config: Config, tokens_for_one: int) -> list[str]:
    """Set the method's own sizes (method.smoke) over the usual ones, and smoke_keeps over both.

    Return a line for each argument that a CPU cannot have.
    """
    args, known = config.method.args, trainer_args.known(config)
    own = {name: value for name, value in config.method.smoke.items() if name not in NOT_ON_A_CPU}
    typed = _kept_arguments(config)
    sizes = {name: value for name, value in SIZES.items() if name in known}
    longest = trainer_args.value(config, "max_length") if "max_length" in known else None
    if longest:
        sizes["max_length"] = min(tokens_for_one * longest, MOST_TOKENS, config.model.max_positions)
    if config.method.selection.metric is not None and config.method.trains:
        sizes |= {"save_strategy": "steps", "save_steps": 1}  # saves models to choose from
    if args.get("num_generations_eval"):  # the usual size need not be a multiple of it
        sizes["per_device_eval_batch_size"] = args["num_generations_eval"]
    chosen = {**own, **typed}
    args |= sizes | chosen
    if "num_train_epochs" in chosen and "max_steps" not in chosen:
        args.pop("max_steps", None)
    elif "num_train_epochs" not in typed:
        args.pop("num_train_epochs", None)
    left_out = []
    for name, (value, why) in NOT_ON_A_CPU.items():
        if name in known:
            if args.get(name, value) != value:
                left_out.append(f"method.args.{name}={args[name]}: {why}")
            args[name] = value
    return left_out


def _kept_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments in smoke_keeps, whole even if only a part of a mapping is named.

    method.smoke replaces whole arguments.
    """
    keys = [key.split(".") for key in config.smoke_keeps]
    names = {parts[2] for parts in keys if parts[:2] == ["method", "args"] and len(parts) > 2}
    names -= {*NOT_ON_A_CPU}
    return {name: value for name, value in config.method.args.items() if name in names}


def _shrink_topology(config: Config) -> list[str]:
    """Reduce several processes to two, and servers to one, on vLLM's build for the CPU."""
    topology, left_out = config.topology, []
    if topology.numa_binding:
        left_out.append(
            f"topology.numa_binding={topology.numa_binding.value}: ranks may use every core"
        )
        topology.numa_binding = None
    dropped = {name: value for name, value in topology.server_args.items() if name not in ENGINE}
    if dropped:
        left_out.append(f"topology.server_args={dropped}: a GPU's")
        for name in dropped:
            del topology.server_args[name]
    if topology.name == "colocate" or (topology.servers and not _is_installed("vllm", config)):
        why = (
            "transformers generates (vLLM shares memory with a trainer on a GPU only)"
            if topology.name == "colocate"
            else "a trainer alone, and transformers generates (`make vllm` installs vLLM's build "
            "for the CPU)"
        )
        left_out.append(f"topology={topology.name}: {why}")
        config.topology = Topology("single", num_gpus=1, strategy="none")
        return left_out
    if topology.name == "single":
        return left_out
    if topology.servers:
        if (topology.servers, topology.server_tensor_parallel) != (1, 1):
            left_out.append(
                f"topology.servers={topology.servers}, "
                f"server_tensor_parallel={topology.server_tensor_parallel}: one process"
            )
        topology.servers, topology.server_tensor_parallel = 1, 1
        topology.server_cache_gb = topology.server_cache_gb and min(topology.server_cache_gb, 1)
        topology.server_max_length = min(MOST_TOKENS, config.model.max_positions)
        if not config.model.path:
            # After a reload, vLLM's CPU kernels keep old weights of a head tied to the embedding.
            config.model.tied_embeddings = False
            config.model.num_parameters = shapes.parameters(config.model)
    if topology.num_gpus is None or topology.num_gpus > 2:
        num_gpus = topology.num_gpus or config.hardware.gpus_per_node
        left_out.append(f"topology.num_gpus={num_gpus}: two processes")
        topology.num_gpus = 2
    return left_out


def _shrink_effective_batch(config: Config) -> list[str]:
    """Drop the real ranks' batch; keep the user's if the ranks here divide it."""
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
    """Return whether a CPU computes in this precision.

    torch casts to fp16 and scales the loss on any CPU. DeepSpeed needs a CPU with native fp16, and
    vLLM has not been tried. bitsandbytes has kernels for a CPU, and torchao rounds to fp8 there, if
    the ranks' Python has them.
    """
    if config.precision.name == "fp16":
        zero = config.topology.strategy.startswith("zero")
        return config.method.trains and not zero and not config.topology.servers
    package = LOW_PRECISION.get(config.precision.name)
    return package is not None and _is_installed(package, config)


def _is_installed(package: str, config: Config) -> bool:
    """Return whether the ranks have a package: under runtime=local, in the launcher's own Python.

    The cpu image has none.
    """
    return config.runtime.on_node == "local" and importlib.util.find_spec(package) is not None
