"""Compute the numbers of sequences and tokens in an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.core.errors import UserError
from launch.machine import placement
from launch.schema import Config
from launch.schema.data import Curriculum
from launch.schema.enums import Rows
from launch.schema.trainer_args import known, value, value_or_none

PROMPT_TOKENS = 256  # assumed length of a prompt, because the planner does not read the data
UNCUT_TOKENS = 1024  # assumed length of a row if max_length=null
ACCUMULATION = "method.args.gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The sizes of one optimizer step."""

    ranks: int
    per_device: int  # sequences of a micro-batch
    accumulation: int
    sequence: int  # tokens of the longest sequence
    completion: int = 0  # generated tokens in a sequence

    @property
    def sequences(self) -> int:
        return self.ranks * self.per_device * self.accumulation

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence


def batch(config: Config) -> Batch:
    """Return the sizes of a step. Methods without some of the arguments get defaults."""
    names = known(config)

    def number(name: str, default: int) -> int:
        setting: Any = value(config, name) if name in names else None
        return int(setting) if setting else default

    completion = number("max_completion_length", 0)
    sequence = (
        number("max_length", UNCUT_TOKENS)
        if "max_length" in names
        else (completion or number("max_new_tokens", 0)) + PROMPT_TOKENS
    )
    # vLLM would fail on a longer sequence.
    limit = config.topology.server_max_length or number("vllm_max_model_length", sequence)
    return Batch(
        ranks=placement.num_trainers(config),
        per_device=number("per_device_train_batch_size", number("batch_size", 1)),
        accumulation=number("gradient_accumulation_steps", 1),
        sequence=min(sequence, limit, config.model.max_positions),
        completion=completion,
    )


def batch_of_rows(config: Config, rows: Mapping[str, Any]) -> tuple[Batch, float]:
    """Return the sizes of a step with the mean length of prepared rows, and their filled share.

    `rows` are the statistics in a run's data.json. Without packing, a layout other than padded
    computes hardly any padding.
    """
    size = batch(config)
    if rows.get("packing"):
        return size, rows["efficiency"]
    mean = rows["tokens"] / rows["rows"] if rows["max_length"] else rows["length"]["mean"]
    is_padded = config.step.rows in (None, Rows.padded) and rows["efficiency"]
    filled = rows["efficiency"] if is_padded else 1.0
    length = size.completion + math.ceil(mean / filled)
    return replace(size, sequence=min(size.sequence, length)), filled


def evaluation_batch(config: Config) -> Batch:
    """Return the batch for held-out rows, with per_device_eval_batch_size if it is set."""
    setting = config.method.args.get("per_device_eval_batch_size")
    return replace(batch(config), per_device=int(setting)) if setting else batch(config)


def apply_effective_batch(config: Config, on_command_line: Sequence[str] = ()) -> list[str]:
    """Set gradient_accumulation_steps so that a step has `effective_batch` sequences.

    `on_command_line` are the keys of the command line. Return a warning if this replaces another
    accumulation. Raises UserError if no accumulation fits, or if the command line sets both keys
    and they contradict.
    """
    target = config.effective_batch
    if target is None:
        return []
    key = f"effective_batch={target}"
    if "gradient_accumulation_steps" not in known(config):
        raise UserError(
            f"{key} with method={config.method.name}: this method has no optimizer steps. Remove "
            f"{key}."
        )
    size = batch(config)
    micro_batch, before = size.ranks * size.per_device, size.accumulation
    after, remainder = divmod(target, micro_batch)
    if remainder:
        sizes = range(1, 65 if target % _group(config) == 0 else 1)
        divisors = [b for b in sizes if target % (size.ranks * b) == 0]
        nearest = sorted(sorted(divisors, key=lambda b: abs(b - size.per_device))[:3])
        remedies = [f"method.args.per_device_train_batch_size={b}" for b in nearest]
        remedies.append(f"effective_batch={nearest_batch(config, target)}")
        servers, width = config.topology.servers, config.topology.server_tensor_parallel
        is_split = servers and config.runtime.slurm.nodes == 1
        left = size.ranks + servers * width if is_split else 0  # GPUs to divide
        trainers = (left - n * width for n in range(1, -(-left // width)))
        if any(target % (number * size.per_device) == 0 for number in trainers):
            remedies.append(f"topology.servers=auto {key}")
        raise UserError(
            f"{key}: not a multiple of {micro_batch} ({size.ranks} rank(s) x {size.per_device} "
            f"sequences). Use: {' or '.join(remedies)}."
        )
    if before != after and {"effective_batch", ACCUMULATION} <= set(on_command_line):
        sequences = micro_batch * before
        raise UserError(
            f"{key} with {ACCUMULATION}={before}: {size.ranks} rank(s) x {size.per_device} x "
            f"{before} are {sequences} sequences per step. Use: {key} alone, which accumulates "
            f"{after}; or effective_batch={sequences}."
        )
    config.method.args["gradient_accumulation_steps"] = after
    warning = f"{key}: gradient_accumulation_steps={after}, in place of {before}."
    return [warning] if before not in (1, after) else []


def nearest_batch(config: Config, target: int) -> int:
    """Return the number of sequences nearest to `target` that the ranks can share in a step."""
    size = batch(config)
    unit = math.lcm(size.ranks * size.per_device, _group(config))
    return max(1, round(target / unit)) * unit


def _group(config: Config) -> int:
    """Return the number of sequences that a step contains in whole groups."""
    return int(value(config, "num_generations")) if "num_generations" in known(config) else 1


def min_staleness(config: Config) -> int:
    """Return the number of optimizer steps that use the completions of one generation.

    Completions that are requested one generation early are that many steps old.
    """
    return math.ceil(
        generation_batch(config) * int(value(config, "num_iterations")) / batch(config).sequences
    )


def generation_batch(config: Config) -> int:
    """Return the number of completions in one generation of GRPO.

    This is generation_batch_size or, by default, per-device batch x ranks x steps_per_generation.
    The latter defaults to the accumulation. TRL rejects a number that num_generations does not
    divide.
    """
    size, configured = batch(config), value(config, "generation_batch_size")
    steps = int(value(config, "steps_per_generation") or size.accumulation)
    return int(configured or size.per_device * size.ranks * steps)


def why_order_depends_on_batch(config: Config) -> str | None:
    """Return why the order of rows depends on the micro-batch; None if it does not."""
    if config.data.curriculum == Curriculum.adaptive and config.method.generates:
        return "data.curriculum=adaptive updates its pass rates later with a larger accumulation"
    strategy = value_or_none(config, "train_sampling_strategy")
    if strategy not in (None, "random", "sequential"):
        return f"method.args.train_sampling_strategy={strategy} orders rows by batch size"
    for name, effect in (
        ("dataloader_drop_last", "drops the rows of an epoch's last, incomplete micro-batch"),
        ("auto_find_batch_size", "may have lowered the batch"),
    ):
        if value_or_none(config, name):
            return f"method.args.{name}=true {effect}"
    return None
