"""What fits: changes to a command that make it fit, and the largest batch or smallest hardware that does.

Every answer is a command that was composed, checked and planned as the user's own is.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import topology
from launch.batch import ACCUMULATION, batch
from launch.check import SEARCH, check_given
from launch.compose import compose, groups, keys
from launch.errors import HostError, UserError
from launch.files.adapter_files import check_adapter
from launch.machine.detect import Host
from launch.plan import Plan, prepare
from launch.planner import balance, margin, memory
from launch.planner.memory import Memory
from launch.planner.reference import has_reference
from launch.rules.topology import longest
from launch.schema import Config, Topology
from launch.schema.enums import Find, Vendor
from launch.supervision import serving
from launch.trainer_args import argument, known, value

MOST_SEQUENCES = 4096  # of a rank, that a search goes up to
WANTED = 3  # changes that a message names
OF_ANY_DEVICE = ("gpus_per_node", "attention", "dataloader", "env")  # of hardware: what holds of whichever group a search looks at
SHARED = (0.5, 0.3, 0.15)  # of a GPU, for a server that shares it with a trainer
BATCH = "method.args.per_device_train_batch_size"


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
    return " ".join(_lacks([m for m in tight if m.process == name]) for name in dict.fromkeys(m.process for m in tight))


def _lacks(tight: list[Memory]) -> str:
    """Of the GPUs of one process, what the one that has least to spare lacks: a GPU of them may be smaller than the others."""
    m = max(tight, key=lambda one: one.total_gb - one.capacity_gb)
    where = "each of its GPUs" if len(tight) > 1 else f"GPU {m.gpu}"
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
    alone = [([], ""), *_candidates(config)]
    pairs = [(a + b, f"{cost}; {other}") for n, (a, cost) in enumerate(alone[1:], 2) for b, other in alone[n:] if _apart(a, b)]
    found: list[Change] = []
    print("It does not fit: looking for changes that would make it.", file=sys.stderr)  # seconds
    # A smaller batch comes first, alone and then beside each other change.
    searches = [(alone[:1], True), (alone[1:], False), (alone[1:], True), (pairs, False)]
    for tried, cost, smaller in ((*one, smaller) for many, smaller in searches for one in many):
        known_to_fit = [set(change.overrides) for change in found]
        if any(fits <= set(tried) or (smaller and any(o.startswith(BATCH) for o in fits)) for fits in known_to_fit if fits):
            continue
        change = _smaller_batch(config, overrides, tried, cost, host) if smaller else _change(overrides, tried, cost, host)
        found += [change] if change else []
        if len(found) == WANTED:
            break
    return found


def _change(overrides: list[str], tried: list[str], cost: str, host: Host) -> Change | None:
    tightest = _planned([*overrides, *tried], host)
    return Change(tried, cost, tightest) if tightest and tightest.fits else None


def _apart(one: list[str], other: list[str]) -> bool:
    return not {o.partition("=")[0] for o in one} & {o.partition("=")[0] for o in other}


def _smaller_batch(config: Config, overrides: list[str], tried: list[str], cost: str, host: Host) -> Change | None:
    """`tried` with the largest part of the batch that makes it fit, accumulated to the same step."""
    names, size = known(config), batch(config)
    if "gradient_accumulation_steps" not in names or {BATCH, ACCUMULATION} & {o.partition("=")[0] for o in tried}:
        return None
    # bnpo averages over the tokens of one rank's batch, whatever is accumulated.
    otherwise = config.method.name == "grpo" and value(config, "loss_type") == "bnpo"
    said = "; ".join(filter(None, [cost, "averages over fewer tokens" if otherwise else "" if cost else "trains the same"]))

    def with_parts(parts: int) -> Change | None:
        smaller = [*tried, f"{BATCH}={size.per_device // parts}"]
        if config.effective_batch is None:
            smaller.append(f"{ACCUMULATION}={size.accumulation * parts}")
        if "steps_per_generation" in names and (steps := value(config, "steps_per_generation")):
            smaller.append(f"method.args.steps_per_generation={int(steps) * parts}")
        return _change(overrides, smaller, said, host)

    parts = divisors(size.per_device)[1:]
    if not parts or not with_parts(parts[-1]):
        return None
    return with_parts(parts[bisect.bisect_left(parts, True, key=lambda n: with_parts(n) is not None)])


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _candidates(config: Config) -> Iterator[tuple[list[str], str]]:
    """Overrides and what they cost, the cheapest first."""
    size = batch(config)
    if argument(config, "gradient_checkpointing") is False:
        yield ["method.args.gradient_checkpointing=true"], "trains the same, a third more work"
    if config.topology.name == "colocate" and not value(config, "vllm_enable_sleep_mode"):
        yield ["method.args.vllm_enable_sleep_mode=true"], "trains the same: vLLM gives its memory back meanwhile"
    if config.method.name == "dpo" and has_reference(config) and not value(config, "sync_ref_model"):
        yield ["method.args.precompute_ref_log_probs=true"], "trains the same: the reference measures all rows first, and is freed"
    if config.hardware.gpus_per_node > 1 and config.topology.strategy in ("none", "ddp"):
        sharded, cost = _sharded(config)
        yield sharded, f"{cost}; transformers generates, slower" if config.topology.name == "colocate" else cost
    if config.topology.strategy == "fsdp" and has_reference(config):  # FSDP gathers a reference whole
        zero3 = "topology.strategy=zero3" if config.topology.servers else "topology=zero3"
        yield [zero3], "trains the same, by DeepSpeed"
    if config.topology.servers:
        yield from _other_servers(config)
    yield from _offloads(config)
    # bitsandbytes serves the GPUs that have nf4; sharded, moments are small.
    trains_all = config.adapter.rank is None and config.topology.strategy in ("none", "ddp") and "optim" in known(config)
    if trains_all and "nf4" in config.hardware.precisions and memory.OPTIMIZERS.get(value(config, "optim")) == 2:
        yield ["method.args.optim=adamw_8bit"], "AdamW's moments are rounded to 8 bits"
    if config.precision.weights == "fp32" and config.precision.compute == "bf16":
        yield ["precision.weights=bf16"], "weights in 16 bits: where they train, small updates are lost"
    if config.adapter.rank is None and config.method.kind == "trainer":
        yield ["adapter=lora"], "trains about 1% of the parameters"
    if config.adapter.name in ("none", "lora") and config.method.kind == "trainer" and "nf4" in config.hardware.precisions:
        yield ["adapter=qlora", "precision=nf4"], "trains about 1% of the parameters, and rounds the others to 4 bits"
    for key in ("max_length", "max_completion_length"):
        if size.sequence >= 512 and (most := argument(config, key)):
            yield [f"method.args.{key}={int(most) // 2}"], "cuts longer rows"
    if config.method.kind != "trainer" and size.per_device > 1:
        yield ["method.args.batch_size=1"], "the same answers, slower"
    if argument(config, "engine") == "vllm":
        yield ["method.args.engine=transformers"], "slower, and needs no room for the longest sequence"


def _sharded(config: Config) -> tuple[list[str], str]:
    """FSDP over the same ranks, or over all GPUs of the node where one trained."""
    if config.topology.servers:
        return ["topology.strategy=fsdp"], "trains the same, weights travel"
    if config.topology.strategy == "ddp":
        return ["topology=fsdp"], "trains the same, weights travel"
    ranks, accumulation = config.hardware.gpus_per_node, batch(config).accumulation
    if config.effective_batch is not None:
        return ["topology=fsdp"], f"trains the same on {ranks} GPUs, weights travel"
    if accumulation % ranks == 0:
        return ["topology=fsdp", f"{ACCUMULATION}={accumulation // ranks}"], f"trains the same on {ranks} GPUs, weights travel"
    return ["topology=fsdp"], f"{ranks} GPUs, so {ranks} times the sequences a step; weights travel"


def _other_servers(config: Config) -> Iterator[tuple[list[str], str]]:
    """A server of shorter sequences, or over two GPUs, four, eight, as long as one is left to train on."""
    given, gpus, shared = config.topology, topology.num_gpus(config), serving.shares_gpu(config)
    if given.server_cache_gb:
        yield ["topology.server_cache_gb=null"], "vLLM takes what topology.server_memory_share leaves to its cache"
    elif shared:
        for share in SHARED:
            yield [f"topology.server_memory_share={share}"], "trains the same; vLLM and the trainer share their GPU otherwise"
    elif given.server_memory_share < Topology.server_memory_share:
        yield [f"topology.server_memory_share={Topology.server_memory_share}"], "vLLM takes more of its GPU"
    if shared and config.hardware.gpus_per_node > 1:
        yield ["topology.num_gpus=2"], "trains the same, server and trainer on a GPU each"
    shorter = max(2048, 2 * longest(config))
    if shorter < (given.server_max_length or config.model.max_positions):
        yield [f"topology.server_max_length={shorter}"], f"trains the same while a prompt and its completion have at most {shorter} tokens"
    for parallel in (2, 4, 8):
        left = gpus - given.servers * parallel
        if given.server_tensor_parallel < parallel and left > 0:
            fewer = "" if config.effective_batch is not None else ", so a step has fewer sequences"
            yield [f"topology.server_tensor_parallel={parallel}"], f"the server takes {gpus - left} GPUs and {left} train{fewer}"


def _offloads(config: Config) -> Iterator[tuple[list[str], str]]:
    same = "trains the same, slower: the host keeps"
    fsdp, zero = config.topology.fsdp, config.topology.zero
    if config.topology.strategy == "fsdp" and not fsdp.cpu_offload:
        yield ["topology.fsdp.cpu_offload=true"], f"{same} weights and optimizer"
    if config.topology.strategy in ("zero2", "zero3") and not zero.offload_optimizer:
        yield ["topology.zero.offload_optimizer=true"], f"{same} the optimizer"
    if config.topology.strategy == "zero3" and not zero.offload_parameters:
        yield ["topology.zero.offload_parameters=true"], f"{same} the weights"


def _planned(overrides: list[str], host: Host) -> Memory | None:
    """As `_plan`; None for what is refused."""
    try:
        return _plan(overrides, host)
    except (UserError, HostError):
        return None


def _plan(overrides: list[str], host: Host) -> Memory:
    """The process that has least to spare."""
    config, _ = prepare(compose(overrides))
    processes = topology.processes(config, host, Path(config.run_root))
    return max(memory.memory(config, processes, memory.measured(config, processes, host)), key=margin.tightness)


def search(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    """The overrides of what was found, to plan instead, and the finding for people and programs. Raises UserError, HostError."""
    if SEARCH.applies(config):  # before the seconds of a search
        raise UserError(SEARCH.refusal(config))
    if config.smoke:
        raise UserError(f"find={config.find.value} with smoke=true: everything fits then. Leave one of them out.")
    if config.effective_batch and ACCUMULATION in keys(overrides):
        raise UserError(
            f"find={config.find.value} with effective_batch={config.effective_batch} and {ACCUMULATION}: the one follows from the "
            "other and the batch that is looked for. Use: one of them."
        )
    config = balance.settled(config)
    check_given(config)  # before its numbers are gone over
    check_adapter(config)  # whose layers are planned
    print(f"find={config.find.value}: planning one after the other", file=sys.stderr)  # seconds
    return (_largest_batch if config.find == Find.largest_batch else _smallest_hardware)(config, overrides, host)


def _largest_batch(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    if config.hardware.vendor == Vendor.none or config.method.kind != "trainer":
        raise UserError("find=largest_batch: for a method that trains, on a GPU. Name hardware=, or leave find= out.")
    sizes = _batches(config)
    _plan([*overrides, f"{BATCH}={sizes[0]}"], host)  # what is refused says why

    def lacks(size: int) -> bool:
        planned = _planned([*overrides, f"{BATCH}={size}"], host)
        return planned is None or not planned.fits

    fitting = bisect.bisect_left(sizes, True, key=lacks)
    if not fitting:
        elsewhere = "find=smallest_hardware looks elsewhere"
        raise HostError(f"find=largest_batch: not even {sizes[0]} sequence(s) a rank fit on {config.hardware.name}. {elsewhere}.")
    chosen = f"{BATCH}={sizes[fitting - 1]}"
    said = f"largest batch that fits: {chosen}"
    if fitting == len(sizes):
        said += "; no larger one was tried"
    elif after := _planned([*overrides, f"{BATCH}={sizes[fitting]}"], host):
        said += f"; {sizes[fitting]} would lack {after.total_gb - after.capacity_gb:.1f} GB ({after.process})"
    lines = [said]
    if margin.close(planned := _plan([*overrides, chosen], host)):
        lines.append(_with_room(planned, sizes[:fitting], overrides, host))
    return [*overrides, chosen], {"find": "largest_batch", "override": chosen, "said": lines}


def _with_room(largest: Memory, sizes: list[int], overrides: list[str], host: Host) -> str:
    """Of sizes that fit, the largest that surely does."""
    near = f"! It may not fit: {margin.why(largest)}"

    def is_close(size: int) -> bool:
        planned = _planned([*overrides, f"{BATCH}={size}"], host)
        return planned is None or margin.close(planned)

    roomy = bisect.bisect_left(sizes, True, key=is_close)
    return f"{near}; with more room: {BATCH}={sizes[roomy - 1]}" if roomy else f"{near}, and no smaller one leaves more room."


def _batches(config: Config) -> list[int]:
    """Sequences of a rank, ascending, that effective_batch, or the completions that GRPO makes at once, can be made of."""
    ranks = batch(config).ranks
    whole = config.effective_batch or argument(config, "generation_batch_size")
    if whole:
        return divisors(max(1, int(whole) // ranks))
    group = int(argument(config, "num_generations") or 1)
    times = int(argument(config, "steps_per_generation") or batch(config).accumulation)
    unit = group // math.gcd(group, ranks * times)
    return list(range(unit, max(MOST_SEQUENCES, unit) + 1, unit))


def _describes_a_device(override: str) -> bool:
    group, *keys = override.lstrip("+~").partition("=")[0].split(".")
    return group == "hardware" and bool(keys) and keys[0] not in OF_ANY_DEVICE


def _smallest_hardware(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    if config.method.kind in memory.UNPLANNED:
        raise UserError(f"find=smallest_hardware with method={config.method.name}: its memory is not planned. Leave find= out.")
    described = next((o.lstrip("+~") for o in overrides if _describes_a_device(o)), None)
    if described:
        raise UserError(
            f"{described} with find=smallest_hardware: every group would get that value, and the answer be of none of them. Leave it out."
        )
    others = [o for o in overrides if o.partition("=")[0] != "hardware"]
    rows, refused = [], {}
    for name in groups()["hardware"]:
        if name in ("auto", "cpu"):
            continue
        try:
            rows.append((_plan([*others, f"hardware={name}"], dataclasses.replace(host, environ={}, gpus=())), name))
        except (UserError, HostError) as error:
            refused[name] = str(error)
    rows.sort(key=lambda row: (not row[0].fits, row[0].capacity_gb, row[1]))
    said = [
        f"{name:<12} {m.total_gb:6.0f} of {m.capacity_gb:4.0f} GB  {'fits' if m.fits else 'does not fit'} ({m.process})" for m, name in rows
    ]
    said += [f"{name:<12} refused: {why.splitlines()[0]}" for name, why in refused.items()]
    if not rows or not rows[0][0].fits:
        raise HostError("find=smallest_hardware: no group of conf/hardware holds it.\n" + "\n".join(said))
    chosen = f"hardware={rows[0][1]}"
    roomy = next((name for m, name in rows if m.fits and not margin.close(m)), None)
    if margin.close(rows[0][0]):
        near = f"! It may not fit {rows[0][1]}: {margin.why(rows[0][0])}"
        said.append(f"{near}; with more room: hardware={roomy}" if roomy else f"{near}, and no other leaves more room.")
    return [*others, chosen], {
        "find": "smallest_hardware",
        "override": chosen,
        "said": [f"smallest hardware that it fits: {chosen}", *said],
    }
