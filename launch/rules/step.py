"""Reject precisions, adapters, batches and computations of a step that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from launch.core.errors import near
from launch.estimate.batch_counts import batch, fitting_batches, generation_batch, whole_generations
from launch.inputs.adapter_files import listed
from launch.rules.refusal import Refusal, outside
from launch.schema import Adapter, Config
from launch.schema.checked import Range
from launch.schema.enums import Rows
from launch.schema.shapes import LINEARS
from launch.schema.trainer_args import argument, value

WHY_NOT = {
    "bf16": "{} has no bf16 in hardware, and emulated bf16 is slower than fp32",
    "nf4": "no bitsandbytes kernels serve {}",
    "fp8": "{} has no fp8 matrix units",
}


def precision_faults(c: Config) -> Iterator[Refusal]:
    name, hardware = c.precision.name, c.hardware
    if name not in hardware.precisions:
        why = WHY_NOT.get(name, f"{{}} is not meant to train in {name}").format(hardware.gfx)
        remedy = " or ".join(f"precision={other}" for other in hardware.precisions)
        yield Refusal("precision", f"precision={name} on {hardware.name}: {why}", remedy)
    elif c.precision.compute == "fp8" and c.method.trains and (eager := _why_eager(c)):
        message = f"precision=fp8 with {eager} is three times as slow as bf16"
        yield Refusal("fp8_eager", message, "precision=bf16, or step.compile=true")
    needs = {
        "method.args.torch_compile": argument(c, "torch_compile") and not hardware.compile,
        "step.compile": c.step.compile and not hardware.compile,
        "method.args.use_liger_kernel": argument(c, "use_liger_kernel") and not hardware.triton,
    }
    keys = [key for key, is_missing in needs.items() if is_missing]
    remedy = " ".join(f"{key}=false" for key in keys)
    if c.method.name == "tune/inductor" and not hardware.compile:
        keys, remedy = ["method=tune/inductor"], "method=tune/tunableop or tune/batch"
    if keys:
        yield Refusal("compiler", f"{keys[0]}: no working compiler for {hardware.gfx}", remedy)


def _why_eager(config: Config) -> str | None:
    """Return why fp8 is not compiled; None if layers or the model will be."""
    if argument(config, "torch_compile") or config.smoke:
        return None
    if config.step.compile is False:
        return "step.compile=false"
    if not config.hardware.compile:
        return f"hardware.compile=false ({config.hardware.name})"
    return "method.args.use_liger_kernel=true" if argument(config, "use_liger_kernel") else None


def step_faults(c: Config) -> Iterator[Refusal]:
    layouts = [Rows.padded, *c.method.row_layouts]
    if c.step.rows and c.step.rows not in layouts and c.method.trains:
        remedy = " or ".join(f"step.rows={rows.name}" for rows in layouts)
        message = f"step.rows={c.step.rows.name}: method={c.method.name} does not have this layout"
        yield Refusal("rows_of_method", message, remedy)
    yield from outside(
        "checkpointed_layers_range",
        "step.checkpointed_layers",
        c.step.checkpointed_layers,
        Range(least=1, most=c.model.num_layers),
        "the model has fewer layers",
        "method.args.gradient_checkpointing=false for none",
    )
    if c.method.generates and generation_batch(c) % int(value(c, "num_generations")):
        message = (
            f"method.args.num_generations={value(c, 'num_generations')} does not divide the "
            f"{generation_batch(c)} completions of a generation on {batch(c).ranks} rank(s)"
        )
        yield Refusal("groups_divide", message, _groups_remedy(c))


def _groups_remedy(config: Config) -> str:
    size, total = batch(config), generation_batch(config)
    groups = int(value(config, "num_generations"))
    divisor = max((n for n in range(2, groups + 1) if total % n == 0), default=total)
    # The accumulation makes up a generation only if steps_per_generation is not set.
    steps = argument(config, "steps_per_generation")
    key = ""
    if argument(config, "generation_batch_size"):
        key = "method.args.generation_batch_size"
    elif config.effective_batch and not steps:
        key = "effective_batch"
    if key:
        batches = " or ".join(f"{key}={n}" for n in whole_generations(config))
    else:
        name = "steps_per_generation" if steps else "gradient_accumulation_steps"
        pairs = [f"{b} x {a} ({b * a * size.ranks})" for b, a in fitting_batches(config)]
        batches = (
            f"method.args.per_device_train_batch_size x {name} that divide on {size.ranks} "
            f"rank(s): {', '.join(pairs)}"
        )
    return f"{batches}; or method.args.num_generations={divisor}"


def adapter_faults(c: Config) -> Iterator[Refusal]:
    """Yield a fault of adapter.target_modules, a list of linear layers.

    PEFT reads a single name as a regular expression, and silently skips unknown names in a list.
    """
    modules, default = c.adapter.target_modules, Adapter.target_modules
    names = list(map(str, modules)) if isinstance(modules, list) else str(modules).split(",")
    names = [name.strip() for name in names]
    unknown = [name for name in names if name not in LINEARS]
    if modules == default or (isinstance(modules, list) and modules and not unknown):
        return
    fault = "it takes a list"
    if unknown:
        fault = f"no linear layer is named {unknown[0]}.{near(unknown[0], (*LINEARS, default))}"
    layers = ",".join(name for name in names if name in LINEARS) or "q_proj,v_proj"
    yield Refusal(
        "adapter_layers",
        f"adapter.target_modules={listed(modules)}: {fault}",
        f"adapter.target_modules=[{layers}], of {', '.join(LINEARS)}; or "
        f"adapter.target_modules={default}",
    )
