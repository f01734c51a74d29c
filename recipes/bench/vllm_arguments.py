"""Turn arguments of vLLM's engine into a command line, and name replacements of removed ones.

Checked against the parser of vLLM 0.31 (tests/integration/add_ons/test_bench_vllm.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

# Options that AMD's MI300X guide and other documents of 2024 and 2025 give -> their replacements.
# Lower case: an argument. Upper case: an environment variable.
REMOVED = {
    "num_scheduler_steps": (
        "engine V1 schedules one step at a time, next to the GPU: async_scheduling, on by default"
        " where possible"
    ),
    "multi_step_stream_outputs": "it went with num_scheduler_steps",
    "num_lookahead_slots": "speculative_config",
    "max_seq_len_to_capture": (
        "graphs are captured by batch size, for every length: max_cudagraph_capture_size"
    ),
    "swap_space": (
        "engine V1 computes a preempted request again instead of swapping it out; cpu_offload_gb"
        " offloads weights"
    ),
    "preemption_mode": "engine V1 always computes a preempted request again",
    "use_v2_block_manager": "engine V1 has one block manager",
    "scheduler_delay_factor": (
        "engine V1 mixes prefill and decode in one step: max_num_batched_tokens balances them"
    ),
    "quantization_param_path": (
        "scales of the KV cache stand in the checkpoint (llm-compressor or Quark writes them)"
    ),
    "calculate_kv_scales": (
        "scales of the KV cache stand in the checkpoint (llm-compressor or Quark writes them)"
    ),
    "disable_async_output_proc": "async_scheduling",
    "device": "the installed build decides",
    "worker_use_ray": "distributed_executor_backend: ray",
    "speculative_model": "speculative_config",
    "guided_decoding_backend": "structured_outputs_config",
    "rope_scaling": "hf_overrides: {rope_parameters: ...}",
    "rope_theta": "hf_overrides: {rope_parameters: ...}",
    "disable_log_requests": "requests are logged only with enable_log_requests",
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
WIDTHS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def name_of(setting: Mapping[str, Any]) -> str:
    if "label" in setting:
        return str(setting["label"])
    words = [
        f"{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in setting.items()
    ]
    return " ".join(words) or "vLLM's own"


def argv_of(setting: Mapping[str, Any]) -> list[str]:
    """Return options as vLLM's parser expects them; null is left out.

    true and false become --flag and --no-flag, mappings JSON. launch/inputs/engine_args.py does the
    same for a run's engine.
    """
    argv: list[str] = []
    for name, value in setting.items():
        option = name.replace("_", "-")
        if name in OURS or name.isupper() or value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, (list, tuple)):
            argv += [f"--{option}", *map(str, value)]
        else:
            argv += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return argv


def env_of(setting: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value) for name, value in setting.items() if name.isupper() and value is not None
    }


def gpus_of(setting: Mapping[str, Any]) -> int:
    """Return the number of GPUs of one engine."""
    return math.prod(int(setting.get(name) or 1) for name in WIDTHS)
