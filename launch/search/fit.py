"""Search for changes that make a run fit, for the largest batch, and for the smallest hardware.

Every candidate is composed, checked and planned like a command of the user.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launch.config.choose import MIN_GAIN, choose, without_choices
from launch.config.compose import compose
from launch.config.request import Request
from launch.config.wording import groups
from launch.core.errors import HostError, UserError
from launch.estimate import margin, memory
from launch.estimate.batch_counts import ACCUMULATION, batch
from launch.estimate.speed import estimate_speed
from launch.inputs.adapter_files import check_adapter
from launch.machine.detect import Host
from launch.plan import balance
from launch.plan.planning import prepare
from launch.plan.predictions import approximate
from launch.rules.check import check_settings
from launch.schema import Config
from launch.schema.enums import Find, Mode, Preflight, SpeedMode, Vendor
from launch.schema.plan import Memory, Offer, Plan
from launch.schema.trainer_args import known, value, value_or_none
from launch.search import remedies

MAX_SEQUENCES = 4096  # per rank; the largest batch that a search tries
MAX_CHANGES = 3  # in a message
# Keys of hardware that a command may set for all groups that a search tries.
COMMON_KEYS = ("gpus_per_node", "attention", "dataloader", "env")
BATCH = "method.args.per_device_train_batch_size"


@dataclass(frozen=True)
class Change:
    """Overrides that make a run fit, their cost, and the memory of the tightest process."""

    overrides: list[str]
    cost: str
    tightest: Memory

    def __str__(self) -> str:
        entry = self.tightest
        needs = f"{entry.process} {entry.total_gb:.0f} of {entry.capacity_gb:.0f} GB"
        if margin.close(entry):
            unused = " and fragmentation" if entry.scattered_gb else ""
            most = f"{margin.most_gb(entry):.1f} with the planner's error{unused}"
            needs = f"little margin: {needs}, {most}"
        return f"{' '.join(self.overrides)}   ({self.cost}; {needs})"


def shortage(plan: Plan) -> str | None:
    """Describe the processes that need more memory; None if all fit."""
    tight: dict[str, list[Memory]] = {}
    for entry in plan.memory:
        if not entry.fits:
            tight.setdefault(entry.process, []).append(entry)
    lines = []
    for process, entries in tight.items():  # a process may have GPUs of different sizes
        m = max(entries, key=lambda entry: entry.total_gb - entry.capacity_gb)
        where = "each of its GPUs, which have" if len(entries) > 1 else f"GPU {m.gpu}, which has"
        where = "this machine, which has" if m.gpu is None else where
        lines.append(
            f"{process} needs {m.total_gb:.1f} GB on {where} {m.capacity_gb:.1f} GB "
            f"({m.total_gb - m.capacity_gb:.1f} GB short)."
        )
    return " ".join(lines) or None


def advice(plan: Plan, host: Host) -> tuple[str | None, list[str]]:
    """Return the shortage with the cheapest changes that make the run fit, and the first change.

    Return None and no overrides if it fits.
    """
    message = shortage(plan)
    if message is None:
        return None, []
    offers = changes(plan.config, Request(plan.overrides), host)
    if offers:
        message += f" The run fits with any of these overrides:{_listed(offers)}"
        return message, offers[0].overrides
    return (
        f"{message} No change that the planner knows makes it fit on {plan.config.hardware.name}. "
        "Use: other hardware, found by mode=plan find=smallest_hardware."
    ), []


def admit(plan: Plan, host: Host) -> None:
    """Raise HostError with advice if the plan does not fit, unless preflight=warn."""
    if plan.config.preflight != Preflight.warn and (reason := advice(plan, host)[0]):
        raise HostError(f"{reason}\npreflight=warn starts the run anyway.")


def composes(command: Request, offer: Offer) -> bool:
    """Return whether the command accepts an offer; it may set a key that then takes no effect."""
    with suppress(UserError):
        prepare(compose(command.plus(*offer.overrides)))
        return True
    return False


def _listed(offers: list[Change]) -> str:
    return "".join(f"\n  {change}" for change in offers)


def changes(config: Config, command: Request, host: Host) -> list[Change]:
    """Return up to MAX_CHANGES changes that fit: first single remedies, then pairs.

    Changes that leave less than the planner's margin come last. They need none for a process that
    fits without them, but has none.
    """
    print("The run does not fit. Looking for changes that make it fit.", file=sys.stderr)
    batches = _smaller_batches(config)
    # bnpo averages over the tokens of a rank's micro-batch, regardless of the accumulation.
    is_bnpo = value_or_none(config, "loss_type") == "bnpo"
    cost = "averages over fewer tokens" if is_bnpo else ""
    cost = cost if config.method.trains else "same answers, slower"
    smallest = [(batches[-1], cost)] if batches else []
    table = [*smallest, *remedies.remedies(config)]
    before = memory.on_host(without_choices(config), host)
    close_before = {entry.process for entry in before if margin.close(entry)}

    def is_without_margin(entry: Memory) -> bool:
        return margin.close(entry) and entry.process not in close_before

    results: list[Change] = []
    solved: list[set[str]] = []
    barely: list[set[str]] = []  # without a margin, which another remedy may add
    for combined in [*((remedy,) for remedy in table), *itertools.combinations(table, 2)]:
        candidate = [override for remedy, _ in combined for override in remedy]
        names = {override.partition("=")[0] for override in candidate}
        if len(names) < len(candidate) or any(fits <= set(candidate) for fits in solved):
            continue
        tightest = _fitting(command.plus(*candidate), host)
        if tightest is None:
            continue
        is_close = is_without_margin(tightest)
        if is_close and any(fits <= set(candidate) for fits in barely):
            continue
        (barely if is_close else solved).append(set(candidate))
        if combined[0] in smallest:
            rest = candidate[len(batches[-1]) :]
            others = command.plus(*rest)
            first = bisect.bisect_left(
                batches,
                True,
                key=lambda smaller: (
                    (entry := _fitting(others.plus(*smaller), host)) is not None
                    and (is_close or not is_without_margin(entry))
                ),
            )
            candidate = [*batches[first], *rest]
            tightest = _fitting(command.plus(*candidate), host) or tightest
        cost = "; ".join(cost for _, cost in combined if cost) or "same results"
        results.append(Change(candidate, cost, tightest))
        if solved and len(results) >= MAX_CHANGES:
            break
    return sorted(results, key=lambda change: is_without_margin(change.tightest))[:MAX_CHANGES]


def _fitting(command: Request, host: Host) -> Memory | None:
    """Return the memory of the tightest process; None if rejected or too large."""
    tightest = _try_tightest(command, host)
    return tightest if tightest and tightest.fits else None


def _smaller_batches(config: Config) -> list[list[str]]:
    """Return overrides for ever smaller micro-batches with as many sequences per step."""
    names, size = known(config), batch(config)
    if not config.method.trains and "batch_size" in names:
        most = int(value(config, "batch_size"))
        return [[f"method.args.batch_size={most >> n}"] for n in range(1, most.bit_length())]
    if "gradient_accumulation_steps" not in names:
        return []
    steps = "steps_per_generation" in names and value(config, "steps_per_generation")
    smaller = []
    for parts in divisors(size.per_device)[1:]:
        overrides = [f"{BATCH}={size.per_device // parts}"]
        if config.effective_batch is None:
            overrides.append(f"{ACCUMULATION}={size.accumulation * parts}")
        if steps:
            overrides.append(f"method.args.steps_per_generation={int(steps) * parts}")
        smaller.append(overrides)
    return smaller


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _tightest(command: Request, host: Host) -> Memory:
    """Plan a command and return the memory of its tightest process.

    Raises UserError or HostError if the command is rejected.
    """
    config, _ = prepare(compose(command))
    return max(memory.on_host(config, host), key=margin.tightness)


def _try_tightest(command: Request, host: Host) -> Memory | None:
    """Return the memory of the tightest process; None if the command is rejected."""
    with suppress(UserError, HostError):
        return _tightest(command, host)
    return None


def search(config: Config, command: Request, host: Host) -> tuple[Request, dict[str, Any]]:
    """Return the command with the answer, and the result of the search.

    Raises UserError if the command cannot be searched, and HostError if nothing fits.
    """
    find = f"find={config.find.value}"
    if config.mode != Mode.plan:
        raise UserError(f"{find}: it takes no effect without mode=plan. Use: mode=plan.")
    if config.smoke:
        raise UserError(f"{find} with smoke=true: everything fits. Leave one of them out.")
    if config.effective_batch and ACCUMULATION in command.keys:
        raise UserError(
            f"{find} with effective_batch={config.effective_batch} and {ACCUMULATION}: they "
            "determine the batch size, which the search varies. Use: one of them."
        )
    # topology.servers=auto also chooses an effective_batch, which a search must not keep.
    split = balance.with_servers(config)
    config = dataclasses.replace(split, effective_batch=config.effective_batch)
    check_settings(config)  # a search would enumerate wrong numbers
    check_adapter(config)  # memory depends on the adapter's layers
    print(f"{find}: planning each candidate", file=sys.stderr)
    searches = {Find.largest_batch: _largest_batch, Find.smallest_hardware: _smallest_hardware}
    chosen, lines = searches[config.find](config, command, host)
    others = command.without(chosen.partition("=")[0])
    finding = {"find": config.find.value, "override": chosen, "said": lines}
    return others.plus(chosen), finding


def _largest_batch(config: Config, command: Request, host: Host) -> tuple[str, list[str]]:
    if config.hardware.vendor == Vendor.none or not config.method.trains:
        raise UserError(
            "find=largest_batch: only for a method that trains on a GPU. "
            "Use: hardware=<a GPU> method=sft, or leave find= out."
        )
    # Possible sizes divide effective_batch, or the completions of a GRPO generation.
    ranks = batch(config).ranks
    if total := config.effective_batch or value_or_none(config, "generation_batch_size"):
        sizes = divisors(max(1, int(total) // ranks))
    else:
        group = int(value_or_none(config, "num_generations") or 1)
        times = int(value_or_none(config, "steps_per_generation") or batch(config).accumulation)
        unit = group // math.gcd(group, ranks * times)
        sizes = list(range(unit, max(MAX_SEQUENCES, unit) + 1, unit))
    _tightest(command.plus(f"{BATCH}={sizes[0]}"), host)  # raises if the command is rejected

    def memory_of(size: int) -> Memory | None:
        return _try_tightest(command.plus(f"{BATCH}={size}"), host)

    num_fitting = bisect.bisect_left(
        sizes, True, key=lambda size: not ((entry := memory_of(size)) and entry.fits)
    )
    if not num_fitting:
        smallest = command.plus(f"{BATCH}={sizes[0]}")
        offers = _listed(changes(prepare(compose(smallest))[0], smallest, host))
        also = f" A batch fits with any of these overrides:{offers}\nOr use" if offers else " Use"
        raise HostError(
            f"find=largest_batch: not even {sizes[0]} sequence(s) per rank fit on "
            f"{config.hardware.name}.{also}: other hardware, found by find=smallest_hardware."
        )
    # The planner has an error, so answer with the largest batch that leaves room for it.
    num_safe = bisect.bisect_left(
        sizes[:num_fitting],
        True,
        key=lambda size: (entry := memory_of(size)) is None or margin.close(entry),
    )
    chosen = f"{BATCH}={sizes[(num_safe or num_fitting) - 1]}"
    slower = _slower(command, chosen, host)
    if not num_safe:
        why = margin.why(_tightest(command.plus(chosen), host))
        return chosen, [
            f"! No batch fits with the planner's margin. {chosen}{slower} may fit: {why}."
        ]
    line = f"largest batch that fits with the planner's margin: {chosen}{slower}"
    if num_safe < num_fitting:
        most = sizes[num_fitting - 1]
        why = margin.why(_tightest(command.plus(f"{BATCH}={most}"), host))
        return chosen, [f"{line}. Up to {most} may fit too: {why}."]
    if num_fitting == len(sizes):
        line += "; no larger one was tried"
    elif entry := memory_of(sizes[num_fitting]):
        missing_gb = entry.total_gb - entry.capacity_gb
        line += f"; {sizes[num_fitting]} needs {missing_gb:.1f} GB more ({entry.process})"
    return chosen, [line]


def _slower(command: Request, chosen: str, host: Host) -> str:
    """Return a clause with both rates if the batch is slower than the default one, or ''.

    A large batch may leave so little memory that speed=auto keeps recomputing activations.
    """
    rates = []
    for request in (command.without(BATCH), command.plus(chosen)):
        config = choose(prepare(compose(request))[0], host)
        rates.append((estimate_speed(config).tokens_per_second or 0.0) / batch(config).ranks)
    default, rate = rates
    if rate * MIN_GAIN >= default:
        return ""
    return f", at {approximate(rate)} tokens/s per GPU (the default batch: {approximate(default)})"


def _smallest_hardware(config: Config, command: Request, host: Host) -> tuple[str, list[str]]:
    find = "find=smallest_hardware"
    if config.method.exports or config.method.measures_machine:
        raise UserError(
            f"{find} with method={config.method.name}: its memory is not planned. Leave find= out."
        )
    for override in command:
        group, *names = override.lstrip("+~").partition("=")[0].split(".")
        if group == "hardware" and names and names[0] not in COMMON_KEYS:
            raise UserError(
                f"{override.lstrip('+~')} with {find}: every group would get that value, so the "
                "answer would be meaningless. Leave it out."
            )
    others = command.without("hardware")
    any_host = dataclasses.replace(host, environ={}, gpus=())
    rows: list[tuple[Memory, str]] = []
    rejected = []
    for name in groups()["hardware"]:
        if name in ("auto", "cpu"):
            continue
        try:
            rows.append((_tightest(others.plus(f"hardware={name}"), any_host), name))
        except (UserError, HostError) as error:
            rejected.append(f"{name:<12} rejected: {str(error).splitlines()[0]}")
    rows.sort(key=lambda row: (not row[0].fits, row[0].capacity_gb, row[1]))
    lines = [
        f"{name:<12} {m.total_gb:6.0f} of {m.capacity_gb:4.0f} GB  "
        f"{'fits' if m.fits else 'does not fit'} ({m.process})"
        for m, name in rows
    ]
    lines += rejected
    if not rows or not rows[0][0].fits:
        raise HostError(f"{find}: the run fits on no group of conf/hardware.\n" + "\n".join(lines))
    smallest, name = rows[0]
    if margin.close(smallest):
        other = next((other for m, other in rows if m.fits and not margin.close(m)), None)
        safe = f"a safer group: hardware={other}" if other else "no other group is safer"
        lines.insert(0, f"! It may not fit {name}: {margin.why(smallest)}; {safe}.")
    chosen = f"hardware={name}"
    note = " (memory before the choices of speed=auto)" if config.speed == SpeedMode.auto else ""
    return chosen, [f"smallest hardware that fits: {chosen}{note}", *lines]
