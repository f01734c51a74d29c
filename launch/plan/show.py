"""Print a plan as text before a run, and the few lines after it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.core import json_files
from launch.estimate import batch
from launch.machine import placement
from launch.machine.gpu import GIB
from launch.plan import data_cache
from launch.plan.views import image_json
from launch.schema import Config
from launch.schema.enums import Format, Speed, Vendor
from launch.schema.plan import Balance, ContainerSpec, Memory, Plan, Process
from launch.schema.trainer_args import argument


def show(config: Config, as_json: Callable[[], dict[str, Any]], *plans: Plan) -> None:
    """Print the plans as one JSON object, or as a page for each run."""
    if config.format == Format.json:
        print(json.dumps(as_json(), indent=1))
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
    console.print(_processes(plan))
    if plan.memory:
        console.print(_memory(plan))
    if plan.config.chosen and plan.config.speed == Speed.auto:
        console.print(_chosen(plan))
    if plan.faster:
        console.print(_faster(plan))
    if verbose:
        for process in plan.processes:
            console.print(_details(plan, process))
            if process.name in plan.containers:
                console.print(_container(plan.containers[process.name]))
    else:
        details = "full command lines, trainer arguments, and every environment variable"
        console.print(f"[dim]verbose=true adds {details} with its reason.[/dim]")
    _warn(console, plan.warnings)


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
        rows["hardware"] = hardware.product
        if config.smoke:
            rows["hardware"] = f"the CPU, instead of {hardware.product}"
    if config.method.uses_model:
        count = _count(config.model.num_parameters)
        rows["model"] = f"{config.model.name}, {count} parameters, from {_source(config)}"
    rows["method"] = (
        f"{config.method.name}, {_training(config) if has_batches else _arguments(config)}"
    )
    if has_batches:
        rows["data"] = _data(config)
    if plan.data_cache:
        rows["its rows"] = data_cache.said(config, plan.data)
    place = f"slurm ({runtime.on_node} on the node)" if runtime.name == "slurm" else runtime.name
    rows["topology"] = f"{config.topology.name} on {place}: {_spread(config)}"
    if runtime.on_node == "docker":
        image = image_json(config) or {}
        base = f", built on {image['base']}" if "base" in image else ""
        unverified = "" if image.get("verified") else " (unverified)"
        rows["image"] = f"{image.get('reference')}{base}{unverified}"
    if has_batches:
        rows["expected speed"] = _speed(plan)
    if plan.balance:
        rows["balance"] = _balance(plan.balance, batch.batch(config).sequences)
    rows["run directory"] = str(plan.run_dir)
    for name, target in plan.targets.items():
        rows[f"target {name}"] = f"{target.value:g} ({target.source})"
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _arguments(config: Config) -> str:
    """Return the arguments of a series; its configuration class has the rest."""
    values = {
        "precision": config.precision.name if config.method.uses_precision else None,
        "adapter": config.adapter.name if config.method.takes_adapter else None,
        **config.method.args,
    }
    shown = [f"{name} {value}" for name, value in values.items() if value is not None]
    return ", ".join(shown) or "everything it measures"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _source(config: Config) -> str:
    model = config.model
    if model.path:
        return model.path
    if model.init.name == "random":
        return "random weights"
    return f"{model.hub_id}@{(model.revision or 'main')[:12]}"


def _training(config: Config) -> str:
    prefix = f"{config.precision.name}, adapter {config.adapter.name}, "
    size = batch.batch(config)
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


def _spread(config: Config) -> str:
    servers, strategy = "", config.topology.strategy
    if placement.shares_gpu(config):
        servers = "on one GPU a server and "
    elif config.topology.servers:
        servers = f"{placement.num_server_gpus(config)} GPU(s) generate, "
    ranks = f"{servers}{placement.num_trainers(config)} rank(s)"
    return ranks if strategy == "none" else f"{ranks} by {strategy}"


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


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", expand=True)


def _processes(plan: Plan) -> Table:
    table = _table("What runs where", "process", "kind", "GPUs", "command")
    for process in plan.processes:
        gpus = ",".join(map(str, process.gpus)) or "CPU"
        command = Text(shlex.join(process.argv), overflow="ellipsis", no_wrap=True)
        table.add_row(process.name, process.kind, gpus, command)
    return table


def _memory(plan: Plan) -> Table:
    table = _table("Memory of one GPU", "process", "GPUs", "estimated", "of", "", "parts (GB)")
    entries = {entry.process: entry for entry in reversed(plan.memory)}
    for process in plan.processes:
        if entry := entries.get(process.name):
            gpus = str(len(process.gpus)) if process.gpus else "CPU"
            total, capacity = f"{entry.total_gb:.1f} GB", f"{entry.capacity_gb:.0f} GB"
            parts = ", ".join(f"{name} {size:.3g}" for name, size in entry.parts_gb.items())
            table.add_row(process.name, gpus, total, capacity, _bar(entry), parts)
    return table


def _bar(entry: Memory) -> Text:
    share = entry.total_gb / entry.capacity_gb
    filled = min(10, round(10 * share))
    bar = "█" * filled + "░" * (10 - filled) + f" {share:.0%}"
    return Text(bar, style="green") if entry.fits else Text(f"{bar} does not fit", style="red")


def _chosen(plan: Plan) -> Table:
    title = "Chosen, because you did not set them (speed=off disables this)"
    table = _table(title, "key", "value", "before", "reason")
    for choice in plan.config.chosen:
        value, before = (
            str(v).lower() if isinstance(v, bool) else "" if v is None else str(v)
            for v in (choice.value, choice.before)
        )
        table.add_row(choice.key, value, before, Text(choice.reason))
    return table


def _faster(plan: Plan) -> Table:
    table = _table("Faster, if you accept it", "override", "gain", "price")
    for offer in plan.faster:
        table.add_row(" ".join(offer.overrides), f"{offer.gain:.2f}x", Text(offer.price))
    return table


def _details(plan: Plan, process: Process) -> Group:
    container = plan.containers.get(process.name)
    env = container.environment if container else process.env
    table = Table("variable", "value", "origin", "reason [source]", expand=True)
    for setting in process.settings:
        table.add_row(setting.name, env[setting.name], setting.origin, Text(setting.reason))
    name, command = Text(f"\n{process.name}", style="bold"), Text(shlex.join(process.argv))
    if process.kind in ("server", "verifier"):
        return Group(name, command, table)
    arguments = ", ".join(f"{key}={value}" for key, value in sorted(plan.trainer_args.items()))
    return Group(name, command, table, Text(f"trainer arguments: {arguments}"))


def _container(spec: ContainerSpec) -> Table:
    """Return a table of the container's settings, each with its reason."""
    table = Table("container", spec.name, "reason", expand=True)
    for node, why in spec.devices.items():
        table.add_row("device", node, why)
    for mount in spec.mounts:
        table.add_row("read-only" if mount.read_only else "writable", mount.source, mount.reason)
    user = "you, so every file it leaves belongs to you"
    if confinement := spec.confinement:
        user, limits = "nobody", f"{confinement.pids}, {confinement.cpus:g}"
        workers = "method.sandbox.workers: each runs one job at a time"
        table.add_row("containers", str(confinement.copies), workers)
        table.add_row(
            "read-only", "/", "all but /tmp, which is in memory and emptied after each test"
        )
        table.add_row("processes, cores", limits, "of each")
    table.add_row("user", spec.user, user)
    lists = {"group": spec.groups, "security": spec.security_opt, "secret": spec.secrets}
    for label, values in lists.items():
        for value in values:
            table.add_row(label, value, "")
    table.add_row("network, IPC", f"{spec.network}, {spec.ipc}", f"/dev/shm of {spec.shm_gb:g} GB")
    limit = "unlimited" if spec.memory_gb is None else f"{spec.memory_gb:g} GB"
    locked = "unlimited" if spec.memlock else "as the engine sets it"
    table.add_row("memory", limit, f"locked memory {locked}")
    table.add_row("stop", f"{spec.stop_timeout_s} s", "from SIGTERM to SIGKILL: time to save")
    return table


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
