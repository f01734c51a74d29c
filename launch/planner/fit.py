"""Find what fits: changes to a command that make it fit, the largest batch, or the smallest hardware.

Every answer is a command that was composed, checked and planned like the user's own.
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

MOST_SEQUENCES = 4096  # per rank, the largest batch that a search tries
WANTED = 3  # changes that a message names
OF_ANY_DEVICE = ("gpus_per_node", "attention", "dataloader", "env")  # keys of hardware that apply to any group a search tries
SHARED = (0.5, 0.3, 0.15)  # shares of a GPU to try for a server that has it together with a trainer
BATCH = "method.args.per_device_train_batch_size"


@dataclass(frozen=True)
class Change:
    """Overrides that make a run fit, what they cost, and the memory of the process that then has the least to spare."""

    overrides: list[str]
    cost: str
    tightest: Memory

    def __str__(self) -> str:
        needs = f"{self.tightest.total_gb:.0f} of {self.tightest.capacity_gb:.0f} GB"
        return f"{' '.join(self.overrides)}   ({self.cost}; {needs})"


def shortage(plan: Plan) -> str | None:
    """Say which process lacks how much memory; None if all fit, and on a CPU, whose memory the planner does not limit."""
    tight = [m for m in plan.memory if not m.fits and plan.config.hardware.vendor != Vendor.none]
    if not tight:
        return None
    return " ".join(_lacks([m for m in tight if m.process == name]) for name in dict.fromkeys(m.process for m in tight))


def _lacks(tight: list[Memory]) -> str:
    """Say what the tightest GPU of one process lacks; a process may have GPUs of different sizes."""
    m = max(tight, key=lambda one: one.total_gb - one.capacity_gb)
    where = "each of its GPUs" if len(tight) > 1 else f"GPU {m.gpu}"
    return f"{m.process}: {m.total_gb:.1f} GB needed on {where}, {m.capacity_gb:.1f} there, {m.total_gb - m.capacity_gb:.1f} missing."


def advice(plan: Plan, overrides: list[str], host: Host) -> str | None:
    """Return the shortage and the cheapest changes that end it; None if everything fits."""
    lacking = shortage(plan)
    if lacking is None:
        return None
    found = changes(plan.config, overrides, host)
    if not found:
        here = plan.config.hardware.name
        return f"{lacking} No change that the planner knows makes it fit on {here}. Try other hardware: mode=plan find=smallest_hardware."
    return f"{lacking} It fits with one of:\n" + "\n".join(f"  {change}" for change in found)


def changes(config: Config, overrides: list[str], host: Host) -> list[Change]:
    """Return at most WANTED changes, cheapest first: training that stays the same before training that changes, one change before two."""
    alone = [([], ""), *_candidates(config)]
    pairs = [(a + b, f"{cost}; {other}") for n, (a, cost) in enumerate(alone[1:], 2) for b, other in alone[n:] if _set_different_keys(a, b)]
    found: list[Change] = []
    print("It does not fit: looking for changes that make it fit.", file=sys.stderr)  # this takes seconds
    # A smaller batch, each other change, each with a smaller batch, and each two together.
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


def _set_different_keys(one: list[str], other: list[str]) -> bool:
    return not {o.partition("=")[0] for o in one} & {o.partition("=")[0] for o in other}


def _smaller_batch(config: Config, overrides: list[str], tried: list[str], cost: str, host: Host) -> Change | None:
    """Return `tried` with the largest micro-batch that makes it fit, accumulated to the same step, or None."""
    names, size = known(config), batch(config)
    if "gradient_accumulation_steps" not in names or {BATCH, ACCUMULATION} & {o.partition("=")[0] for o in tried}:
        return None
    # bnpo averages over the tokens of one rank's micro-batch, regardless of accumulation.
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
    """Return the divisors of `number` in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _candidates(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield overrides and what they cost, cheapest first."""
    size = batch(config)
    if argument(config, "gradient_checkpointing") is False:
        yield ["method.args.gradient_checkpointing=true"], "trains the same, with a third more work"
    if config.topology.name == "colocate" and not value(config, "vllm_enable_sleep_mode"):
        yield ["method.args.vllm_enable_sleep_mode=true"], "trains the same: vLLM frees its memory while training"
    if config.method.name == "dpo" and has_reference(config) and not value(config, "sync_ref_model"):
        yield ["method.args.precompute_ref_log_probs=true"], "trains the same: the reference scores all rows first and is then freed"
    if config.hardware.gpus_per_node > 1 and config.topology.strategy in ("none", "ddp"):
        sharded, cost = _sharded(config)
        yield sharded, f"{cost}; transformers generates, which is slower" if config.topology.name == "colocate" else cost
    if config.topology.strategy == "fsdp" and has_reference(config):  # FSDP gathers the whole reference at once
        zero3 = "topology.strategy=zero3" if config.topology.servers else "topology=zero3"
        yield [zero3], "trains the same, with DeepSpeed"
    if config.topology.servers:
        yield from _other_servers(config)
    yield from _offloads(config)
    # bitsandbytes supports the GPUs that have nf4. Sharded moments are small anyway.
    trains_all = config.adapter.rank is None and config.topology.strategy in ("none", "ddp") and "optim" in known(config)
    if trains_all and "nf4" in config.hardware.precisions and memory.OPTIMIZERS.get(value(config, "optim")) == 2:
        yield ["method.args.optim=adamw_8bit"], "AdamW's moments are rounded to 8 bits"
    if config.precision.weights == "fp32" and config.precision.compute == "bf16":
        yield ["precision.weights=bf16"], "16-bit weights: those that train lose small updates"
    if config.adapter.rank is None and config.method.kind == "trainer":
        yield ["adapter=lora"], "trains about 1% of the parameters"
    if config.adapter.name in ("none", "lora") and config.method.kind == "trainer" and "nf4" in config.hardware.precisions:
        yield ["adapter=qlora", "precision=nf4"], "trains about 1% of the parameters and rounds the rest to 4 bits"
    for key in ("max_length", "max_completion_length"):
        if size.sequence >= 512 and (most := argument(config, key)):
            yield [f"method.args.{key}={int(most) // 2}"], "truncates longer rows"
    if config.method.kind != "trainer" and size.per_device > 1:
        yield ["method.args.batch_size=1"], "gives the same answers, slower"
    if argument(config, "engine") == "vllm":
        yield ["method.args.engine=transformers"], "slower, but needs no room for the longest sequence"


def _sharded(config: Config) -> tuple[list[str], str]:
    """Return FSDP over the same ranks, or over all GPUs of the node if one trained, and its cost."""
    if config.topology.servers:
        return ["topology.strategy=fsdp"], "trains the same, but ranks exchange weights"
    if config.topology.strategy == "ddp":
        return ["topology=fsdp"], "trains the same, but ranks exchange weights"
    ranks, accumulation = config.hardware.gpus_per_node, batch(config).accumulation
    if config.effective_batch is not None:
        return ["topology=fsdp"], f"trains the same on {ranks} GPUs, but ranks exchange weights"
    if accumulation % ranks == 0:
        return ["topology=fsdp", f"{ACCUMULATION}={accumulation // ranks}"], f"trains the same on {ranks} GPUs, but ranks exchange weights"
    return ["topology=fsdp"], f"{ranks} GPUs, so {ranks} times the sequences a step, and ranks exchange weights"


def _other_servers(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield servers with another share of memory, shorter sequences, or two, four or eight GPUs if one is left to train on."""
    given, gpus, shared = config.topology, topology.num_gpus(config), serving.shares_gpu(config)
    if given.server_cache_gb:
        yield ["topology.server_cache_gb=null"], "vLLM's cache takes what topology.server_memory_share leaves it"
    elif shared:
        for share in SHARED:
            yield [f"topology.server_memory_share={share}"], "trains the same, but vLLM and the trainer divide their GPU differently"
    elif given.server_memory_share < Topology.server_memory_share:
        yield [f"topology.server_memory_share={Topology.server_memory_share}"], "vLLM takes more of its GPU"
    if shared and config.hardware.gpus_per_node > 1:
        yield ["topology.num_gpus=2"], "trains the same, with a GPU each for server and trainer"
    shorter = max(2048, 2 * longest(config))
    if shorter < (given.server_max_length or config.model.max_positions):
        yield [f"topology.server_max_length={shorter}"], f"trains the same if a prompt and its completion have at most {shorter} tokens"
    for parallel in (2, 4, 8):
        left = gpus - given.servers * parallel
        if given.server_tensor_parallel < parallel and left > 0:
            fewer = "" if config.effective_batch is not None else ", so a step has fewer sequences"
            yield [f"topology.server_tensor_parallel={parallel}"], f"the server takes {gpus - left} GPUs and {left} train{fewer}"


def _offloads(config: Config) -> Iterator[tuple[list[str], str]]:
    same = "trains the same, slower: the host holds"
    fsdp, zero = config.topology.fsdp, config.topology.zero
    if config.topology.strategy == "fsdp" and not fsdp.cpu_offload:
        yield ["topology.fsdp.cpu_offload=true"], f"{same} weights and optimizer"
    if config.topology.strategy in ("zero2", "zero3") and not zero.offload_optimizer:
        yield ["topology.zero.offload_optimizer=true"], f"{same} the optimizer"
    if config.topology.strategy == "zero3" and not zero.offload_parameters:
        yield ["topology.zero.offload_parameters=true"], f"{same} the weights"


def _planned(overrides: list[str], host: Host) -> Memory | None:
    """Return what `_plan` does; None if the command is rejected."""
    try:
        return _plan(overrides, host)
    except (UserError, HostError):
        return None


def _plan(overrides: list[str], host: Host) -> Memory:
    """Plan a command and return its process with the least to spare. Raises UserError, HostError."""
    config, _ = prepare(compose(overrides))
    processes = topology.processes(config, host, Path(config.run_root))
    return max(memory.memory(config, processes, memory.measured(config, processes, host)), key=margin.tightness)


def search(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides that were found, to plan instead, and the finding as JSON data. Raises UserError, HostError."""
    if SEARCH.applies(config):  # first, since a search takes seconds
        raise UserError(SEARCH.refusal(config))
    if config.smoke:
        raise UserError(f"find={config.find.value} with smoke=true: everything fits in a smoke run. Leave one of them out.")
    if config.effective_batch and ACCUMULATION in keys(overrides):
        raise UserError(
            f"find={config.find.value} with effective_batch={config.effective_batch} and {ACCUMULATION}: the one follows from the "
            "other and from the batch that the search varies. Use: one of them."
        )
    config = balance.with_servers(config)
    check_given(config)  # before a search enumerates its numbers
    check_adapter(config)  # the plan depends on its layers
    print(f"find={config.find.value}: planning each candidate", file=sys.stderr)  # this takes seconds
    return (_largest_batch if config.find == Find.largest_batch else _smallest_hardware)(config, overrides, host)


def _largest_batch(config: Config, overrides: list[str], host: Host) -> tuple[list[str], dict[str, Any]]:
    if config.hardware.vendor == Vendor.none or config.method.kind != "trainer":
        raise UserError("find=largest_batch is for a method that trains, on a GPU. Set hardware=, or leave find= out.")
    sizes = _batches(config)
    _plan([*overrides, f"{BATCH}={sizes[0]}"], host)  # raises if the command itself is rejected

    def lacks(size: int) -> bool:
        planned = _planned([*overrides, f"{BATCH}={size}"], host)
        return planned is None or not planned.fits

    fitting = bisect.bisect_left(sizes, True, key=lacks)
    if not fitting:
        elsewhere = "Try other hardware: find=smallest_hardware"
        raise HostError(f"find=largest_batch: not even {sizes[0]} sequence(s) per rank fit on {config.hardware.name}. {elsewhere}.")
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
    """Warn that `largest` may not fit, and name the largest of `sizes` that surely does."""
    near = f"! It may not fit: {margin.why(largest)}"

    def is_close(size: int) -> bool:
        planned = _planned([*overrides, f"{BATCH}={size}"], host)
        return planned is None or margin.close(planned)

    roomy = bisect.bisect_left(sizes, True, key=is_close)
    return f"{near}; with more room: {BATCH}={sizes[roomy - 1]}" if roomy else f"{near}, and no smaller one leaves more room."


def _batches(config: Config) -> list[int]:
    """Return the batch sizes of a rank, ascending, into which effective_batch or the completions of a GRPO generation divide."""
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
            f"{described} with find=smallest_hardware: every group would get that value, so no answer would be right. Leave it out."
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
        raise HostError("find=smallest_hardware: it fits no group of conf/hardware.\n" + "\n".join(said))
    chosen = f"hardware={rows[0][1]}"
    roomy = next((name for m, name in rows if m.fits and not margin.close(m)), None)
    if margin.close(rows[0][0]):
        near = f"! It may not fit {rows[0][1]}: {margin.why(rows[0][0])}"
        said.append(f"{near}; with more room: hardware={roomy}" if roomy else f"{near}, and no other leaves more room.")
    return [*others, chosen], {
        "find": "smallest_hardware",
        "override": chosen,
        "said": [f"smallest hardware that fits: {chosen}", *said],
    }
