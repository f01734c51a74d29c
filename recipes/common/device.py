"""A rank's device, compute dtype and peak memory. Imports torch only, for the benchmarks that need nothing else."""

from __future__ import annotations

import os
import resource

import torch
from omegaconf import DictConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def device() -> torch.device:
    """Return this rank's GPU, or the CPU if torch sees no GPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(config: DictConfig) -> torch.dtype:
    """Return the dtype of matrix products. With fp8, everything else computes in bf16."""
    return DTYPES.get(config.precision.compute, torch.bfloat16)


def memory_peak_gb() -> float:
    """Return the peak memory of this process in GB: of the GPU, or of the host if torch sees no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
