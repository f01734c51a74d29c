"""Describe the predictions of a plan: time, speed, bottleneck, memory and targets.

Predictions are shown with two significant digits.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.config.choose import with_value
from launch.core.json_files import read_json
from launch.estimate import batch_counts, margin, rank_state, run_length
from launch.estimate.memory import HOST
from launch.estimate.speed import estimate_speed
from launch.machine import placement
from launch.schema import Choice, Config
from launch.schema.enums import Init, SpeedMode, Vendor
from launch.schema.plan import Memory, Offer, Plan, Speed
from launch.schema.trainer_args import value_or_none

Facts = list[tuple[str, str]]
MAX_PARTS = 4  # parts of memory that are named
MAX_KINDS = 2  # kinds of work that are named
MAX_OFFERS = 3
MAX_LOST_S = 1800.0  # between two saves; our choice, for which a plan offers fewer steps
DISK_GB_S = 0.5  # assumed, for downloads and saves
VENDORS = (Vendor.amd.value, Vendor.nvidia.value)
PLAN_ERRORS = Path(__file__).with_name("published_errors.json")  # by tests/gpu/published.py


def facts(plan: Plan) -> Facts:
    config, speed, facts = plan.config, plan.speed, Facts()
    if not is_without_rows(config):
        facts.append(("time", run_time(plan) + _unit_cost(plan, speed.unit_cost) + _why(plan)))
        facts += [*repeated("total", _total(plan)), *evidence([plan])]
    facts += [*repeated("saves", _saves(plan)), *repeated("disk", _disk(plan))]
    if speed.tokens_per_second:
        facts.append(("speed", _rate(plan)))
    if speed.parts_s:
        facts.append(("bottleneck", _bottleneck(speed, config)))
    facts += repeated("faster", [_offer(plan, offer) for offer in plan.faster[:MAX_OFFERS]])
    facts += repeated("cheaper", [_offer(plan, offer) for offer in plan.cheaper])
    facts += repeated("memory", _memory(plan))
    facts += repeated("targets", targets([plan]))
    if config.followed:
        reason = config.followed[0].reason
        facts.append(("chosen", f"{_overrides(config.followed)} ({reason})"))
    for_speed = [choice for choice in config.chosen if not choice.key.endswith(".revision")]
    if for_speed and config.speed == SpeedMode.auto:
        facts.append(("chosen", f"{_overrides(for_speed)} (for speed; speed=off chooses nothing)"))
    return facts


def _overrides(choices: list[Choice]) -> str:
    return " ".join(f"{c.key}={json.dumps(c.value)}".replace('"', "") for c in choices)


def run_time(plan: Plan) -> str:
    speed, unit = plan.speed, "batch" if plan.config.method.kind == "evaluator" else "step"
    if speed.step_s is None:
        return "not predicted"
    step_s = f"{approximate(speed.step_s)} s"
    if speed.steps is None or speed.run_hours is None:
        return f"{step_s} per {unit}"
    units = unit if speed.steps == 1 else {"step": "steps", "batch": "batches"}[unit]
    total = duration(3600 * speed.run_hours)
    if speed.passes:
        pass_s = f" x {approximate(speed.pass_s)} s" if speed.pass_s else ", not counted"
        step_s += f" + {speed.passes} held-out passes{pass_s}"
    return f"{speed.steps:,} {units}{_epochs(plan)} x {step_s} = {total}{_cost(speed.cost)}"


def _cost(cost: float | None) -> str:
    return f", cost {approximate(cost)}" if cost else ""


def _unit_cost(plan: Plan, cost: float | None) -> str:
    """Return the cost of 1,000 answers, or of a million tokens; '' if it is unknown."""
    unit = "1,000 answers" if plan.config.method.generates else "million tokens"
    return "" if cost is None else f", {approximate(cost)} per {unit}"


def _epochs(plan: Plan) -> str:
    """Return how often the steps of training pass over the rows; '' if their number is unknown."""
    size = batch_counts.batch(plan.config)
    steps = run_length.epoch_steps(plan.config, size, plan.data)
    if not (steps and plan.speed.steps and plan.config.method.trains):
        return ""
    max_steps = value_or_none(plan.config, "max_steps")
    epochs = plan.speed.steps / steps
    if not max_steps or int(max_steps) < 1:
        epochs = float(value_or_none(plan.config, "num_train_epochs"))
    return f" ({gigabytes(epochs, 2)} epoch{'s' * (epochs != 1)})"


def _why(plan: Plan) -> str:
    """Return why the time is unknown or an upper bound; '' if it is neither."""
    speed, size = plan.speed, batch_counts.batch(plan.config)
    if speed.step_s is None:
        return " (smoke=true only tests that it runs)" if plan.config.smoke else f" ({speed.basis})"
    if not speed.is_upper_bound:
        return ""
    if size.completion or plan.config.method.kind == "evaluator":
        without = "; without lm_eval_tasks" * bool(value_or_none(plan.config, "lm_eval_tasks"))
        return f" (if every answer is as long as allowed{_half_as_long(plan)}{without})"
    preparing = "; data.preview=1 counts them" if plan.data_cache else ""
    return f" (if every row has {size.sequence} tokens{preparing})"


def _half_as_long(plan: Plan) -> str:
    """Return the time and the cost of training if answers are half as long as allowed."""
    key = "method.args.max_completion_length"
    if not plan.config.method.generates or not plan.speed.run_hours:
        return ""
    length = batch_counts.batch(plan.config).completion
    half = with_value(plan.config, key, max(1, length // 2))
    speed = estimate_speed(half, plan.data)
    cost = "" if speed.cost is None else f", cost {approximate(speed.cost)}"
    return f"; half as long: {duration(3600 * (speed.run_hours or 0.0))}{cost}"


def _saves(plan: Plan) -> list[str]:
    """Return the steps and the time between two checkpoints; [] if the time is not predicted."""
    config, speed = plan.config, plan.speed
    steps = run_length.steps_between_saves(config, plan.data) if config.method.trains else None
    if speed.step_s is None or not steps or (speed.steps and steps >= speed.steps):
        return []
    limit = value_or_none(config, "save_total_limit")
    between = duration(steps * speed.step_s)
    keeps = f"keeps {limit}" if limit else "keeps all"
    size = gigabytes(rank_state.checkpoint_bytes(config) / 1e9)
    more = ""
    fewer = max(1, int(MAX_LOST_S / speed.step_s))
    in_steps = run_length.save_strategy(config) == "steps"
    # Under a metric, saves cost evaluations.
    if in_steps and fewer < steps and config.method.selection.metric is None:
        more = f"; method.args.save_steps={fewer}: every {duration(fewer * speed.step_s)}"
    return [f"every {steps:,} steps ({between}), {size} GB each, {keeps}{more}"]


def _disk(plan: Plan) -> list[str]:
    """Return the disk space that a training run and its weights need; [] for a tiny run."""
    config = plan.config
    run_gb, weights_gb = rank_state.run_bytes(config, plan.data) / 1e9, download_gb(config)
    if run_gb < 1:
        return []
    number = rank_state.num_checkpoints(config, plan.data)
    parts = [f"{number} checkpoint{'s' * (number > 1)}"] * (number > 0) + [
        "the model"
    ] * config.save_model
    weights = f", {gigabytes(weights_gb, 2)} for weights" * (weights_gb > 0)
    run = f"{gigabytes(run_gb)} in run_root ({' and '.join(parts)})"
    return [f"{gigabytes(run_gb + weights_gb)} GB: {run}{weights}"]


def download_gb(config: Config) -> float:
    """Return the most that weights of the Hub take, or 0 without them.

    They are seldom wider than 16 bits, and quantized ones are smaller.
    """
    model = config.model
    is_local = model.path is not None or model.init == Init.random or not model.hub_id
    return 2 * model.num_parameters / 1e9 if config.method.uses_model and not is_local else 0.0


def _total(plan: Plan) -> list[str]:
    """Return time and cost with the download and the saves; [] without price_per_gpu_hour."""
    config, speed = plan.config, plan.speed
    if not speed.cost or not speed.run_hours:
        return []
    moved_gb = download_gb(config)
    if config.method.trains:
        saves = run_length.num_saves(config, plan.data) or 0
        moved_gb += saves * rank_state.checkpoint_bytes(config) / 1e9
        moved_gb += config.save_model * rank_state.model_bytes(config) / 1e9
    hours = speed.run_hours + moved_gb / DISK_GB_S / 3600
    cost = approximate(speed.cost * hours / speed.run_hours)
    moved = f"{gigabytes(moved_gb)} GB to download and save at {DISK_GB_S:g} GB/s (assumed)"
    return [f"{duration(3600 * hours)}, cost {cost} with {moved}, without start and image"]


def _rate(plan: Plan) -> str:
    config, rate = plan.config, plan.speed.tokens_per_second or 0.0
    ranks = placement.num_trainers(config)
    gpus = "training GPU" if config.topology.servers else "GPU"
    text = f"{approximate(rate / ranks)} tokens/s"
    if config.hardware.vendor != Vendor.none:
        text += f" per {gpus}" + (f" ({ranks} of them)" if ranks > 1 else "")
    before = plan.plain_speed and plan.plain_speed.tokens_per_second
    if before and rate / before >= 1.05:
        text += f", {approximate(rate / before)}x as fast as speed=off"
    return text


def evidence(plans: Sequence[Plan]) -> Facts:
    """Return how long earlier runs of each method took in predicted times, and what that means.

    A GPU without such runs has those of all GPUs of its vendor, or else of another vendor.
    """
    hardware = plans[0].config.hardware
    errors: dict[str, dict[str, Any]] = read_json(PLAN_ERRORS) or {}
    by_method: dict[str, list[Plan]] = {}
    for plan in plans if hardware.vendor != Vendor.none else ():
        if plan.speed.step_s:
            by_method.setdefault(plan.config.method.name, []).append(plan)
    sources = (
        hardware.product,
        *sorted(VENDORS, key=lambda vendor: vendor != hardware.vendor.value),
    )
    texts, unknown = [], []
    for name, phases in by_method.items():
        source = next((s for s in sources if name in errors.get(s, {})), None)
        if source is None:
            unknown.append(name)
        else:
            texts.append(_took(name, errors[source][name], phases, source))
    if unknown:
        texts.append(f"no run of {', '.join(unknown)} to compare with")
    return [*repeated("evidence", texts)]


def family(gfx: str) -> str:
    """Return the family of a GPU's architecture, whose members compute alike."""
    if not gfx.startswith("gfx"):
        return "NVIDIA"
    return "RDNA" if gfx.startswith("gfx1") else "gfx906" if gfx == "gfx906" else "CDNA"


def _took(method: str, took: dict[str, Any], plans: list[Plan], source: str) -> str:
    """Return how long earlier runs of a method took, and the range of time and cost of `plans`.

    `source` is the product on which they ran, or the vendor of several.
    """
    hardware = plans[0].config.hardware
    vendor, where, before, of = hardware.vendor.value, "on this GPU", "", f" of {method}"
    if source in VENDORS:
        names = ", ".join(
            f"{number} {gpu.removesuffix(' SXM').split()[-1]}"
            for gpu, number in took["gpus"].items()
        )
        own = family(hardware.gfx)
        names += f"; none on {own}" * (source == vendor and own not in took["families"])
        where = f"on {'other ' * (source == vendor)}{source.upper()} GPUs ({names})"
        if source != vendor:
            before, of = f"no run of {method} on an {vendor.upper()} GPU; ", ""
        vendor = source
    # Those on AMD GPUs were not of this project, which has not run on one.
    fitted = ", most of which the planner was fitted to," * (vendor == Vendor.nvidia.value)
    program = " by other programs" * (vendor == Vendor.amd.value)
    runs, half = f"{took['rows']} runs{of}", f", half of them over {took['median']:.3g}"
    if took["rows"] == 1:
        runs, half = f"one run{of} ({took['run']})", ""
        program = program.replace("other programs", "another program")
    ends = sorted({took["least"], took["most"]})
    factors = " to ".join(f"{factor:.2f}" for factor in ends)
    text = f"{before}{runs}{program} {where}{fitted} took {factors} times the prediction{half}"
    if hours := sum(plan.speed.run_hours or 0.0 for plan in plans):
        text += f": {' to '.join(duration(3600 * factor * hours) for factor in ends)}"
        if cost := sum(plan.speed.cost or 0.0 for plan in plans):
            text += f", cost {' to '.join(approximate(factor * cost) for factor in ends)}"
    return text


def _bottleneck(speed: Speed, config: Config) -> str:
    """Return what takes the longest part of a step."""
    if speed.generation_s is None or speed.training_s is None:
        largest = sorted(speed.parts_s.items(), key=lambda part: -part[1])[:MAX_KINDS]
        shares = (f"{name} {part / (speed.step_s or 1.0):.0%}" for name, part in largest)
        return f"{', '.join(shares)} of a step"
    halves = {"generation": speed.generation_s, "training": speed.training_s}
    (slow, slow_s), (fast, fast_s) = sorted(halves.items(), key=lambda half: -half[1])
    overlap = "meanwhile" if config.topology.overlap else "then"
    return f"{slow}, {approximate(slow_s)} s of a step; {overlap} {fast}, {approximate(fast_s)} s"


def _offer(plan: Plan, offer: Offer) -> str:
    gain = f"{approximate(offer.gain)}x{_unit_cost(plan, offer.unit_cost)}"
    return f"{' '.join(offer.overrides)}: {gain} ({offer.price})"


def _memory(plan: Plan) -> list[str]:
    """Return a line for each process: its share of a GPU's memory, and the largest parts."""
    lines = []
    for m in {m.process: m for m in plan.memory}.values():
        where = "of the host" if m.gpu is None else "per GPU"
        share = f"{margin.share(m):.0%}"
        if margin.fills_capacity(m) and m.fits and margin.share(m) > 0.99:
            share = "all that it may use, by design"
        total = f"{m.total_gb:.1f}" if 10 <= m.total_gb < 100 else gigabytes(m.total_gb)
        usage = f"{total} of {m.capacity_gb:.0f} GB {where} ({share}"
        parts = ", ".join(_parts(m, len(total.partition(".")[2])))
        lines.append(f"{m.process} {usage}{'' if m.fits else ', DOES NOT FIT'}): {parts}")
    return lines


def _parts(m: Memory, digits: int) -> Iterator[str]:
    """Yield the largest parts and the rest; as rounded, they sum to the rounded total."""
    sizes = sorted(m.parts_gb.items(), key=lambda part: -part[1])
    rest = sum(gb for _, gb in sizes[MAX_PARTS:])
    (largest, _), *others = [*sizes[:MAX_PARTS], ("other", rest)]
    rounded = {name: round(gb, digits) for name, gb in others}
    yield f"{largest} {round(m.total_gb, digits) - sum(rounded.values()):,.{digits}f}"
    yield from (f"{name} {gb:,.{digits}f}" for name, gb in rounded.items() if gb)


def most_memory(plan: Plan) -> str:
    """Return the memory of the tightest process."""
    m = max(plan.memory, key=margin.tightness, default=None)
    if m is None:
        return ""
    usage = f"{gigabytes(m.total_gb)} of {m.capacity_gb:.0f} GB"
    return usage if m.fits else f"{usage}, DOES NOT FIT"


def targets(plans: list[Plan]) -> list[str]:
    """Return the targets with the plan's value in the same unit, one line for each source."""
    planned = {name: value for plan in reversed(plans) for name, value in _planned(plan).items()}
    by_source: dict[str, dict[str, None]] = {}
    for plan in plans:
        for name, target in plan.targets.items():
            here = f" (planned: {approximate(planned[name])})" if name in planned else ""
            by_source.setdefault(target.source, {})[f"{name} {target.value:,g}{here}"] = None
    return [f"{', '.join(values)}; from {source}" for source, values in by_source.items()]


def _planned(plan: Plan) -> dict[str, float]:
    """Return the plan's values of the figures that have targets."""
    speed, size, method = plan.speed, batch_counts.batch(plan.config), plan.config.method
    # torch's peak, without servers and offloaded parts
    ranks = [m for m in plan.memory if m.process != HOST and not margin.fills_capacity(m)]
    peak_gb = max((m.allocated_gb for m in ranks), default=None)
    values: dict[str, float | None] = {"memory_peak_gb": peak_gb}
    if speed.step_s and speed.tokens_per_second and method.trains:
        values["step_s"], values["training_hours"] = speed.step_s, speed.run_hours
        values["samples_per_second"] = size.sequences / speed.step_s
        values["tokens_per_second_per_gpu"] = speed.tokens_per_second / size.ranks
    elif speed.step_s and method.leaves_samples:
        samples = size.per_device * int(value_or_none(plan.config, "samples_per_prompt"))
        values["sample_s"] = speed.step_s / samples
        values["generation_hours"] = speed.run_hours
    return {name: value for name, value in values.items() if value is not None}


def total_time(plans: list[Plan]) -> str:
    """Return the sum of the phases' times, and which phase takes the longest."""
    hours = {phase_name(p): p.speed.run_hours for p in plans}
    known = {name: time for name, time in hours.items() if time is not None}
    if not known:
        return "not predicted"
    total, longest = sum(known.values()), max(known, key=known.__getitem__)
    text = f"{duration(3600 * total)} in all"
    if cost := sum(plan.speed.cost or 0.0 for plan in plans):
        text += f"{_cost(cost)} without downloads, start and saves"
    if len(known) < len(hours):
        text += f" for {len(known)} of {len(hours)} phases; the others are not predicted"
    return f"{text}; {longest} takes {known[longest] / total:.0%}" if total else text


def approximate(number: float) -> str:
    """Return a number with two significant digits, which is more than predictions are good for."""
    rounded = float(f"{number:.2g}")
    decimals = 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, decimals)}f}"


def gigabytes(gb: float, digits: int = 3) -> str:
    """Return a size with at least `digits` significant digits, never with an exponent."""
    return f"{gb:.{digits}g}" if gb < 10**digits - 0.5 else f"{gb:,.0f}"


def duration(seconds: float) -> str:
    for unit, size, most in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 172800)):
        if seconds < most:
            return f"{approximate(seconds / size)} {unit}"
    return f"{approximate(seconds / 86400)} days"


def phase_name(plan: Plan) -> str:
    """Return the name of a phase, whose directory is `<number>_<name>`."""
    return plan.run_dir.name.partition("_")[2]


def repeated(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts under one label."""
    for number, text in enumerate(texts):
        yield ("" if number else label), text


def is_without_rows(config: Config) -> bool:
    """Return whether a run has no batches and no data."""
    method = config.method
    return method.measures_machine or method.exports or method.waits_for_user
