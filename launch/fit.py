"""What fits: changes to a command that make it fit, and the largest batch or smallest hardware that does.

Every answer is a command that was composed, checked and planned as the user's own is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import memory, topology
from launch.batch import batch
from launch.compose import compose, groups
from launch.detect import Host
from launch.errors import HostError, UserError
from launch.memory import Memory
from launch.plan import Plan, prepare
from launch.schema import Config
from launch.schema_enums import Find, Vendor
from launch.trainer_args import known

MOST_SEQUENCES = 4096  # of a rank, that a search goes up to
WANTED = 3  # changes that a message names
BATCH, ACCUMULATION = "method.args.per_device_train_batch_size", "method.args.gradient_accumulation_steps"


@dataclass(frozen=True)
class Change:
    """Overrides that make a run fit, what they cost, and the memory of the process that then has least to spare."""

    overrides: list[str]
    cost: str
    tightest: Memory

    def __str__(self) -> str:
        needs = f"{self.tightest.total_gb:.0f} of {self.tightest.capacity_gb:.0f} GB"
        return f"{' '.join(self.overrides)}   ({self.cost}; {needs})"


def shortage(plan: Plan) -> str | None:
    """Who lacks how much; None where everything fits, and on a CPU, whose memory is not the planner's business."""
    tight = [m for m in plan.memory if not m.fits and plan.config.hardware.vendor != Vendor.none]
    if not tight:
        return None
    m = tight[0]
    where = "each of its GPUs" if sum(other.process == m.process for other in tight) > 1 else f"GPU {m.gpu}"
    return f"{m.process}: {m.total_gb:.1f} GB needed on {where}, {m.capacity_gb:.1f} there, {m.total_gb - m.capacity_gb:.1f} missing."


def advice(plan: Plan, overrides: list[str], host: Host) -> str | None:
    """The shortage, and the cheapest changes that end it; None where everything fits."""
    lacking = shortage(plan)
    if lacking is None:
        return None
    found = changes(plan.config, overrides, host)
    if not found:
        here = plan.config.hardware.name
        return f"{lacking} No change that the planner knows makes it fit on {here}; mode=plan find=smallest_hardware looks elsewhere."
    return f"{lacking} It fits with one of:\n" + "\n".join(f"  {change}" for change in found)


def changes(config: Config, overrides: list[str], host: Host) -> list[Change]:
    """At most three, the cheapest first: what trains the same before what trains otherwise, one change before two."""
    found: list[Change] = []
    alone = list(_candidates(config))
    pairs = ((a + b, f"{cost}; {other}") for n, (a, cost) in enumerate(alone) for b, other in alone[n + 1 :] if _apart(a, b))
    for tried, cost in [*alone, *pairs]:
        if any(set(change.overrides) <= set(tried) for change in found):
            continue
        tightest = _planned([*overrides, *tried], host)
        if tightest and tightest.fits:
            found.append(Change(tried, cost, tightest))
        if len(found) == WANTED:
            break
    return found


def _apart(one: list[str], other: list[str]) -> bool:
    return not {o.partition("=")[0] for o in one} & {o.partition("=")[0] for o in other}


def _candidates(config: Config) -> Iterator[tuple[list[str], str]]:
    """Overrides and what they cost, the cheapest first."""
    names = known(config)
    size = batch(config)
    if size.per_device > 1 and "gradient_accumulation_steps" in names:
        for parts in (d for d in range(2, size.per_device + 1) if size.per_device % d == 0):
            smaller = [f"{BATCH}={size.per_device // parts}"]
            if config.effective_batch is None:
                smaller.append(f"{ACCUMULATION}={size.accumulation * parts}")
            yield smaller, "trains the same"
    if config.method.args.get("gradient_checkpointing") is False:
        yield ["method.args.gradient_checkpointing=true"], "trains the same, a third more work"
    if config.hardware.gpus_per_node > 1 and config.topology.strategy in ("none", "ddp"):
        sharded = "topology.strategy=fsdp" if config.topology.servers else "topology=fsdp"
        yield [sharded], "trains the same, weights travel"
    if config.precision.weights == "fp32" and config.precision.compute == "bf16":
        lost = "weights and moments in 16 bits lose small updates" if config.adapter.rank is None else "frozen weights in 16 bits"
        yield ["precision.weights=bf16"], lost
    if config.adapter.rank is None:
        yield ["adapter=lora"], "trains about 1% of the parameters"
    if config.topology.strategy == "zero3":
        yield ["topology.zero.offload_optimizer=true"], "trains the same, slower: the host keeps the optimizer"
    for key in ("max_length", "max_completion_length"):
        if key in names and size.sequence >= 512 and config.method.args.get(key):
            yield [f"method.args.{key}={int(config.method.args[key]) // 2}"], "cuts longer rows"


def _planned(overrides: list[str], host: Host) -> Memory | None:
    """The process that has least to spare; None for what is refused."""
    try:
        config, _ = prepare(compose(overrides))
        processes = topology.processes(config, host, Path(config.run_root))
        found = memory.memory(config, processes, memory.measured(config, processes, host))
    except (UserError, HostError):
        return None
    return min(found, key=lambda m: m.capacity_gb - m.total_gb)


def search(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    """The overrides of what was found, to plan instead, and the finding for people and programs. Raises UserError, HostError."""
    return (_largest_batch if config.find == Find.largest_batch else _smallest_hardware)(config, overrides, host)


def _largest_batch(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    if config.hardware.vendor == Vendor.none or "per_device_train_batch_size" not in known(config):
        raise UserError("find=largest_batch: for a method that trains, on a GPU. Name hardware=, or leave find= out.")
    # Steps of GRPO have to divide by the group: the first batch that is accepted says which do.
    unit = next((b for b in range(1, 65) if _planned([*overrides, f"{BATCH}={b}"], host)), 1)

    def fitting(units: int) -> bool:
        planned = _planned([*overrides, f"{BATCH}={units * unit}"], host)
        return planned is not None and planned.fits

    fits, beyond = 0, 1
    while beyond * unit <= MOST_SEQUENCES and fitting(beyond):
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if fitting(middle) else (fits, middle)
    if not fits:
        elsewhere = "find=smallest_hardware looks elsewhere"
        raise HostError(f"find=largest_batch: not even {unit} sequence(s) a rank fit on {config.hardware.name}. {elsewhere}.")
    chosen = f"{BATCH}={fits * unit}"
    after = _planned([*overrides, f"{BATCH}={(fits + 1) * unit}"], host)
    said = f"largest batch that fits: {chosen}"
    if after:
        said += f"; {(fits + 1) * unit} would lack {after.total_gb - after.capacity_gb:.1f} GB ({after.process})"
    return [*overrides, chosen], {"find": "largest_batch", "override": chosen, "said": [said]}


def _smallest_hardware(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    others = [o for o in overrides if o.partition("=")[0] != "hardware"]
    rows = []
    for name in groups()["hardware"]:
        if name in ("auto", "cpu"):
            continue
        found = _planned([*others, f"hardware={name}"], dataclasses.replace(host, environ={}))
        if found:
            rows.append((found, name))
    rows.sort(key=lambda row: (not row[0].fits, row[0].capacity_gb, row[1]))
    said = [
        f"{name:<12} {m.total_gb:6.0f} of {m.capacity_gb:4.0f} GB  {'fits' if m.fits else 'does not fit'} ({m.process})" for m, name in rows
    ]
    if not rows or not rows[0][0].fits:
        raise HostError("find=smallest_hardware: no group of conf/hardware holds it.\n" + "\n".join(said))
    chosen = f"hardware={rows[0][1]}"
    return [*others, chosen], {
        "find": "smallest_hardware",
        "override": chosen,
        "said": [f"smallest hardware that it fits: {chosen}", *said],
    }
