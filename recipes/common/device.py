"""The device of a rank, what it computes in, and the most memory it has held. Imports torch alone, as benchmarks of kernels do."""

from __future__ import annotations

import os
import resource

import torch
from omegaconf import DictConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(config: DictConfig) -> torch.dtype:
    """Of matrix products; fp8 computes in bf16 around its own."""
    return DTYPES.get(config.precision.compute, torch.bfloat16)


def memory_peak_gb() -> float:
    """The most memory this process has held: the GPU's where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
