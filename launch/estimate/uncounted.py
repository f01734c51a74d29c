"""Warn about arguments that affect memory or speed but that the planner does not count."""

from __future__ import annotations

from launch.estimate.batch import UNCUT
from launch.estimate.memory import IN_8_BITS, OF_TORCHAO, OPTIMIZERS
from launch.schema import Config
from launch.schema.trainer_args import argument, known, value


def uncounted(config: Config) -> list[str]:
    """Return a line for each given argument that the planner does not count."""
    if config.method.measures_machine:  # nothing is planned for these methods
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
    if config.adapter.dora and config.method.trains:
        lines.append(
            "speed is planned as plain LoRA's: DoRA's norms, which make a step slower, are not "
            "counted."
        )
    return lines
