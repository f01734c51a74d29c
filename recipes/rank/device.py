"""Determine a rank's device, CPU cores, compute dtype and peak memory."""

from __future__ import annotations

import os
import resource

import torch
from omegaconf import DictConfig

from launch.core.errors import UserError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def device() -> torch.device:
    """Return this rank's GPU, or the CPU if torch sees no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def bind_to_cores(policy: str, local_rank: int) -> str:
    """Bind all threads and future children to the cores near the GPU. Return a log line.

    torch chooses the cores. torchrun's --numa-binding would need numactl, which images do not have.
    Raises UserError if the cores are unknown or not allowed.
    """
    try:
        from torch.numa import binding  # missing before torch 2.9

        options = binding.NumaOptions(binding.AffinityMode(policy.replace("_", "-")))
        cores = binding._get_logical_cpus_to_bind_to(gpu_index=local_rank, numa_options=options)
        binding._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=cores)
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"topology.numa_binding={policy}: the cores near GPU {local_rank} are unknown or "
            f"not allowed here ({error}). Use: topology.numa_binding=null."
        ) from error
    first, last = min(cores), max(cores)
    return (
        f"topology.numa_binding={policy}: {len(cores)} core(s) from {first} to {last}, near "
        f"GPU {local_rank}"
    )


def pci_address(device: torch.device | int) -> str | None:
    """Return a GPU's PCI address (`0000:05:00.0`), or None if torch is too old to know it."""
    gpu = torch.cuda.get_device_properties(device)
    if not hasattr(gpu, "pci_bus_id"):
        return None
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def compute_dtype(config: DictConfig) -> torch.dtype:
    """Return the dtype of matrix products. With fp8, everything else computes in bf16."""
    return DTYPES.get(config.precision.compute, torch.bfloat16)


def memory_peak_gb() -> float:
    """Return this process's peak memory in GB: of the GPU, or of the host without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def memory_now_gb() -> dict[str, float]:
    """Return the GB of the GPU that tensors occupy and that torch holds. Empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "memory_allocated_gb": torch.cuda.memory_allocated() / 1e9,
        "memory_reserved_gb": torch.cuda.memory_reserved() / 1e9,
    }
