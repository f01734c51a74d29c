"""smoke=true: any composition scaled down until a CPU runs it in seconds, along the same code path."""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

from launch import batch, trainer_args
from launch.planner import shapes
from launch.rules.values import leaf
from launch.schema import Config, Topology
from launch.schema.enums import Debug, Init, Link, Profile, Rocprof, Vendor

# Sizes only: what an argument means for the algorithm (loss, beta, scheduler ...) stays as composed, and so does every key of smoke_keeps.
SIZES = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",  # the end is near enough
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
# Rows keep their length: a prompt has to fit, and the small vocabulary makes three tokens or so of one of a real one's.
TOKENS_FOR_ONE = 4
MOST_TOKENS = 2048  # of a sequence: DPO's batch of such takes 2.2 GB of a CPU, and with the square of the length more
# Arguments of vLLM's engine that mean the same on a CPU; kernels, dtypes and sizes of a GPU's cache do not.
ENGINE_ON_A_CPU = ("max_num_seqs", "enable_prefix_caching", "async_scheduling")
LOW_PRECISION = {"fp8": "torchao", "nf4": "bitsandbytes"}  # the packages that compute in them
DATA_SIZES = ("data.num_train", "data.num_heldout", "data.limit")
# Arguments that a CPU has no use for, whoever gives them, and why.
NOT_ON_A_CPU = {
    "torch_compile": (False, "compiling takes minutes of a CPU"),
    "use_liger_kernel": (False, "Liger's kernels are for a GPU"),
    "fail_below": (None, "a CPU's figures are compared with nothing"),
    "optim": ("adamw_torch", "the optimizer that runs everywhere"),
}


# Sizes that stay where smoke_keeps names them. What the CPU stands for (hardware, precision, topology) does not.
MODEL_SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,  # the smallest that vLLM takes
    "vocab_size": 512,
}


def scale_down(config: Config) -> tuple[Config, list[str]]:
    """The small composition, and a line for each thing that it has otherwise: `what was given: what there is instead`."""
    small, left_out = copy.deepcopy(config), []
    _shrink_model(small)
    left_out += _shrink_arguments(small, TOKENS_FOR_ONE if small.model.vocab_size < config.model.vocab_size else 1)
    _shrink_data(small)
    if small.adapter.rank is not None and small.adapter.path is None:  # one that is loaded has its own
        _set(small, "adapter.rank", min(small.adapter.rank, 4))
    if config.precision.name != "fp32" and not _has_precision(config):
        where = ", fp16 only where it trains, without DeepSpeed or vLLM" if config.precision.name == "fp16" else ""
        left_out.append(f"precision={config.precision.name}: a CPU computes in fp32{where}")
        small.precision.name = small.precision.compute = small.precision.weights = "fp32"
        small.precision.loss_scaling = small.adapter.quantize_base = False
    _shrink_topology(small, left_out)
    left_out += _shrink_effective_batch(small)
    if small.debug != Debug.none:
        left_out.append(f"debug={small.debug.name}: its variables are for a GPU")
        small.debug = Debug.none
    if small.profile in (Profile.memory, Profile.rocprof):
        left_out.append(f"profile={small.profile.name}: it watches a GPU; profile=torch here")
        small.profile, small.rocprof = Profile.torch, Rocprof.v3
    hardware = small.hardware
    hardware.vendor, hardware.link, hardware.attention, hardware.env = Vendor.none, Link.none, "sdpa", {}
    hardware.gpus_per_node = max(1, small.topology.num_gpus or 1)
    hardware.dataloader.num_workers, hardware.dataloader.pin_memory = 0, False
    hardware.peak_tflops, hardware.precisions = {}, [small.precision.name]
    hardware.packed_attention = hardware.packed_attention and "sdpa"  # rows are packed as there
    if small.step.checkpointed_layers is not None:
        small.step.checkpointed_layers = min(small.step.checkpointed_layers, small.model.num_layers)
    hardware.compile = hardware.triton = hardware.vllm = True  # a CPU has them: no rule about the GPU applies
    return small, left_out


def smaller(config: Config, small: Config) -> list[str]:
    """`key given -> here` for every size that scale_down changed."""
    sizes = {f"method.args.{name}": None for name in {**config.method.args, **small.method.args} if name not in NOT_ON_A_CPU}
    sizes |= dict.fromkeys([*(f"model.{name}" for name in MODEL_SIZES), *DATA_SIZES, "data.pairs_of_any", "adapter.rank"])
    pairs = [(key, leaf(config, key), leaf(small, key)) for key in sizes]
    return [f"{key} {before} -> {now}" for key, before, now in sorted(pairs, key=lambda p: p[0]) if before != now]


def _set(config: Config, key: str, value: Any) -> None:
    """At a key of the schema, but for one that is to stay."""
    if key not in config.smoke_keeps:
        *groups, name = key.split(".")
        setattr(functools.reduce(getattr, groups, config), name, value)


def _shrink_data(config: Config) -> None:
    data = config.data
    if data.kind == "samples":  # random weights get nothing right and end nowhere
        _set(config, "data.pairs_of_any", True)
    _set(config, "data.num_train", data.num_train and min(data.num_train, 32))
    _set(config, "data.num_heldout", min(data.num_heldout, 8))
    if "data.num_train" not in config.smoke_keeps:  # it would cut the rows that were asked for
        _set(config, "data.limit", min(data.limit or 32, 32))


def _shrink_effective_batch(config: Config) -> list[str]:
    """It is of the real ranks; that of the command line holds for those that there are, where it divides by theirs."""
    wanted, config.effective_batch = config.effective_batch, None
    if wanted is None or trainer_args.recipe_name(config):
        return []
    size = batch.batch(config)
    if "effective_batch" not in config.smoke_keeps or wanted % (size.ranks * size.per_device):
        return [f"effective_batch={wanted}: {size.sequences}, {size.ranks} rank(s) x {size.per_device} x {size.accumulation}"]
    config.effective_batch = wanted
    batch.apply_effective_batch(config)
    return []


def _shrink_arguments(config: Config, tokens_for_one: int) -> list[str]:
    """A line for each that a CPU cannot have. Of the method's own sizes (method.smoke) and the usual ones the former win; over both, what
    is to stay."""
    args, known = config.method.args, trainer_args.known(config)
    chooses = config.method.selection.metric is not None and config.method.kind == "trainer"
    saves = {"save_strategy": "steps", "save_steps": 1} if chooses else {}  # models to choose from
    own = {name: value for name, value in config.method.smoke.items() if name not in NOT_ON_A_CPU}
    kept = _kept_arguments(config)
    bounded = "num_train_epochs" in {**own, **kept} and "max_steps" not in {**own, **kept}  # else max_steps bounds it
    sizes = {name: value for name, value in SIZES.items() if name in known and not (bounded and name == "max_steps")}
    longest = trainer_args.value(config, "max_length") if "max_length" in known else None
    if longest:
        sizes["max_length"] = min(tokens_for_one * longest, MOST_TOKENS, config.model.max_positions)
    # As many as the answers to a held-out prompt, where those are asked for: its size here need not be a multiple.
    groups = {"per_device_eval_batch_size": args["num_generations_eval"]} if args.get("num_generations_eval") else {}
    args |= sizes | saves | groups | own
    if bounded:
        args.pop("max_steps", None)
    elif "num_train_epochs" not in kept:
        args.pop("num_train_epochs", None)
    args |= kept
    left_out = []
    for name, (value, why) in NOT_ON_A_CPU.items():
        if name in known:
            if args.get(name, value) != value:
                left_out.append(f"method.args.{name}={args[name]}: {why}")
            args[name] = value
    return left_out


def _kept_arguments(config: Config) -> dict[str, Any]:
    """Arguments that are to stay: whole, though of a mapping only a part of it was named, since method.smoke knows none in parts."""
    keys = [key.split(".") for key in config.smoke_keeps]
    names = {parts[2] for parts in keys if parts[:2] == ["method", "args"] and len(parts) > 2}
    return {name: value for name, value in config.method.args.items() if name in names and name not in NOT_ON_A_CPU}


def _shrink_topology(config: Config, left_out: list[str]) -> None:
    """Two processes where there were several; the server is vLLM's build for the CPU."""
    topology = config.topology
    if topology.numa_binding:
        left_out.append(f"topology.numa_binding={topology.numa_binding.value}: ranks on every core")
        topology.numa_binding = None
    dropped = {name: given for name, given in topology.server_args.items() if name not in ENGINE_ON_A_CPU}
    if dropped:
        left_out.append(f"topology.server_args={dropped}: a GPU's")
        topology.server_args = {name: given for name, given in topology.server_args.items() if name not in dropped}
    if topology.servers and not _has_vllm(config):
        left_out.append("topology=split: a trainer alone, and transformers generates (`make vllm` installs vLLM's build for the CPU)")
        config.topology = Topology("single", num_gpus=1, strategy="none")
        return
    if topology.name == "colocate":
        left_out.append("topology=colocate: transformers generates (vLLM shares memory with a trainer on a GPU only)")
        config.topology = Topology("single", num_gpus=1, strategy="none")
        return
    if topology.name == "single":
        return
    if topology.servers:
        if (topology.servers, topology.server_tensor_parallel) != (1, 1):
            left_out.append(f"topology.servers={topology.servers}, server_tensor_parallel={topology.server_tensor_parallel}: one process")
        topology.servers, topology.server_tensor_parallel = 1, 1
        topology.server_cache_gb = topology.server_cache_gb and min(topology.server_cache_gb, 1)
        topology.server_max_length = min(MOST_TOKENS, config.model.max_positions)
    if topology.servers and not config.model.path:
        # After a reload vLLM's CPU kernels keep the old weights of a head that is tied to the embedding.
        config.model.tied_embeddings = False
        config.model.num_parameters = shapes.parameters(config.model)
    if topology.num_gpus is None or topology.num_gpus > 2:
        left_out.append(f"topology.num_gpus={topology.num_gpus or config.hardware.gpus_per_node}: two processes")
        topology.num_gpus = 2


def _has_precision(config: Config) -> bool:
    """torch casts to fp16 and scales the loss on any CPU, DeepSpeed on those with fp16 of their own; vLLM has not been tried.
    bitsandbytes has kernels for a CPU, and torchao rounds to fp8 there, where the Python that runs the ranks has them."""
    if config.precision.name == "fp16":
        return config.method.kind == "trainer" and not config.topology.strategy.startswith("zero") and not config.topology.servers
    package = LOW_PRECISION.get(config.precision.name)
    return package is not None and config.runtime.on_node == "local" and importlib.util.find_spec(package) is not None


def _has_vllm(config: Config) -> bool:
    """In the Python that runs the ranks: the launcher's own. The cpu image holds none."""
    return config.runtime.on_node == "local" and importlib.util.find_spec("vllm") is not None


def _shrink_model(config: Config) -> None:
    """Random weights of MODEL_SIZES. A local model is small already or the user's choice."""
    model = config.model
    if model.path:
        return
    model.hub_id = model.revision = None
    model.init = Init.random
    for name, size in MODEL_SIZES.items():
        _set(config, f"model.{name}", size)
    _set(config, "model.num_parameters", shapes.parameters(model))
