"""Check and render topology.server_args.

Arguments of vLLM's engine under topology=split, colocate and engine=vllm.

They are checked against the list of the locked vLLM (containers/lock_trainer_args.py).
"""

from __future__ import annotations

from launch.core.errors import UserError
from launch.core.near_names import argument_meant
from launch.schema import Config, shapes
from launch.schema.trainer_args import check_value, lock

KEY = "topology.server_args"
# Arguments that another key decides and that would contradict it.
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
# Values that the launcher sets because no other works.
FIXED = {
    "host": "the server listens on the loopback, because its weight transfer has no authentication",
    "port": "the server picks a free one",
    "weight_transfer_config": "it follows from the GPUs: NCCL between two, gloo on one",
    "logprobs_mode": "training needs the probabilities of the distribution that was sampled",
    "max_logprobs": "training needs those of all sampled tokens",
    "generation_config": "how tokens are drawn is decided by method.args",
    "distributed_executor_backend": "the launcher starts the processes",
}


def check(config: Config) -> None:
    """Raise UserError for an argument or value that vLLM lacks, or that another key decides."""
    engine, colocate = lock()["engine"], config.topology.name == "colocate"
    owned = {**OWNED, **OF_COLOCATE} if colocate else OWNED
    faults = {name: f"decided elsewhere; set {key} instead." for name, key in owned.items()}
    faults |= {name: f"{reason}. Leave it out." for name, reason in FIXED.items()}
    for name, value in config.topology.server_args.items():
        fault = faults.get(name)
        if fault is None and name not in engine:
            fault = _why_unknown(name, {*engine} - {*faults})
        if fault:
            raise UserError(f"{KEY}.{name}={value}: {fault}")
        if value is not None:  # null removes an argument that a file gives
            check_value(f"{KEY}.{name}", value, engine[name], "vLLM")


def _why_unknown(name: str, engine: set[str]) -> str:
    """Return the replacement of an older version's argument, or one with a similar name."""
    bench = lock()["arguments"]["recipes.bench.vllm_engine.EngineConfig"]
    refused: dict[str, str] = bench["base"]["refused"]
    if refused.get(name, "").startswith("is gone"):
        return f"{name} {refused[name]}"
    meant = f" Use: user_env.{name}=<value>." if name.isupper() else argument_meant(name, engine)
    return f"the engine of vLLM {lock()['vllm']} has no such argument.{meant}"


def weights_gb(config: Config, width: float) -> float:
    """Return GB of weights at `width` bytes each; quantization=fp8 loads linear layers as fp8."""
    saved = 0.0
    if config.topology.server_args.get("quantization") == "fp8":
        layer = sum(inputs * outputs for inputs, outputs in shapes.linear_sizes(config.model))
        saved = (width - 1) * config.model.num_layers * layer
    return (width * config.model.num_parameters - saved) / 1e9


def cache_width(config: Config, width: float) -> float:
    """Return the bytes per element of the engine's cache: `width` unless kv_cache_dtype is fp8."""
    dtype = str(config.topology.server_args.get("kv_cache_dtype"))
    return 1.0 if dtype.startswith("fp8") else width
