"""Describe a plan in the lines that mode=plan prints, with the most important ones first."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.estimate import batch_counts, margin
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.gpu import GIB
from launch.plan import data_cache, local_copies, next_steps
from launch.plan.views import as_json, image_json
from launch.schema import Config, shapes
from launch.schema.data import Data
from launch.schema.enums import Init, SpeedMode, Vendor
from launch.schema.plan import Memory, Plan, Speed
from launch.schema.trainer_args import value_or_none

Facts = list[tuple[str, str]]
LABEL = 12  # characters
WIDTH = 120  # of a line, at most
WRAPPING = {"break_long_words": False, "break_on_hyphens": False}  # overrides stay pasteable
MAX_PARTS = 4  # parts of memory that are named
MAX_KINDS = 2  # kinds of work that are named
MAX_OFFERS = 3
MAX_VALUES = 300  # characters of a benchmark's arguments
MAX_PHASES = 16  # of a pipeline that are listed


def page(plan: Plan, host: Host | None = None, verbose: bool = False) -> list[str]:
    """Return the lines of a plan, without warnings.

    With `host`, they say what this machine has. A run that starts has checked that already.
    """
    needs = [*_needs([plan], host), ("output", next_steps.short_path(plan.run_dir))]
    groups = (_composition(plan), _predictions(plan), needs)
    details = _details(plan) if verbose else []
    return [plan.name, *(line for group in groups for line in (*_aligned(group), "")), *details]


def pipeline_page(run_dir: Path, plans: list[Plan], host: Host, verbose: bool) -> list[str]:
    """Return the lines of a pipeline: the phases to run with time and memory, and the total."""
    if not plans:
        return [run_dir.parent.name, "  no phase has to run"]
    rows = [
        (phase_name(plan), plan.config.method.name, _time(plan), _most_memory(plan))
        for plan in plans[:MAX_PHASES]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    phases = [
        "  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    phases += [f"and {len(plans) - len(rows)} more"] * (len(plans) > len(rows))
    lines = [f"  {name:<{LABEL}}{text}" for name, text in _repeated("phases", phases)]
    facts = [("time", _total_time(plans)), *_repeated("targets", _targets(plans))]
    facts += [("hardware", _hardware(plans[0].config)), *_needs(plans, host)]
    facts.append(("output", next_steps.short_path(run_dir)))
    details = [line for plan in plans if verbose for line in page(plan, None, True)]
    return [run_dir.parent.name, *lines, "", *_aligned(facts), "", *details]


def phase_name(plan: Plan) -> str:
    """Return the name of a phase, whose directory is `<number>_<name>`."""
    return plan.run_dir.name.partition("_")[2]


def next_command(request: Sequence[str], config: Config, host: Host, *words: str) -> list[str]:
    """Return lines with the command that starts the planned run, and what has to happen before.

    `words` are added to the command: an override that makes the run fit, or -m for a sweep.
    """
    left_out = ("mode", "find", "format", "verbose")
    kept = [override for override in request if override.partition("=")[0] not in left_out]
    command = next_steps.command_line("run", *words, *kept)
    vendor, number = config.hardware.vendor, placement.num_gpus(config)
    needs_gpus = vendor != Vendor.none and not config.smoke and config.runtime.name != "slurm"
    if not needs_gpus or len(host.gpus_of(vendor)) >= number:
        build = local_copies.build_command(config, host)
        return [f"Next: {build}", f"Then: {command}"] if build else [f"Next: {command}"]
    gpus = f"{number} x {config.hardware.product}"
    return [
        f"Next, on a machine with {gpus}: {command}",
        f"Or a trial on this CPU: {command} smoke=true",
    ]


def approximate(number: float) -> str:
    """Return a number with two significant digits, which is more than predictions are good for."""
    rounded = float(f"{number:.2g}")
    decimals = 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, decimals)}f}"


def duration(seconds: float) -> str:
    for unit, size, most in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 172800)):
        if seconds < most:
            return f"{approximate(seconds / size)} {unit}"
    return f"{approximate(seconds / 86400)} days"


# ---- What runs


def _composition(plan: Plan) -> Facts:
    config, method, data = plan.config, plan.config.method, plan.config.data
    facts = [("method", _method(config))]
    if config.method.uses_model:
        facts.append(("model", _model(config)))
    if not _is_without_rows(config):
        files = ", ".join(f"{s.weight:.4g} {s.path or s.hub_id}" for s in data.sources)
        files = files or data.path or data.heldout_path or data.hub_id or ""
        text = f"{data.kind} {next_steps.short_path(files)}"
        if data.kind in ("reasoning", "code"):
            tasks = _tasks(data)
            text = f"{data.num_train} generated problems of {tasks}; {data.num_heldout} held out"
        rows = f". Prepared: {data_cache.short_description(plan.data)}" if plan.data else ""
        facts.append(("data", text + rows))
    if method.rewards:
        rewards = (f"{weight:g} {name}" for name, weight in method.rewards.items())
        facts.append(("rewards", " + ".join(rewards)))
    return [*facts, ("hardware", _hardware(config)), ("runs in", _place(config))]


def _is_without_rows(config: Config) -> bool:
    method = config.method
    return method.measures_machine or method.exports or method.waits_for_user


def _method(config: Config) -> str:
    if _is_without_rows(config):
        values = [f"{name} {v}" for name, v in config.method.args.items() if v is not None]
        return textwrap.shorten(", ".join([config.method.name, *values]), MAX_VALUES)
    adapter = "all weights" if config.adapter.rank is None else f"adapter {config.adapter.name}"
    trained = f"{adapter}, " if config.method.trains else ""
    return f"{config.method.name}, {trained}{config.precision.name}, {_batch(config)}"


def _batch(config: Config) -> str:
    batch = batch_counts.batch(config)
    if not config.method.trains:
        samples = int(value_or_none(config, "samples_per_prompt"))
        return f"{batch.per_device} problems at a time, {samples} answer{'s' * (samples != 1)} each"
    accumulated = f" x {batch.accumulation} accumulated" if batch.accumulation > 1 else ""
    factors = f"{_devices(config, batch.ranks)} x {batch.per_device}{accumulated}"
    return f"{batch.sequences} sequences per step ({factors}), up to {batch.sequence} tokens each"


def _devices(config: Config, number: int) -> str:
    if config.hardware.vendor == Vendor.none or config.smoke:
        return f"{number} process{'es' * (number != 1)}"
    return f"{number} GPU{'s' * (number != 1)}"


def _model(config: Config) -> str:
    model = config.model
    size = f"{_count(model.num_parameters)} parameters"
    if model.num_experts:
        size += f" ({_count(shapes.active_parameters(model))} per token)"
    source = f"{model.hub_id}@{(model.revision or 'main')[:12]}"
    if model.path:
        source = next_steps.short_path(model.path)
    elif model.init == Init.random:
        source = "random weights"
    return f"{model.name}, {size}, from {source}"


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _tasks(data: Data) -> str:
    """Return the tasks with their levels, if they have any, such as `countdown (levels 0, 1)`."""
    levels: dict[str, list[int]] = {}
    for task in data.tasks:
        levels.setdefault(task.name, []).append(task.level)
    return ", ".join(
        f"{name} (level{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))})"
        for name, numbers in levels.items()
    )


def _hardware(config: Config) -> str:
    hardware, nodes = config.hardware, config.runtime.slurm.nodes
    if hardware.vendor == Vendor.none:
        return "the CPU of this machine"
    # hardware.memory_gb is in GiB, as vendors state it. The planner and torch use 1e9 bytes.
    size = f"{hardware.memory_gb:g} GiB ({hardware.memory_gb * GIB:.0f} GB) each"
    prefix = f"{nodes} nodes of " if nodes > 1 else ""
    cpu = "the CPU, in place of " if config.smoke else ""
    return f"{cpu}{prefix}{hardware.gpus_per_node} x {hardware.product} ({hardware.gfx}), {size}"


def _place(config: Config) -> str:
    topology, runtime = config.topology, config.runtime
    text = _devices(config, placement.num_trainers(config))
    if topology.servers:
        text = f"{_devices(config, placement.num_server_gpus(config))} to generate, {text} to train"
    if config.method.kind == "service":
        each = topology.server_tensor_parallel
        number = placement.num_gpus(config) // each
        text = f"{number} replica{'s' * (number != 1)} on {_devices(config, each)} each"
    elif topology.strategy != "none":
        text += f" with {topology.strategy}"
    place = f"slurm ({runtime.on_node} on the node)" if runtime.name == "slurm" else runtime.name
    return f"{place}: {text} (topology={topology.name})"


# ---- What is predicted


def _predictions(plan: Plan) -> Facts:
    config, speed, facts = plan.config, plan.speed, Facts()
    if not _is_without_rows(config):
        facts.append(("time", _time(plan) + _why(plan)))
    if speed.tokens_per_second:
        facts += [("speed", _rate(plan)), ("bottleneck", _bottleneck(speed, config))]
    facts += _repeated("faster", _offers(plan))
    facts += _repeated("memory", _memory(plan))
    facts += _repeated("targets", _targets([plan]))
    if config.chosen and config.speed == SpeedMode.auto:
        values = (f"{c.key}={json.dumps(c.value)}".replace('"', "") for c in config.chosen)
        facts.append(("chosen", f"{' '.join(values)} (for speed; speed=off chooses nothing)"))
    return facts


def _time(plan: Plan) -> str:
    speed, unit = plan.speed, "batch" if plan.config.method.leaves_samples else "step"
    if speed.step_s is None:
        return "not predicted"
    at_most, step_s = "at most " * speed.is_upper_bound, f"{approximate(speed.step_s)} s"
    if speed.steps is None or speed.run_hours is None:
        return f"{at_most}{step_s} per {unit}"
    units = unit if speed.steps == 1 else {"step": "steps", "batch": "batches"}[unit]
    total = duration(3600 * speed.run_hours)
    cost = f", cost {approximate(speed.cost)}" if speed.cost is not None else ""
    return f"{at_most}{speed.steps:,} {units} x {step_s} = {total}{cost}"


def _why(plan: Plan) -> str:
    """Return why the time is unknown or an upper bound; '' if it is neither."""
    speed, size = plan.speed, batch_counts.batch(plan.config)
    if speed.step_s is None:
        return f" ({speed.basis})"
    if not speed.is_upper_bound:
        return ""
    reason = "if every answer is as long as allowed"
    if not size.completion and not plan.config.method.leaves_samples:
        reason = f"if every row has {size.sequence} tokens"
    if plan.data_cache and not plan.data:
        reason += "; rows are not prepared yet: data.preview=5"
    return f" ({reason})"


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
    is_measured = config.hardware.name == "h200"
    basis = "" if is_measured or config.hardware.vendor == Vendor.none else ", not measured on"
    return text + (f"{basis} {config.hardware.name} yet" if basis else "")


def _bottleneck(speed: Speed, config: Config) -> str:
    """Return what takes the longest part of a step."""
    step_s = speed.step_s or 1.0
    largest = sorted(speed.parts_s.items(), key=lambda part: -part[1])[:MAX_KINDS]
    shares = [f"{name} {part / step_s:.0%}" for name, part in largest]
    if speed.generation_s is None or speed.training_s is None:
        return f"{', '.join(shares)} of a step" if shares else speed.basis
    halves = {"generation": speed.generation_s, "training": speed.training_s}
    (slow, slow_s), (fast, fast_s) = sorted(halves.items(), key=lambda half: -half[1])
    overlap = "meanwhile" if config.topology.overlap else "then"
    return f"{slow}, {approximate(slow_s)} s of a step; {overlap} {fast}, {approximate(fast_s)} s"


def _offers(plan: Plan) -> list[str]:
    """Return overrides that would make the run faster, with gain and price."""
    offers, balance = [], plan.balance
    if balance and balance.gain > 1.0:
        size = batch_counts.batch(plan.config).sequences
        price = f" ({balance.sequences} sequences per step)" if balance.sequences != size else ""
        offers.append(f"topology.servers={balance.servers}: {balance.gain:.1f}x{price}")
    offers += [f"{' '.join(o.overrides)}: {o.gain:.1f}x ({o.price})" for o in plan.faster]
    return offers[:MAX_OFFERS]


def _memory(plan: Plan) -> list[str]:
    """Return a line for each process: its share of a GPU's memory, and the largest parts."""
    lines = []
    for m in {m.process: m for m in plan.memory}.values():
        where = "of the host" if m.gpu is None else "per GPU"
        share = f"{margin.share(m):.0%}"
        if margin.fills_capacity(m) and m.fits:
            share = "all of its share, by design"
        usage = f"{m.total_gb:.3g} of {m.capacity_gb:.0f} GB {where} ({share}"
        lines.append(f"{m.process} {usage}{'' if m.fits else ', DOES NOT FIT'}){_parts(m)}")
    return lines


def _most_memory(plan: Plan) -> str:
    """Return the memory of the tightest process."""
    m = max(plan.memory, key=margin.tightness, default=None)
    return f"{m.total_gb:.3g} of {m.capacity_gb:.0f} GB" if m else ""


def _parts(entry: Memory) -> str:
    largest = sorted(entry.parts_gb.items(), key=lambda part: -part[1])[:MAX_PARTS]
    return ": " + ", ".join(f"{name} {approximate(gb)}" for name, gb in largest)


def _targets(plans: list[Plan]) -> list[str]:
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
    values: dict[str, float | None] = {
        "memory_peak_gb": max((m.allocated_gb for m in plan.memory), default=None)
    }
    if speed.step_s and speed.tokens_per_second and method.trains:
        values["step_s"], values["training_hours"] = speed.step_s, speed.run_hours
        values["samples_per_second"] = size.sequences / speed.step_s
        values["tokens_per_second_per_gpu"] = speed.tokens_per_second / size.ranks
    elif speed.step_s and method.leaves_samples:
        samples = size.per_device * int(value_or_none(plan.config, "samples_per_prompt"))
        values["sample_s"] = speed.step_s / samples
        values["generation_hours"] = speed.run_hours
    return {name: value for name, value in values.items() if value is not None}


def _total_time(plans: list[Plan]) -> str:
    """Return the sum of the phases' times, and which phase takes the longest."""
    hours = {phase_name(p): p.speed.run_hours for p in plans}
    known = {name: time for name, time in hours.items() if time is not None}
    if not known:
        return "not predicted"
    total, longest = sum(known.values()), max(known, key=known.__getitem__)
    text = "at most " * any(p.speed.is_upper_bound for p in plans) + duration(3600 * total)
    if len(known) < len(hours):
        text += f" for {len(known)} of {len(hours)} phases; the others are not predicted"
    return f"{text}; {longest} takes {known[longest] / total:.0%}" if total else text


# ---- What this machine needs


def _needs(plans: list[Plan], host: Host | None) -> Facts:
    """Return the images and weights of the plans, and whether this machine has them."""
    if host is None:
        return []
    facts: Facts = []
    for label, state in (("image", local_copies.image), ("weights", local_copies.weights)):
        texts = [text for plan in plans if (text := state(plan.config, host))]
        facts += _repeated(label, list(dict.fromkeys(texts)))
    return facts


def _details(plan: Plan) -> list[str]:
    """Return what verbose=true adds, as YAML."""
    plan_json = as_json(plan)
    memory = {m["process"]: m["parts_gb"] for m in plan_json["memory"]}
    processes = [{**p, "argv": shlex.join(p["argv"])} for p in plan_json["processes"]]
    content: dict[str, Any] = {"image": image_json(plan.config), "memory_gb": memory}
    content |= {key: plan_json[key] for key in ("speed", "chosen", "faster")}
    content |= {"processes": processes, "trainer_args": plan_json["trainer_args"]}
    content = json.loads(json.dumps(content))  # a copy without aliases, for readable YAML
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    rows = data_cache.describe_rows(plan.data).splitlines() if plan.data else []
    return [*rows, *text.splitlines()]


# ---- Layout


def _repeated(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts under one label."""
    for number, text in enumerate(texts):
        yield ("" if number else label), text


def _aligned(facts: Facts) -> list[str]:
    """Return the facts with aligned labels, wrapped between words."""
    lines = []
    for label, text in facts:
        lines += textwrap.wrap(
            text,
            width(),
            initial_indent=f"  {label:<{LABEL}}",
            subsequent_indent=" " * (LABEL + 2),
            **WRAPPING,
        )
    return lines


def width() -> int:
    """Return the width of the terminal, but no more than is comfortable to read."""
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
