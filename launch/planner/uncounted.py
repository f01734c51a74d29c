"""What memory and speed depend on and the planner does not count: warnings of a plan."""

from __future__ import annotations

from launch.batch import UNCUT
from launch.planner.memory import IN_8_BITS, OF_TORCHAO, OPTIMIZERS
from launch.schema import Config
from launch.trainer_args import argument, known, value


def uncounted(config: Config) -> list[str]:
    """A line for each argument given that memory or speed depends on and the planner does not count."""
    if config.method.kind in ("bench", "tune"):  # of which nothing is planned
        return []
    names = ("packing", "padding_free", "activation_offloading", "auto_find_batch_size")
    found = {name: argument(config, name) for name in names}
    given = [f"method.args.{name}=true" for name, is_given in found.items() if is_given]
    optimizer = argument(config, "optim")
    if optimizer not in (None, *OPTIMIZERS, *IN_8_BITS, OF_TORCHAO):
        given.append(f"method.args.optim={optimizer} (AdamW stands for it)")
    if "max_length" in known(config) and not value(config, "max_length"):
        given.append(f"method.args.max_length=null ({UNCUT} tokens stand for the longest row)")
    lines = [f"memory and speed are planned without {', '.join(given)}."] if given else []
    if config.adapter.dora and config.method.kind == "trainer":
        lines.append("speed is planned as plain LoRA's: DoRA's norms, which make a step slower, are not counted.")
    return lines
