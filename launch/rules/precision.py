"""Define rules about precisions, and about features that a GPU has no code for."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.trainer_args import argument


def _supported(config: Config) -> str:
    return " or ".join(f"precision={p}" for p in config.hardware.precisions)


def _why_not(config: Config) -> str:
    """Return why a GPU does not support a precision."""
    name, gfx = config.precision.name, config.hardware.gfx
    if name == "bf16":
        return f"{gfx} has no bf16 in hardware; emulated it is slower than fp32"
    if name == "nf4":
        return f"no bitsandbytes kernels serve {gfx}"
    if name == "fp8":
        return f"{gfx} has no fp8 matrix units"
    return f"{gfx} is not meant to train in {name}"


def _without_compiler(config: Config) -> list[str]:
    """Return the settings that need a compiler which this GPU does not have."""
    compiled, liger = config.hardware.compile, config.hardware.triton
    needs = {
        "method.args.torch_compile": argument(config, "torch_compile") and not compiled,
        "step.compile": config.step.compile and not compiled,
        "method.args.use_liger_kernel": argument(config, "use_liger_kernel") and not liger,
    }
    keys = [key for key, is_missing in needs.items() if is_missing]
    tunes_it = config.method.name == "tune/inductor" and not compiled
    return [*keys, *(["method=tune/inductor"] if tunes_it else [])]


def _nf4(config: Config) -> bool:
    return config.precision.weights == "nf4" and config.method.trains


PRECISION_RULES = [
    Rule(
        "precision",
        lambda c: c.precision.name not in c.hardware.precisions,
        lambda c: f"precision={c.precision.name} on {c.hardware.name}: {_why_not(c)}",
        _supported,
    ),
    Rule(
        "nf4_without_adapter",
        lambda c: c.precision.weights == "nf4" and c.adapter.rank is None and c.method.trains,
        "precision=nf4 with adapter=none: 4-bit weights take no gradients",
        "adapter=qlora, or another precision",
    ),
    Rule(
        "qlora_without_nf4",
        lambda c: c.adapter.quantize_base and c.precision.weights != "nf4",
        lambda c: f"adapter={c.adapter.name} needs a 4-bit base, not precision={c.precision.name}",
        "precision=nf4, or adapter=lora",
    ),
    Rule(
        "compiler",
        lambda c: bool(_without_compiler(c)),
        lambda c: f"{_without_compiler(c)[0]}: no working compiler for {c.hardware.gfx}",
        lambda c: (
            "method=tune/tunableop or tune/batch"
            if c.method.name == "tune/inductor"
            else " ".join(f"{key}=false" for key in _without_compiler(c))
        ),
    ),
    Rule(
        "nf4_sharded",
        lambda c: _nf4(c) and c.topology.strategy in ("fsdp", "zero3"),
        lambda c: (
            f"precision=nf4: topology.strategy={c.topology.strategy} cannot shard 4-bit weights"
        ),
        "topology=ddp, or precision=bf16 adapter=lora",
    ),
    Rule(
        "nf4_colocate",
        lambda c: _nf4(c) and c.topology.name == "colocate",
        "precision=nf4 with topology=colocate: vLLM's own 4-bit copy takes no merged weights",
        "topology=split, whose server has 16-bit weights; or topology=single",
    ),
    Rule(
        "fp8_zero3",
        lambda c: (
            c.precision.compute == "fp8" and c.topology.strategy == "zero3" and c.method.trains
        ),
        "precision=fp8 with ZeRO-3: fp8 products keep gathered weights, so nothing is freed",
        "topology=fsdp, which shards what computes in fp8 too",
    ),
    Rule(
        "fp16_weights",
        lambda c: (
            c.precision.compute == c.precision.weights == "fp16"
            and c.topology.strategy in ("none", "ddp")
            and c.adapter.rank is None
            and c.method.trains
        ),
        "precision.weights=fp16 without an adapter: torch.amp does not unscale fp16 gradients",
        "precision.weights=fp32; or an adapter, whose own weights are fp32",
    ),
    Rule(
        "loss_scaling",
        lambda c: c.precision.loss_scaling != (c.precision.compute == "fp16"),
        "precision.loss_scaling: torch.amp scales the loss of fp16, always, and of nothing else",
        lambda c: f"precision.loss_scaling={str(c.precision.compute == 'fp16').lower()}",
    ),
]
