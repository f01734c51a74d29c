"""Compute the batch arithmetic of a method on a topology."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.core.errors import UserError
from launch.machine import placement
from launch.schema import Config
from launch.schema.data import Curriculum
from launch.schema.trainer_args import argument, known, value

PROMPT_TOKENS = 256  # tokens assumed for a prompt until the data is read
UNCUT_TOKENS = 1024  # tokens assumed for a row if max_length=null
ACCUMULATION = "method.args.gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Counts of one optimizer step; `sequence` is the longest sequence in tokens."""

    ranks: int
    per_device: int
    accumulation: int
    sequence: int
    completion: int = 0  # generated tokens in it

    @property
    def sequences(self) -> int:
        return self.ranks * self.per_device * self.accumulation

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence


def batch(config: Config) -> Batch:
    """Return the counts of a step; raise KeyError for a method without batches of sequences."""
    names = known(config)

    def number(name: str, otherwise: int) -> int:
        setting: Any = value(config, name) if name in names else None
        return int(setting) if setting else otherwise

    completion = number("max_completion_length", 0)
    # Prompts have no limit here. TRL's default stands for rows that are not cut.
    sequence = (
        number("max_length", UNCUT_TOKENS)
        if "max_length" in names
        else (completion or number("max_new_tokens", 0)) + PROMPT_TOKENS
    )
    # A longer sequence ends the run, because the generating engine is not set up for it.
    served = config.topology.server_max_length or number("vllm_max_model_length", sequence)
    return Batch(
        ranks=placement.num_trainers(config),
        per_device=number("per_device_train_batch_size", number("batch_size", 1)),
        accumulation=number("gradient_accumulation_steps", 1),
        sequence=min(sequence, served, config.model.max_positions),
        completion=completion,
    )


def evaluation_batch(config: Config) -> Batch:
    """Return the batch of held-out rows: training's, unless per_device_eval_batch_size is set."""
    setting = config.method.args.get("per_device_eval_batch_size")
    return replace(batch(config), per_device=int(setting)) if setting else batch(config)


def apply_effective_batch(config: Config, on_command_line: Sequence[str] = ()) -> list[str]:
    """Set the accumulation so that a step takes `effective_batch` sequences.

    Return a line if that replaces another accumulation. Raise UserError if it does not divide
    (naming sizes that do), or if the command line sets both and they contradict.
    """
    target = config.effective_batch
    if target is None:
        return []
    key = f"effective_batch={target}"
    if "gradient_accumulation_steps" not in known(config):
        raise UserError(
            f"{key} with method={config.method.name}: it takes no optimizer steps. Leave it out."
        )
    size = batch(config)
    at_once, before = size.ranks * size.per_device, size.accumulation
    after, left_over = divmod(target, at_once)
    place = f"on {size.ranks} rank(s) x {size.per_device} sequences"
    if left_over:
        group = int(value(config, "num_generations")) if "num_generations" in known(config) else 1
        unit = math.lcm(at_once, group)
        sizes = range(1, 65 if target % group == 0 else 1)
        fitting = [b for b in sizes if target % (size.ranks * b) == 0]
        near = sorted(sorted(fitting, key=lambda b: abs(b - size.per_device))[:3])
        remedies = [f"method.args.per_device_train_batch_size={b}" for b in near]
        remedies.append(f"effective_batch={max(1, round(target / unit)) * unit}")
        raise UserError(
            f"{key} {place}: it is not a multiple of {at_once}. Use: {' or '.join(remedies)}."
        )
    if before != after and {"effective_batch", ACCUMULATION} <= set(on_command_line):
        raise UserError(
            f"{key} with {ACCUMULATION}={before}: {place} it is {at_once * before} of them to a "
            f"step. Use: {key} alone, which accumulates {after}; or "
            f"effective_batch={at_once * before}."
        )
    config.method.args["gradient_accumulation_steps"] = after
    replaced = f"{key}: gradient_accumulation_steps={after}, in place of {before}."
    return [replaced] if before not in (1, after) else []


def least_staleness(config: Config) -> int:
    """Return for how many optimizer steps one generation provides completions.

    Completions that are requested one generation early are that many steps old.
    """
    return math.ceil(
        generation_batch(config) * int(value(config, "num_iterations")) / batch(config).sequences
    )


def generation_batch(config: Config) -> int:
    """Return the number of completions that GRPO generates at once.

    That is generation_batch_size, or else per-device batch x ranks x steps_per_generation, which
    defaults to the accumulation. TRL rejects a number that num_generations does not divide.
    """
    size, configured = batch(config), value(config, "generation_batch_size")
    steps = int(value(config, "steps_per_generation") or size.accumulation)
    return int(configured or size.per_device * size.ranks * steps)


def order_by_batch(config: Config) -> str | None:
    """Return why the order of rows depends on how a step is divided; None if it does not."""
    if config.data.curriculum == Curriculum.adaptive and config.method.generates:
        why = "chooses rows by pass rates, which larger accumulation delays"
        return f"data.curriculum=adaptive {why}"
    strategy = argument(config, "train_sampling_strategy")
    if strategy not in (None, "random", "sequential"):
        return f"method.args.train_sampling_strategy={strategy} orders rows by the batch of a rank"
    for name, why in (
        ("dataloader_drop_last", "leaves out an epoch's last rows by the batch of all ranks"),
        ("auto_find_batch_size", "may have lowered the batch"),
    ):
        if argument(config, name):
            return f"method.args.{name}=true {why}"
    return None
