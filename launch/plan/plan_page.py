"""Describe a plan in the lines that mode=plan prints, with the most important ones first."""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.config import follow_run, smoke, thinking
from launch.config.request import Request
from launch.estimate import batch_counts, margin, run_length
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.gpu import GIB
from launch.plan import check_rows, data_cache, local_copies, next_steps, predictions, resuming
from launch.plan.predictions import (
    Facts,
    is_without_rows,
    most_memory,
    phase_name,
    repeated,
    run_time,
    targets,
    total_time,
)
from launch.plan.views import as_json, image_json
from launch.rules.warnings import adapter_rate
from launch.schema import Config, shapes
from launch.schema.data import Data
from launch.schema.enums import Init, Vendor
from launch.schema.plan import Plan
from launch.schema.trainer_args import value_or_none

LABEL = 12  # characters
WIDTH = 120  # of a line, at most, to be comfortable to read
MAX_VALUES = 300  # characters of a benchmark's arguments
MAX_PHASES = 16  # of a pipeline that are listed


def page(plan: Plan, host: Host | None = None, verbose: bool = False) -> list[str]:
    """Return the lines of a plan, without warnings.

    With `host`, they say what this machine has. A run that starts has checked that already.
    """
    output = next_steps.short_path(plan.run_dir)
    output += resuming.progress(plan.run_dir, plan.speed.steps)
    needs = [*_needs([plan], host), ("output", output)]
    groups = (_composition(plan), predictions.facts(plan), needs)
    lines = [line for group in groups if group for line in (*_aligned(group), "")]
    return [plan.name, *lines, *_request(plan.config), *(_details(plan) if verbose else [])]


def pipeline_page(run_dir: Path, plans: list[Plan], host: Host, verbose: bool) -> list[str]:
    """Return the lines of a pipeline: the phases to run with time and memory, and the total."""
    if not plans:
        return [run_dir.parent.name, "  no phase has to run"]
    rows = [
        (phase_name(plan), plan.config.method.name, run_time(plan), most_memory(plan))
        for plan in plans[:MAX_PHASES]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    phases = [
        "  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    phases += [f"and {len(plans) - len(rows)} more"] * (len(plans) > len(rows))
    lines = [f"  {name:<{LABEL}}{text}" for name, text in repeated("phases", phases)]
    facts = [
        ("time", total_time(plans)),
        *predictions.evidence(plans),
        *repeated("targets", targets(plans)),
    ]
    used = max(placement.num_gpus(plan.config) for plan in plans)
    some = f"; {used} used" if used < plans[0].config.hardware.gpus_per_node else ""
    facts += [("hardware", _hardware(plans[0].config) + some), *_needs(plans, host)]
    facts.append(("output", next_steps.short_path(run_dir) + resuming.progress(run_dir, None)))
    details = [line for plan in plans if verbose for line in page(plan, None, True)]
    return [run_dir.parent.name, *lines, "", *_aligned(facts), "", *details]


def next_command(request: Sequence[str], config: Config, host: Host, *words: str) -> list[str]:
    """Return lines with the command that starts the planned run, and what has to happen before.

    `words` are added to the command: an override that makes the run fit, or -m for a sweep. The
    remedies of two warnings are added, too: an adapter's learning rate, and a chat template.
    """
    fixes = [rate] if (rate := adapter_rate(config)) else []
    if check_rows.text_prompts(config, Request(request).keys):
        fixes += shlex.split(check_rows.TEMPLATE_ONLY)
    kept = [*_without_output_keys(request), *fixes]
    changed = ", changed as warned" * bool(fixes)
    command = f"{changed}: {next_steps.command_line('run', *words, *kept)}"
    if config.runtime.name == "kubernetes":
        return [f"Next{command} mode=plan format=json | jq .manifest | kubectl apply -f -"]
    vendor, number = config.hardware.vendor, placement.num_gpus(config)
    needs_gpus = vendor != Vendor.none and not config.smoke and config.runtime.name != "slurm"
    if not needs_gpus or len(host.gpus_of(vendor)) >= number:
        build = local_copies.build_command(config, host)
        return [f"Next: {build}", f"Then{command}"] if build else [f"Next{command}"]
    line = f"Next, on a machine with {number} x {config.hardware.product}{command}"
    # smoke=true keeps the model of a directory
    if config.model.path and not margin.fits(smoke.scale_down(config)[0], host):
        trial = "Or add smoke=true, without model.path: a trial of a tiny model on this CPU."
        return [line, trial]
    return [line, "Or add smoke=true: a trial on this CPU."]


def preview_hint(plan: Plan) -> list[str]:
    """Return how to see rows if they are not prepared yet, or if data.preview is given."""
    number = plan.config.data.preview
    is_pod = plan.config.runtime.name == "kubernetes"
    if not plan.data_cache or (plan.data and not number) or is_pod:
        return []
    rows = "rows as the model sees them, counted for later plans"
    return [f"Or, in place of mode=plan, add data.preview={number or 5}: {rows}."]


def search_command(request: Sequence[str]) -> str:
    """Return the line with the command that searches for hardware that a run fits on."""
    words = (*_without_output_keys(request), "mode=plan", "find=smallest_hardware")
    return f"Next: {next_steps.command_line('run', *words)}"


def _without_output_keys(request: Sequence[str]) -> list[str]:
    """Return the overrides of a command except those that choose what it shows."""
    left_out = ("mode", "find", "format", "verbose", "data.preview")
    return [override for override in request if override.partition("=")[0] not in left_out]


def _request(config: Config) -> list[str]:
    """Return the request to a server that has the system prompt of the model's training, if any."""
    prompt = (follow_run.source(config).get("data") or {}).get("system_prompt")
    if config.method.kind != "service" or not prompt:
        return []
    args = config.method.args
    question = {"role": "user", "content": "What is 17 + 25?"}
    messages = [{"role": "system", "content": prompt}, question]
    content = {"model": args.get("model_name") or config.model.name, "messages": messages}
    address = f"http://127.0.0.1:{args['port']}/v1/chat/completions"
    header = "Content-Type: application/json"
    curl = shlex.join(["curl", address, "-H", header, "-d", json.dumps(content)])
    return ["Requests need the system prompt of training:", curl, ""]


# ---- What runs


def _composition(plan: Plan) -> Facts:
    config, method, data = plan.config, plan.config.method, plan.config.data
    facts = [("method", _method(plan))]
    if config.method.uses_model:
        facts.append(("model", _model(config)))
    if not is_without_rows(config):
        files = ", ".join(f"{s.weight:.4g} {s.path or s.hub_id}" for s in data.sources)
        files = files or data.path or data.heldout_path or data.hub_id or ""
        text = f"{data.kind} {next_steps.short_path(files)}"
        if data.kind in ("jsonl", "hub", "mix"):
            is_remote = data.kind == "hub" and not Path(files).is_absolute()
            text += _revision(data.revision) * is_remote + _row_counts(config)
        if data.kind in ("reasoning", "code"):
            tasks = _tasks(data)
            text = f"{data.num_train} generated problems of {tasks}; {data.num_heldout} held out"
        facts.append(("data", text))
    if plan.data:
        facts.append(("rows", data_cache.short_description(plan.data)))
    if method.rewards:
        rewards = (f"{weight:g} {name}" for name, weight in method.rewards.items())
        facts.append(("rewards", " + ".join(rewards)))
    return [*facts, ("hardware", _hardware(config)), ("runs in", _place(config))]


def _row_counts(config: Config) -> str:
    """Return the numbers of training and held-out rows, as far as they are known.

    A share to hold out is chosen by a hash, so its number is not exact.
    """
    data, heldout = config.data, run_length.num_heldout(config)
    count, text = run_length.source_rows(data, data.path, data.split), ""
    about = "about " * bool(data.heldout_fraction)
    if count is not None and not config.method.measures_model:
        rows = count - (heldout or 0) * bool(about)
        used = f"{data.limit:,} of " if data.limit and data.limit < rows else ""
        text = f", {used}{about}{rows:,} row{'s' * (rows != 1)}"
    if heldout:
        text += f", {about}{heldout:,} held out"
    if config.method.trains and not data.has_heldout:
        text += ", nothing held out to compare before and after (data.heldout_fraction=0.05)"
    if data.heldout_split and config.method.measures_model:
        text += f", split {data.heldout_split}"
    return text


def _method(plan: Plan) -> str:
    config = plan.config
    if is_without_rows(config):
        values = [f"{name} {v}" for name, v in config.method.args.items() if v is not None]
        return textwrap.shorten(", ".join([config.method.name, *values]), MAX_VALUES)
    trained = rate = ""
    if config.method.trains:
        adapter = f"adapter {config.adapter.name} of rank {config.adapter.rank}"
        trained = f"{'all weights' if config.adapter.rank is None else adapter}, "
        # as scaled with the batch
        rate = f", learning rate {plan.trainer_args['learning_rate']:g}"
    compute, weights = config.precision.compute, config.precision.weights
    dtypes = config.precision.name
    if config.method.trains and compute != weights:
        dtypes = f"{compute} products, {weights} weights"
    return f"{config.method.name}, {trained}{dtypes}, {_batch(config)}{rate}"


def _batch(config: Config) -> str:
    batch = batch_counts.batch(config)
    if not config.method.trains:
        samples, tokens = (
            int(value_or_none(config, name)) for name in ("samples_per_prompt", "max_new_tokens")
        )
        answers = f"{samples} answer{'s' * (samples != 1)} each, up to {tokens} tokens"
        return f"{batch.per_device} problems at a time, {answers} (method.args.max_new_tokens)"
    accumulated = f" x {batch.accumulation} accumulated" if batch.accumulation > 1 else ""
    factors = f"{_devices(config, batch.ranks)} x {batch.per_device}{accumulated}"
    if not config.method.generates:
        return (
            f"{batch.sequences} sequences per step ({factors}), up to {batch.sequence} tokens each"
        )
    group = int(value_or_none(config, "num_generations"))
    return (
        f"{batch.sequences / group:g} prompts x {group} answers per step ({batch.sequences} "
        f"sequences: {factors}), up to {batch.completion} tokens per answer "
        "(method.args.max_completion_length)"
    )


def _devices(config: Config, number: int) -> str:
    if config.hardware.vendor == Vendor.none or config.smoke:
        return f"{number} process{'es' * (number != 1)}"
    return f"{number} GPU{'s' * (number != 1)}"


def _model(config: Config) -> str:
    model = config.model
    size = f"{_count(model.num_parameters)} parameters"
    if model.num_experts:
        size += f" ({_count(shapes.active_parameters(model))} per token)"
    source = f"{model.hub_id}{_revision(model.revision)}"
    if model.path:
        source = next_steps.short_path(model.path)
    elif model.init == Init.random:
        source = "random weights"
    state = {None: "", False: "off", True: "on"}[thinking.of(config)]
    thinks = f", thinking {state} ({thinking.SWITCH})" if state else ""
    return f"{model.name}, {size}, from {source}{thinks}"


def _revision(revision: str | None) -> str:
    return f"@{revision[:12]}" if revision else " (its newest commit, or the cache's)"


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 999.5e6 else f"{number / 1e6:.3g} million"


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
    if placement.shares_gpu(config):
        text += " to generate and train"
    elif topology.servers:
        ahead = {True: " one step ahead (topology.overlap)", "stream": " continuously"}
        how = ahead.get(topology.overlap, "")
        servers = _devices(config, placement.num_server_gpus(config))
        text = f"{servers} to generate{how}, {text} to train"
    if config.method.kind == "service":
        each = topology.server_tensor_parallel
        number = placement.num_gpus(config) // each
        text = f"{number} replica{'s' * (number != 1)} on {_devices(config, each)} each"
    elif topology.strategy != "none":
        text += f" with {topology.strategy}"
    place = f"slurm ({runtime.on_node} on the node)" if runtime.name == "slurm" else runtime.name
    return f"{place}: {text} (topology={topology.name})"


# ---- What this machine needs


def _needs(plans: list[Plan], host: Host | None) -> Facts:
    """Return the images and weights of the plans, and whether this machine has them."""
    if host is None:
        return []
    facts: Facts = []
    here = [plan.config for plan in plans if plan.config.runtime.name != "kubernetes"]
    states = (
        *(("engine", local_copies.engine), ("image", local_copies.image)),
        ("build", local_copies.build_command),
        ("weights", local_copies.weights),
    )
    for label, state in states:
        texts = [text for config in here if (text := state(config, host))]
        facts += repeated(label, list(dict.fromkeys(texts)))
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


def _aligned(facts: Facts) -> list[str]:
    """Return the facts with aligned labels."""
    indent = " " * (LABEL + 2)
    return [line for label, text in facts for line in wrapped(text, f"  {label:<{LABEL}}", indent)]


def wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    """Wrap a text between words, so that overrides and paths can still be pasted."""
    wrapper = textwrap.TextWrapper(
        min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text)
