"""Rows of check.py's table about precisions, and what a GPU has no code for."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Debug, Vendor
from launch.trainer_args import argument


def _supported(config: Config) -> str:
    return " or ".join(f"precision={p}" for p in config.hardware.precisions)


def _why_not(config: Config) -> str:
    """The reason a precision is missing, where it is more than `not in the table`."""
    name, gfx = config.precision.name, config.hardware.gfx
    if name == "bf16":
        return f"{gfx} has no bf16 in hardware; emulated it is slower than fp32"
    if name == "nf4":
        return f"no bitsandbytes kernels serve {gfx}"
    if name == "fp8":
        return f"{gfx} has no fp8 matrix units"
    return f"{gfx} is not meant to train in {name}"


def _nf4(config: Config) -> bool:
    return config.precision.weights == "nf4" and config.method.kind == "trainer"


PRECISION_RULES = [
    Rule(
        "precision",
        lambda c: c.precision.name not in c.hardware.precisions,
        lambda c: f"precision={c.precision.name} on {c.hardware.name}: {_why_not(c)}",
        _supported,
    ),
    Rule(
        "nf4_without_adapter",
        lambda c: c.precision.weights == "nf4" and c.adapter.rank is None and c.method.kind == "trainer",
        lambda c: "precision=nf4 with adapter=none: 4-bit weights take no gradients, so nothing would be trained",
        lambda c: "adapter=qlora, or another precision",
    ),
    Rule(
        "qlora_without_nf4",
        lambda c: c.adapter.quantize_base and c.precision.weights != "nf4",
        lambda c: f"adapter={c.adapter.name} with precision={c.precision.name}: it is LoRA on a 4-bit base",
        lambda c: "precision=nf4, or adapter=lora",
    ),
    Rule(
        "precision_unused",
        lambda c: not c.method.reads("precision") and not c.smoke and c.precision.name != next(iter(c.hardware.precisions), "fp32"),
        lambda c: f"precision={c.precision.name} with method={c.method.name}: its rows name their own, and it would be ignored",
        lambda c: "no precision=",
    ),
    Rule(
        "compile",
        lambda c: bool(argument(c, "torch_compile")) and not c.hardware.compile,
        lambda c: f"method.args.torch_compile=true on {c.hardware.name}: its hardware file turns compilation off for {c.hardware.gfx}",
        lambda c: "method.args.torch_compile=false",
    ),
    Rule(
        "triton_kernels",
        lambda c: bool(argument(c, "use_liger_kernel")) and not c.hardware.triton,
        lambda c: f"method.args.use_liger_kernel=true on {c.hardware.name}: its file claims no Triton kernels for {c.hardware.gfx}",
        lambda c: "method.args.use_liger_kernel=false",
    ),
    Rule(
        "debug_without_gpu",
        lambda c: c.debug != Debug.none and c.hardware.vendor == Vendor.none,
        lambda c: f"debug={c.debug.name} on a CPU: it sets variables of a GPU's runtime",
        lambda c: "debug=none",
    ),
    Rule(
        "nf4_sharded",
        lambda c: _nf4(c) and c.topology.strategy in ("fsdp", "zero3"),
        lambda c: (
            f"precision=nf4 with topology.strategy={c.topology.strategy}: "
            + (
                "accelerate leaves 4-bit weights whole on every rank, so nothing would be sharded"
                if c.topology.strategy == "fsdp"
                else "ZeRO-3 cuts weights apart, and 4-bit ones are unpacked by scales that it does not cut with them"
            )
        ),
        lambda c: "topology=ddp, a quarter of bf16's memory on each GPU; or precision=bf16 adapter=lora, which is sharded",
    ),
    Rule(
        "nf4_colocate",
        lambda c: _nf4(c) and c.topology.name == "colocate",
        lambda c: "precision=nf4 with topology=colocate: TRL has vLLM quantize its own copy, which takes no merged weights afterwards",
        lambda c: "topology=split, whose server is sent them in 16 bits; or topology=single, where transformers generates",
    ),
    Rule(
        "fp8_zero3",
        lambda c: c.precision.compute == "fp8" and c.topology.strategy == "zero3" and c.method.kind == "trainer",
        lambda c: "precision=fp8 with ZeRO-3: an fp8 product keeps a view of its gathered weight for backward, so nothing would be freed",
        lambda c: "topology=fsdp, which shards what computes in fp8 too",
    ),
    Rule(
        "fp16_weights",
        lambda c: (
            c.precision.compute == c.precision.weights == "fp16"
            and c.topology.strategy in ("none", "ddp")
            and c.adapter.rank is None
            and c.method.kind == "trainer"
        ),
        lambda c: "precision.weights=fp16 with adapter=none: gradients would be fp16, and torch.amp's scaler refuses to unscale such",
        lambda c: "precision.weights=fp32; or an adapter, whose own weights are fp32",
    ),
    Rule(
        "loss_scaling",
        lambda c: c.precision.loss_scaling != (c.precision.compute == "fp16"),
        lambda c: (
            f"precision.loss_scaling={str(c.precision.loss_scaling).lower()} with products in {c.precision.compute}: "
            "torch.amp scales the loss of fp16, always, and of nothing else"
        ),
        lambda c: f"precision.loss_scaling={str(c.precision.compute == 'fp16').lower()}",
    ),
]
