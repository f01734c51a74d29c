"""Print a plan as text before a run, and the few lines after it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.core import json_files
from launch.estimate import batch_counts
from launch.machine import placement
from launch.machine.gpu import GIB
from launch.plan import data_cache
from launch.plan.views import as_json, image_json
from launch.schema import Config
from launch.schema.enums import Format, Init, Speed, Vendor
from launch.schema.plan import Balance, Plan
from launch.schema.trainer_args import argument


def show(config: Config, content: Callable[[], dict[str, Any]], *plans: Plan) -> None:
    """Print the plans as one JSON object, or as a page for each run."""
    if config.format == Format.json:
        print(json.dumps(content(), indent=1))
        return
    console = _console()
    for plan in plans:
        show_plan(plan, console, config.verbose)


def show_start(config: Config, plan: Plan, image: dict[str, Any] | None, resumed: bool) -> None:
    """Print the plan, the base of its image if it differs, and what the run continues."""
    if config.format == Format.text:
        show_plan(plan, _console(), config.verbose)
    planned = (image_json(plan.config) or {}).get("base")
    built = ((image or {}).get("base") or {}).get("name")
    if planned and built != planned.partition("@")[0]:
        say(config, f"! the image here was built on {built}, not on {planned}.")
    if resumed:
        say(config, f"Continues {short_path(plan.run_dir)}; resume=never starts afresh.")


def say(config: Config, line: str) -> None:
    """Print a line for a person, unless stdout is for JSON."""
    if config.format == Format.text:
        _console().print(line, highlight=False, soft_wrap=True, markup=False)


def say_warnings(config: Config, warnings: list[str]) -> None:
    if config.format == Format.text:
        _warn(_console(), warnings)


def _warn(console: Console, warnings: list[str]) -> None:
    for warning in warnings:
        console.print(Text(f"! {warning}", style="yellow"))


def _console() -> Console:
    """Return a console as wide as the terminal, or 120 columns without one."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show_plan(plan: Plan, console: Console, verbose: bool) -> None:
    """Print what runs where, memory against capacity, speed with its basis, choices, warnings."""
    console.print(Panel(_facts(plan), title=f"[bold]{plan.name}[/bold]", title_align="left"))
    rows = []
    for process in plan.processes:
        gpus = ",".join(map(str, process.gpus)) or "CPU"
        command = Text(shlex.join(process.argv), overflow="ellipsis", no_wrap=True)
        rows.append((process.name, process.kind, gpus, command))
    _print(console, "What runs where", ("process", "kind", "GPUs", "command"), rows)
    if plan.memory:
        columns = ("process", "GPUs", "estimated", "of", "share", "parts (GB)")
        _print(console, "Memory of one GPU", columns, _memory(plan))
    if plan.config.chosen and plan.config.speed == Speed.auto:
        title = "Chosen, because you did not set them (speed=off disables this)"
        choices = [
            (c.key, *(json.dumps(v).strip('"') for v in (c.value, c.before)), c.reason)
            for c in plan.config.chosen
        ]
        _print(console, title, ("key", "value", "before", "reason"), choices)
    if plan.faster:
        offers = [(" ".join(o.overrides), f"{o.gain:.2f}x", o.price) for o in plan.faster]
        _print(console, "Faster, if you accept it", ("override", "gain", "price"), offers)
    if verbose:
        plan_json = as_json(plan)
        processes = [{**p, "argv": shlex.join(p["argv"])} for p in plan_json["processes"]]
        content = {"processes": processes, "trainer_args": plan_json["trainer_args"]}
        plain = json.loads(json.dumps(content))  # without shared parts, which become anchors
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    else:
        details = "full command lines, trainer arguments, and every environment variable"
        console.print(f"[dim]verbose=true adds {details} with its reason.[/dim]")
    _warn(console, plan.warnings)


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]
) -> None:
    table = Table(*columns, title=title, title_justify="left", expand=True)
    for row in rows:  # a string could hold markup
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table)


def _memory(plan: Plan) -> Iterator[tuple[str, ...]]:
    entries = {entry.process: entry for entry in reversed(plan.memory)}
    for process in plan.processes:
        if entry := entries.get(process.name):
            gpus = str(len(process.gpus)) if process.gpus else "CPU"
            total, capacity = f"{entry.total_gb:.1f} GB", f"{entry.capacity_gb:.0f} GB"
            parts = ", ".join(f"{name} {size:.3g}" for name, size in entry.parts_gb.items())
            share = f"{entry.total_gb / entry.capacity_gb:.0%}" if entry.capacity_gb else "none"
            share += "" if entry.fits else ", does not fit"
            yield process.name, gpus, total, capacity, share, parts


def _facts(plan: Plan) -> Table:
    config, hardware, runtime = plan.config, plan.config.hardware, plan.config.runtime
    # Without batches, as in a series, the arguments tell what is done.
    has_batches = not (config.method.measures_machine or config.method.exports)
    nodes = f"{runtime.slurm.nodes} nodes of " if runtime.slurm.nodes > 1 else ""
    # Vendors, and hardware.memory_gb, count 2^30 bytes; the planner's tables and torch count 1e9.
    size = f"{hardware.memory_gb:g} GiB ({hardware.memory_gb * GIB:.0f} GB)"
    gpus = f"{hardware.gpus_per_node} x {hardware.product} ({hardware.gfx})"
    rows = {"hardware": f"{nodes}{gpus}, {size} each"}
    if hardware.vendor == Vendor.none:
        instead = "the CPU, instead of " if config.smoke else ""
        rows["hardware"] = f"{instead}{hardware.product}"
    if config.method.uses_model:
        model, millions = config.model, config.model.num_parameters / 1e6
        source = model.path or f"{model.hub_id}@{(model.revision or 'main')[:12]}"
        if not model.path and model.init == Init.random:
            source = "random weights"
        count = f"{millions / 1e3:.3g} billion" if millions >= 1e3 else f"{millions:.3g} million"
        rows["model"] = f"{model.name}, {count} parameters, from {source}"
    if has_batches:
        method = _training(config)
    else:  # the configuration class of a series has the rest
        values = {
            "precision": config.precision.name if config.method.uses_precision else None,
            "adapter": config.adapter.name if config.method.takes_adapter else None,
            **config.method.args,
        }
        shown = [f"{name} {value}" for name, value in values.items() if value is not None]
        method = ", ".join(shown) or "everything it measures"
    rows["method"] = f"{config.method.name}, {method}"
    if has_batches:
        rows["data"] = _data(config)
    if plan.data_cache:
        rows["its rows"] = data_cache.describe_rows(config, plan.data)
    place = f"slurm ({runtime.on_node} on the node)" if runtime.name == "slurm" else runtime.name
    topology, servers = config.topology, ""
    if placement.shares_gpu(config):
        servers = "on one GPU a server and "
    elif topology.servers:
        servers = f"{placement.num_server_gpus(config)} GPU(s) generate, "
    by = "" if topology.strategy == "none" else f" by {topology.strategy}"
    ranks = f"{servers}{placement.num_trainers(config)} rank(s){by}"
    rows["topology"] = f"{topology.name} on {place}: {ranks}"
    if runtime.on_node == "docker":
        image = image_json(config) or {}
        base = f", built on {image['base']}" if "base" in image else ""
        unverified = "" if image.get("verified") else " (unverified)"
        rows["image"] = f"{image.get('reference')}{base}{unverified}"
    if has_batches:
        rows["expected speed"] = _speed(plan)
    if plan.balance:
        rows["balance"] = _balance(plan.balance, batch_counts.batch(config).sequences)
    rows["run directory"] = str(plan.run_dir)
    for name, target in plan.targets.items():
        rows[f"target {name}"] = f"{target.value:g} ({target.source})"
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _training(config: Config) -> str:
    prefix = f"{config.precision.name}, adapter {config.adapter.name}, "
    size = batch_counts.batch(config)
    if not config.method.trains:
        samples = int(argument(config, "samples_per_prompt"))
        each = f", {samples} samples of each" if samples > 1 else ""
        return f"{prefix}{size.per_device} problems at a time{each}"
    split = f"{size.ranks} rank(s) x {size.per_device} x {size.accumulation} accumulated"
    return f"{prefix}{size.sequences} sequences a step ({split}), up to {size.sequence} tokens each"


def _data(config: Config) -> str:
    data = config.data
    if data.kind in ("reasoning", "code"):
        tasks = ", ".join(task.name for task in data.tasks)
        return f"{data.num_train} generated problems of {tasks}; {data.num_heldout} held out"
    if data.sources:
        return "mix of " + ", ".join(f"{s.weight:.4g} {s.path or s.hub_id}" for s in data.sources)
    return f"{data.kind} {data.path or data.heldout_path or data.hub_id}"


def _speed(plan: Plan) -> str:
    speed, plain = plan.speed, plan.plain_speed
    if speed.tokens_per_second is None or speed.step_s is None:
        return f"unknown: {speed.basis}"
    text = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.step_s:.3g} s a step"
    if speed.run_hours is not None:
        text += f", {speed.run_hours:.3g} h"
    if speed.cost is not None:
        text += f", costs {speed.cost:,.2f}"
    if plain and plain.tokens_per_second:
        text += f"; {plain.tokens_per_second:,.0f} tokens/s under speed=off"
    return f"{text} ({speed.basis})"


def _balance(balance: Balance, sequences: int) -> str:
    halves = (
        f"generation {balance.generation_s:.3g} s, training {balance.training_s:.3g} s a step; "
        f"{balance.bound} is the bottleneck; "
    )
    if balance.gain == 1.0:
        return halves + "no other number of servers that fits is predicted to be faster"
    servers = f"topology.servers={balance.servers} is predicted {balance.gain:.2f}x as fast"
    at = f", at {balance.sequences} sequences a step" if balance.sequences != sequences else ""
    return f"{halves}{servers}{at}"


def show_end(config: Config, plan: Plan, exit_code: int) -> None:
    """Print a run's end as one JSON object, or as lines for a person."""
    if config.format == Format.json:
        print(json.dumps(end_json(plan, exit_code), indent=1))
    else:
        say_end(config, plan, exit_code)


def end_json(plan: Plan, exit_code: int) -> dict[str, Any]:
    result = json_files.read_json(plan.run_dir / "result.json") or {}
    return {"run_dir": str(plan.run_dir), "exit_code": exit_code, "result": result}


def say_end(config: Config, plan: Plan, exit_code: int) -> None:
    """Print the results, their targets, and where the files are."""
    result = json_files.read_json(plan.run_dir / "result.json") or {}
    figures = {
        key: value
        for key, value in result.items()
        if type(value) in (int, float) and key != "exit_code"
    }
    line = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    verdicts = {0: "done", 75: "interrupted; the same command resumes it"}
    verdict = verdicts.get(exit_code, f"failed, exit code {exit_code}")
    say(config, f"{plan.name}: {verdict}" + (f" ({line})" if line else ""))
    for name, target in plan.targets.items():
        if name in figures:
            say(config, f"  {name} {figures[name]:.4g}, target {target.value:g} ({target.source})")
    say(config, f"Everything is in {short_path(plan.run_dir)}")


def short_path(path: str | Path) -> str:
    """Return a path relative to the current directory if it lies in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)
