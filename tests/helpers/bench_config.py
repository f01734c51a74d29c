"""Build the configuration that a benchmark reads, for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[2]
ADAPTER = {
    "name": "none", "rank": None, "alpha": None, "dropout": 0.0, "target_modules": "all-linear",
    "rslora": False, "dora": False, "path": None,
}  # fmt: skip


def bench_config(run_dir: Path, adapter: dict[str, Any] | None = None, **args: Any) -> DictConfig:
    """Return the configuration for two layers of width 64 in fp32, and a benchmark's `args`."""
    shape = {
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    model = {
        "hub_id": None,
        "revision": None,
        "path": None,
        "attention_bias": False,
        **OmegaConf.load(ROOT / "conf/model/tiny.yaml"),
    }
    hardware = {
        "name": "cpu",
        "vendor": "none",
        "unified_memory": False,
        "attention": "sdpa",
        "peak_tflops": {"fp32": 0.1},
        "precisions": ["fp32"],
    }
    return OmegaConf.create(
        {
            "run_dir": str(run_dir),
            "seed": 0,
            "profile": "none",
            "model": {**model, **shape, "vocab_size": 512},
            "precision": {"name": "fp32", "weights": "fp32", "compute": "fp32"},
            "hardware": {**hardware, "dataloader": {"num_workers": 0, "pin_memory": False}},
            "adapter": {**ADAPTER, "quantize_base": False, **(adapter or {})},
            "trainer_args": {"output_dir": str(run_dir), "use_cpu": True, **args},
        }
    )
