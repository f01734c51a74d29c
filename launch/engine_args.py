"""Arguments of vLLM's engine that topology.server_args hands on: to the server of topology=split, to the engine of topology=colocate, and
to that of engine=vllm. They are checked against the list of the locked vLLM (containers/lock_trainer_args.py)."""

from __future__ import annotations

import json

from launch.command_line.mistaken import argument_meant
from launch.errors import UserError
from launch.planner import shapes
from launch.schema import Config
from launch.trainer_args import check_value, lock

KEY = "topology.server_args"
# Arguments that another key decides; given here they would contradict it.
OWNED = {
    "model": "model=",
    "served_model_name": "model=",
    "tokenizer": "model=",
    "tokenizer_revision": "model.revision=",
    "revision": "model.revision=",
    "dtype": "precision=",
    "seed": "seed=",
    "tensor_parallel_size": "topology.server_tensor_parallel= under topology=split",
    "pipeline_parallel_size": "topology.server_tensor_parallel= under topology=split",
    "data_parallel_size": "topology.servers= under topology=split",
    "gpu_memory_utilization": "topology.server_memory_share=",
    "kv_cache_memory_bytes": "topology.server_cache_gb=",
    "max_model_len": "topology.server_max_length= under topology=split",
    "enable_sleep_mode": "method.args.vllm_enable_sleep_mode= under topology=colocate",
}
OF_COLOCATE = {
    "tensor_parallel_size": "method.args.vllm_tensor_parallel_size=",
    "gpu_memory_utilization": "method.args.vllm_gpu_memory_utilization=",
    "max_model_len": "method.args.vllm_max_model_length=",
    "model_impl": "method.args.vllm_model_impl=",
}
# What the launcher sets because nothing else works.
FIXED = {
    "host": "the server listens on the loopback, since its weight transfer takes whoever reaches it",
    "port": "the server takes a free one",
    "weight_transfer_config": "it follows from the GPUs: NCCL between two, gloo on one",
    "logprobs_mode": "training needs the probabilities of the distribution that was sampled",
    "max_logprobs": "training needs those of sampled tokens, whatever their rank",
    "generation_config": "how tokens are drawn is decided by method.args",
    "distributed_executor_backend": "the launcher starts the processes",
}


def check(config: Config) -> None:
    """Raise UserError for an argument that the locked vLLM does not have, a value that it does not take, or what another key decides."""
    engine, colocate = lock()["engine"], config.topology.name == "colocate"
    owned = {**OWNED, **OF_COLOCATE} if colocate else OWNED
    for name, given in config.topology.server_args.items():
        if name in owned:
            raise UserError(f"{KEY}.{name}={given}: decided elsewhere; set {owned[name]} instead.")
        if name in FIXED:
            raise UserError(f"{KEY}.{name}={given}: {FIXED[name]}. Leave it out.")
        if name not in engine:
            raise UserError(f"{KEY}.{name}={given}: {_why_unknown(name, {*engine} - {*owned, *FIXED})}")
        if given is not None:  # null leaves it out, for what a file gives
            check_value(f"{KEY}.{name}", given, engine[name], "vLLM")


def _why_unknown(name: str, engine: set[str]) -> str:
    """Say what became of an argument of older versions, as bench/vllm does, or which one is near."""
    refused: dict[str, str] = lock()["arguments"]["recipes.bench.vllm_engine.EngineConfig"]["base"]["refused"]
    if refused.get(name, "").startswith("is gone"):
        return f"{name} {refused[name]}"
    meant = f" Use: user_env.{name}=<value>." if name.isupper() else argument_meant(name, engine)
    return f"the engine of vLLM {lock()['vllm']} has no such argument.{meant}"


def argv(config: Config) -> list[str]:
    """The arguments as vLLM's command line has them: true and false as --flag and --no-flag, mappings as JSON."""
    found: list[str] = []
    for name, given in config.topology.server_args.items():
        option = name.replace("_", "-")
        if isinstance(given, bool):
            found.append(f"--{option}" if given else f"--no-{option}")
        elif isinstance(given, list):
            found += [f"--{option}", *map(str, given)]
        elif given is not None:
            found += [f"--{option}", json.dumps(given) if isinstance(given, dict) else str(given)]
    return found


def weights_gb(config: Config, width: float) -> float:
    """Return the size of the engine's weights, at `width` bytes each; quantization=fp8 rounds those of the linear layers as they load."""
    linear = config.model.num_layers * sum(inputs * outputs for inputs, outputs in shapes.linear_sizes(config.model))
    saved = (width - 1) * linear if config.topology.server_args.get("quantization") == "fp8" else 0.0
    return (width * config.model.num_parameters - saved) / 1e9


def cache_width(config: Config, width: float) -> float:
    """Return bytes of an element of the engine's cache, which is `width` unless kv_cache_dtype says another."""
    return 1.0 if str(config.topology.server_args.get("kv_cache_dtype")).startswith("fp8") else width
