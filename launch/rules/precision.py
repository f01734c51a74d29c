"""Define rules about precisions, and about features that a GPU has no code for."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.trainer_args import argument


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


PRECISION_RULES = [
    Rule(
        "precision",
        lambda c: c.precision.name not in c.hardware.precisions,
        lambda c: f"precision={c.precision.name} on {c.hardware.name}: {_why_not(c)}",
        lambda c: " or ".join(f"precision={p}" for p in c.hardware.precisions),
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
]
