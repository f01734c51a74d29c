"""Arguments of vLLM's engine as a setting of a benchmark: how they stand on a command line, and what became of those that are gone.

Checked against the parser of vLLM 0.31 (tests/integration/test_bench_vllm.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recipes.common.errors import UserError

# What AMD's MI300X guide and other documents of 2024 and 2025 give, and what does it now. Lower case: an argument. Upper case: a variable.
REMOVED = {
    "num_scheduler_steps": "engine V1 schedules one step at a time, beside the GPU: async_scheduling, on by itself where it can be",
    "multi_step_stream_outputs": "it went with num_scheduler_steps",
    "num_lookahead_slots": "speculative_config",
    "max_seq_len_to_capture": "graphs are captured by batch size, for every length: max_cudagraph_capture_size",
    "swap_space": "engine V1 computes a preempted request anew instead of swapping it out; cpu_offload_gb offloads weights",
    "preemption_mode": "engine V1 always computes a preempted request anew",
    "use_v2_block_manager": "engine V1 has one block manager",
    "scheduler_delay_factor": "engine V1 mixes prefill and decode in one step: max_num_batched_tokens balances them",
    "quantization_param_path": "scales of the KV cache stand in the checkpoint (llm-compressor or Quark writes them)",
    "calculate_kv_scales": "scales of the KV cache stand in the checkpoint (llm-compressor or Quark writes them)",
    "disable_async_output_proc": "async_scheduling",
    "device": "the installed build decides",
    "worker_use_ray": "distributed_executor_backend: ray",
    "speculative_model": "speculative_config",
    "guided_decoding_backend": "structured_outputs_config",
    "rope_scaling": "hf_overrides: {rope_parameters: ...}",
    "rope_theta": "hf_overrides: {rope_parameters: ...}",
    "disable_log_requests": "requests are not logged unless enable_log_requests is given",
    "task": "runner",
    "VLLM_USE_V1": "there is no engine but V1",
    "VLLM_USE_TRITON_FLASH_ATTN": "attention_backend: TRITON_ATTN, ROCM_ATTN or ROCM_AITER_FA",
    "VLLM_ATTENTION_BACKEND": "attention_backend",
}
OWNED = {
    "model": "model=",
    "tokenizer": "model=",
    "revision": "model.revision=",
    "seed": "seed=",
    "host": "nothing: servers listen on the loopback",
    "port": "nothing: a free one is taken",
    "input_len": "method.args.lengths",
    "output_len": "method.args.lengths",
    "num_prompts": "method.args.num_prompts",
}
REFUSED = {name: f"is gone from vLLM. Instead: {what}." for name, what in REMOVED.items()}
REFUSED |= {name: f"is decided elsewhere; set {what} instead." for name, what in OWNED.items()}
OURS = ("label", "instances")  # keys of a setting that vLLM does not see


def check(setting: Mapping[str, Any], where: str) -> None:
    """Raises UserError for an argument that vLLM no longer has, or that another key decides."""
    for name in setting:
        if name in REFUSED:
            raise UserError(f"{where}: {name} {REFUSED[name]}")
        if not name.isupper() and (name != name.lower() or not name.replace("_", "").isalnum()):
            raise UserError(f"{where}: {name}: an argument is written as max_num_seqs, an environment variable as VLLM_ROCM_USE_AITER.")
    instances = setting.get("instances", 1)
    if not isinstance(instances, int) or instances < 1:
        raise UserError(f"{where}: instances={instances}: a whole number of engines on one GPU, at least 1.")
    share = setting.get("gpu_memory_utilization")
    if instances > 1 and (share is None or share * instances > 1):
        raise UserError(
            f"{where}: {instances} instances on one GPU with gpu_memory_utilization={share or 'unset'}: together at most 1, "
            f"for example {0.8 / instances:g} each."
        )


def name_of(setting: Mapping[str, Any]) -> str:
    if "label" in setting:
        return str(setting["label"])
    return " ".join(f"{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in setting.items()) or "vLLM's own"


def argv_of(setting: Mapping[str, Any]) -> list[str]:
    """As vLLM's parser takes them: true and false as --flag and --no-flag, mappings as JSON; null is left out."""
    found: list[str] = []
    for name, value in setting.items():
        option = "--" + name.replace("_", "-")
        if name in OURS or name.isupper() or value is None:
            continue
        if isinstance(value, bool):
            found.append(option if value else "--no-" + option[2:])
        elif isinstance(value, (list, tuple)):
            found += [option, *map(str, value)]
        else:
            found += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def env_of(setting: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in setting.items() if name.isupper() and value is not None}


def gpus_of(setting: Mapping[str, Any]) -> int:
    """GPUs of one engine."""
    product = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        product *= int(setting.get(name) or 1)
    return product
