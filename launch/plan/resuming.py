"""Check whether a run can resume on other ranks than it began on (resume=<run directory>).

resume=auto does not need this, because it resumes only the same composition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import OmegaConf

from launch.config.identity import PROPERTIES, without_removed_keys
from launch.core.errors import UserError
from launch.estimate.batch_counts import batch, generation_batch, order_by_batch
from launch.machine import placement
from launch.schema import Config, trainer_args

# Keys that decide where ranks are, how many there are, and how they divide a step's sequences.
# method.smoke may also hold overrides.
PLACES = re.compile(
    r"runtime\..*|hardware\.gpus_per_node|effective_batch|topology\.(name|num_gpus|strategy|numa_binding)|"
    r"method\.(args|smoke)\.(per_device_train_batch_size|gradient_accumulation_steps|steps_per_generation|generation_batch_size)"
)
# Strategy -> the library that writes and reads its checkpoints.
FORMATS = {"none": "transformers", "ddp": "transformers", "fsdp": "FSDP2"}
FORMATS |= {"zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def recorded_config(composition: dict[str, Any]) -> Config:
    """Return a recorded composition as it was resolved then.

    Older records have no properties of the method, so take those from conf/.
    """
    name = (composition.get("method") or {}).get("name")
    file = trainer_args.METHODS / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    own = {name: content[name] for name in PROPERTIES if name in content}
    merged = OmegaConf.merge(
        OmegaConf.structured(Config), {"method": own}, without_removed_keys(composition)
    )
    config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
    return config


def another(differences: list[str]) -> list[str]:
    """Return the `key: old -> new` lines that make it another run, wherever its ranks are."""
    return [line for line in differences if not PLACES.fullmatch(line.partition(": ")[0])]


def check(resume: str, old: Config, new: Config) -> None:
    """Raise UserError if `old`, recorded in `resume`, cannot resume as `new`."""
    for reason, remedy in _refusals(old, new):
        raise UserError(f"resume={resume}: {reason}. Use: {remedy}; resume=never starts afresh.")


def note(old: Config, new: Config) -> list[str]:
    """Return the plan's notes on a run that resumes on other ranks."""
    then, now = _ranks(old), _ranks(new)
    if then == now:
        return []
    header = f"resume: {then} before, {now} now"
    if not new.method.trains:
        return [
            f"{header}; finished batches stay. Results do not depend on which rank does the rest."
        ]
    drawn = ", and completions are sampled again" if new.method.generates else ""
    return [
        f"{header}: the same sequences per step and order; sums round differently{drawn}, so no "
        "figure is equal to the last digit."
    ]


def _ranks(config: Config) -> str:
    return f"topology={config.topology.name} of {placement.num_trainers(config)} rank(s)"


def _refusals(old: Config, new: Config) -> Iterator[tuple[str, str]]:
    """Yield why `old` cannot resume as `new`, and what to use instead."""
    if new.method.kind == "evaluator":  # it writes a file per batch, regardless of the ranks
        return
    ranks, again = f"{_ranks(old)} before, {_ranks(new)} now", _again(old)
    if not new.method.trains or new.phases:
        yield f"{ranks}: only a training, an evaluation or a sampling resumes on other ranks", again
    # Another number of servers is another composition already.
    if (old.topology.name == "colocate") != (new.topology.name == "colocate"):
        yield f"{ranks}: another engine would generate", again
    before, after = old.topology.strategy, new.topology.strategy
    if FORMATS[before] != FORMATS[after]:
        key = "topology.strategy" if old.topology.servers else "topology"
        strategy = "single" if (key, before) == ("topology", "none") else before
        reason = f"its checkpoints are in the format of {FORMATS[before]}, which "
        yield f"{reason}topology.strategy={after} cannot read", f"{key}={strategy}"
    then, now = batch(old), batch(new)
    if before.startswith("zero") and then.ranks != now.ranks:
        yield (
            f"{ranks}: each rank's file holds its part of the optimizer's state, and DeepSpeed "
            "loads them for that number of ranks only",
            f"{again}; topology=ddp or fsdp for runs that must move",
        )
    if then.sequences != now.sequences:
        yield (
            f"a step took {then.sequences} sequences ({then.ranks} rank(s) x {then.per_device} x "
            f"accumulation {then.accumulation}) and would take {now.sequences}: the run would see "
            "rows twice, or not at all",
            f"effective_batch={then.sequences}",
        )
    if new.method.generates and generation_batch(old) != generation_batch(new):
        yield (
            f"a generation had {generation_batch(old)} completions and would have "
            f"{generation_batch(new)}: other prompts would follow",
            f"method.args.generation_batch_size={generation_batch(old)} with "
            "'~method.args.steps_per_generation' where it is given",
        )
    is_divided = (then.per_device, then.accumulation) != (now.per_device, now.accumulation)
    if is_divided and (by_batch := order_by_batch(new)):
        yield (
            f"{by_batch}: under another batch of a rank, or accumulation, other rows would follow",
            f"method.args.per_device_train_batch_size={then.per_device} on {then.ranks} rank(s)",
        )


def _again(config: Config) -> str:
    return f"topology={config.topology.name} topology.num_gpus={placement.num_gpus(config)}"
