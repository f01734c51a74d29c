"""resume=<run directory> on other ranks than the run began on: what must stay the same, and what its checkpoints allow.

resume=auto asks none of this: it goes on with the same composition only.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from launch import topology
from launch.batch import batch, generation_batch, order_by_batch
from launch.errors import UserError
from launch.schema import Config

# Where ranks are, how many, and how a step's sequences are divided among them. What was given stands in method.smoke too.
PLACES = re.compile(
    r"runtime\..*|hardware\.gpus_per_node|effective_batch|topology\.(name|num_gpus|strategy|numa_binding)|"
    r"method\.(args|smoke)\.(per_device_train_batch_size|gradient_accumulation_steps|steps_per_generation|generation_batch_size)"
)
# Strategy -> what writes and reads its checkpoints.
FORMATS = {"none": "transformers", "ddp": "transformers", "fsdp": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def recorded_config(composition: dict[str, Any]) -> Config:
    """The composition as it was resolved then; what conf/ says today does not matter."""
    config: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composition))  # type: ignore[assignment]
    return config


def another(differences: list[str]) -> list[str]:
    """Of `key: old -> new` lines those that make it another run, wherever its ranks are."""
    return [line for line in differences if not PLACES.fullmatch(line.partition(": ")[0])]


def check(given: str, old: Config, new: Config) -> None:
    """Raises UserError where `old`, recorded in the run directory `given`, cannot go on as `new`, which differs from it in PLACES only."""
    refused = _refused(old, new)
    if refused:
        raise UserError(f"resume={given}: {refused[0]}. Use: {refused[1]}; resume=never starts afresh.")


def note(old: Config, new: Config) -> list[str]:
    """What the plan says of a run that goes on on other ranks."""
    then, now = _ranks(old), _ranks(new)
    if then == now:
        return []
    said = f"resume: {then} before, {now} now"
    if new.method.kind != "trainer":
        return [f"{said}; batches that are done stay, and which rank does another changes nothing."]
    drawn = ", and completions are drawn anew" if new.method.name == "grpo" else ""
    return [f"{said}: the same sequences a step, in the same order; sums round otherwise{drawn}, so no figure is equal to the last digit."]


def _ranks(config: Config) -> str:
    return f"topology={config.topology.name} of {topology.num_trainers(config)} rank(s)"


def _refused(old: Config, new: Config) -> tuple[str, str] | None:
    """(why, what to give instead)."""
    if new.method.kind == "evaluator":  # a file a batch, whoever made it
        return None
    if new.method.kind != "trainer" or new.phases:
        return f"{_ranks(old)} before, {_ranks(new)} now: only a training, an evaluation or a sampling goes on on other ranks", _again(old)
    then, now = old.topology.strategy, new.topology.strategy
    ranks = topology.num_trainers(old), topology.num_trainers(new)
    if (old.topology.name == "colocate") != (new.topology.name == "colocate"):  # with a server or without is another composition
        return f"topology={old.topology.name} before, {new.topology.name} now: another engine would generate", _again(old)
    if FORMATS[then] != FORMATS[now]:
        key = "topology.strategy" if old.topology.servers else "topology"
        name = "single" if then == "none" else then
        also = " or ddp" if then == "none" else " or single" if (key, then) == ("topology", "ddp") else ""
        return f"its checkpoints are in the format of {FORMATS[then]}, which topology.strategy={now} cannot read", f"{key}={name}{also}"
    if then.startswith("zero") and ranks[0] != ranks[1]:
        return (
            f"{ranks[0]} rank(s) before, {ranks[1]} now: each rank's file holds its part of the optimizer's state, and DeepSpeed loads "
            "them for as many ranks only",
            f"{_again(old)}; topology=ddp or fsdp for runs that are to move",
        )
    return _other_steps(old, new)


def _other_steps(old: Config, new: Config) -> tuple[str, str] | None:
    """Whether a step would take other rows than the one that the run stopped before."""
    then, now = batch(old), batch(new)
    if then.sequences != now.sequences:
        return (
            f"a step took {then.sequences} sequences ({then.ranks} rank(s) x {then.per_device} x accumulation {then.accumulation}) and "
            f"would take {now.sequences}: the run would see rows twice, or not at all",
            f"effective_batch={then.sequences}",
        )
    if new.method.name == "grpo" and generation_batch(old) != generation_batch(new):
        return (
            f"a generation had {generation_batch(old)} completions and would have {generation_batch(new)}: other prompts would follow",
            f"method.args.generation_batch_size={generation_batch(old)} with '~method.args.steps_per_generation' where it is given",
        )
    if (then.per_device, then.accumulation) == (now.per_device, now.accumulation):
        return None
    by_batch = order_by_batch(new)
    if by_batch:
        return (
            f"{by_batch}: under another batch of a rank, or accumulation, other rows would follow",
            f"method.args.per_device_train_batch_size={then.per_device} on {then.ranks} rank(s)",
        )
    return None


def _again(config: Config) -> str:
    return f"topology={config.topology.name} topology.num_gpus={topology.num_gpus(config)}"
