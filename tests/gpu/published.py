"""Memory that AMD users have published beside what the planner says: the second table of docs/results/memory.md.

    python tests/gpu/published.py

The MI350X report's transformers have two matrices in their MLP and hold all logits; the planner's have three, so they stand in with
two thirds of the width, and what the logits of a batch take (bf16, twice fp32, a 16-bit gradient) is added.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.predictions import planned

VOCABULARY = 50257  # with it the report's numbers of parameters come out
# name: layers, heads, width, MLP, batch, sequence, GPUs, GB published
TRANSFORMERS = {
    "30M": (6, 6, 384, 1536, 32, 512, 1, 9.7),
    "124M": (12, 12, 768, 3072, 16, 512, 1, 9.8),
    "354M": (24, 16, 1024, 4096, 8, 512, 1, 11.3),
    "773M": (36, 20, 1280, 5120, 4, 512, 1, 12.6),
    "1.44B": (48, 24, 1536, 6144, 4, 512, 1, 20.7),
    "2.65B": (32, 32, 2560, 10240, 2, 512, 1, 26.9),
    "5.24B": (32, 32, 4096, 11008, 8, 1024, 1, 107.9),
    "10.1B": (40, 40, 5120, 13824, 4, 1024, 1, 119.7),
    "5.24B, DDP": (32, 32, 4096, 11008, 8, 1024, 8, 92.0),
    "10.1B, DDP": (40, 40, 5120, 13824, 8, 1024, 8, 157.0),
}
SFT = ["method=sft", "precision=bf16", "precision.weights=bf16", "method.args.gradient_accumulation_steps=1"]
LONG = ["hardware=mi350x", "model=qwen3_8b", "topology=fsdp", "method.args.per_device_train_batch_size=14", "method.args.max_length=8192"]
OTHERS = {
    "Qwen3-8B, full, 8 x MI350X, 14 x 8192": ([*LONG, *SFT], "76.35"),
    "Qwen3-8B, LoRA, 8 x MI350X, 14 x 8192": ([*LONG, *SFT, "adapter=lora"], "72.65"),
    "Qwen3-0.6B, fp32, MI50, 2 x 512": (
        ["hardware=mi50", "model=qwen3_0_6b", "topology=single", "method=sft", "precision=fp32", "method.args.max_length=512"]
        + ["method.args.per_device_train_batch_size=2", "method.args.gradient_accumulation_steps=4"],
        "8 to 12",
    ),
}


def transformer(name: str) -> float:
    """GB of a stand-in for one of the report's transformers, weights and moments in bf16, with all its logits."""
    layers, heads, width, mlp, batch, length, gpus, _ = TRANSFORMERS[name]
    parameters = layers * (4 * width**2 + 2 * width * mlp) + VOCABULARY * width
    shape = {"num_layers": layers, "num_heads": heads, "num_kv_heads": heads, "head_dim": width // heads, "hidden_size": width}
    shape |= {"intermediate_size": 2 * mlp // 3, "vocab_size": VOCABULARY, "num_parameters": parameters}
    found = [f"model.{key}={value}" for key, value in shape.items()]
    found += ["hardware=mi350x", "model=llama3_1_8b", "model.tied_embeddings=true", "method.args.gradient_checkpointing=false", *SFT]
    found += [f"method.args.per_device_train_batch_size={batch}", f"method.args.max_length={length}"]
    found += [f"topology.num_gpus={gpus}", "topology=ddp" if gpus > 1 else "topology=single"]
    return planned(found)[0].allocated_gb + batch * length * VOCABULARY * (2 + 4 + 4 + 2) / 1e9


def report() -> str:
    lines = ["| published run | GB published | predicted | |", "|---|---|---|---|"]
    for name, (*_, gb) in TRANSFORMERS.items():
        found = transformer(name)
        lines.append(f"| transformer of {name}, MI350X | {gb:.1f} | {found:.1f} | {found / gb - 1:+.0%} |")
    for name, (overrides, published) in OTHERS.items():
        found = planned(overrides)[0].allocated_gb
        error = "within" if " " in published else f"{found / float(published) - 1:+.0%}"
        lines.append(f"| {name} | {published} | {found:.1f} | {error} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(report())
