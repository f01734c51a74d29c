"""Print a plan as text before a run, and the few lines after it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
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
from launch.schema.plan import Balance, Memory, Plan
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
    for warning in warnings if config.format == Format.text else ():
        _console().print(Text(f"! {warning}", style="yellow"))


def _console() -> Console:
    """Return a console as wide as the terminal, or 120 columns without one."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show_plan(plan: Plan, console: Console, verbose: bool) -> None:
    """Print what runs where, memory against capacity, speed with its basis, choices, warnings."""
    facts = Table.grid(padding=(0, 2))
    for name, fact in _facts(plan).items():
        facts.add_row(Text(name, style="bold"), Text(fact))
    console.print(Panel(facts, title=f"[bold]{plan.name}[/bold]", title_align="left"))
    chosen = plan.config.chosen if plan.config.speed == Speed.auto else []
    tables: dict[str, list[dict[str, str]]] = {
        "What runs where": [
            {"process": p.name, "kind": p.kind, "GPUs": ",".join(map(str, p.gpus)) or "CPU"}
            | {"command": shlex.join(p.argv)}
            for p in plan.processes
        ],
        "Memory of one GPU": list(map(_memory, {m.process: m for m in plan.memory}.values())),
        "Chosen, because you did not set them (speed=off disables this)": [
            {"key": c.key, "value": json.dumps(c.value), "before": json.dumps(c.before)}
            | {"reason": c.reason}
            for c in chosen
        ],
        "Faster, if you accept it": [
            {"override": " ".join(o.overrides), "gain": f"{o.gain:.2f}x", "price": o.price}
            for o in plan.faster
        ],
    }
    for title, rows in tables.items():
        if rows:
            table = Table(*rows[0], title=title, title_justify="left", expand=True)
            for row in rows:  # a string could hold markup
                table.add_row(*(Text(cell, no_wrap=key == "command") for key, cell in row.items()))
            console.print(table)
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
    say_warnings(plan.config, plan.warnings)


def _memory(entry: Memory) -> dict[str, str]:
    share = f"{entry.total_gb / entry.capacity_gb:.0%}" if entry.capacity_gb else "none"
    return {
        "process": entry.process,
        "estimated": f"{entry.total_gb:.1f} GB",
        "of": f"{entry.capacity_gb:.0f} GB",
        "share": share + ("" if entry.fits else ", does not fit"),
        "parts (GB)": ", ".join(f"{name} {size:.3g}" for name, size in entry.parts_gb.items()),
    }


def _facts(plan: Plan) -> dict[str, str]:
    config, hardware, model = plan.config, plan.config.hardware, plan.config.model
    runtime, topology, data = plan.config.runtime, plan.config.topology, plan.config.data
    # Vendors, and hardware.memory_gb, count 2^30 bytes; the planner's tables and torch count 1e9.
    size = f"{hardware.memory_gb:g} GiB ({hardware.memory_gb * GIB:.0f} GB)"
    gpus = f"{hardware.gpus_per_node} x {hardware.product} ({hardware.gfx}), {size} each"
    nodes = f"{runtime.slurm.nodes} nodes of " if runtime.slurm.nodes > 1 else ""
    on_cpu = f"{'the CPU, instead of ' * config.smoke}{hardware.product}"
    facts = {"hardware": on_cpu if hardware.vendor == Vendor.none else f"{nodes}{gpus}"}
    if config.method.uses_model:
        source = model.path or f"{model.hub_id}@{(model.revision or 'main')[:12]}"
        if not model.path and model.init == Init.random:
            source = "random weights"
        millions = model.num_parameters / 1e6
        size = f"{millions / 1e3:.3g} billion" if millions >= 1e3 else f"{millions:.3g} million"
        facts["model"] = f"{model.name}, {size} parameters, from {source}"
    # Without batches, as in a series, the arguments tell what is done.
    if config.method.measures_machine or config.method.exports:
        values = [f"{name} {v}" for name, v in config.method.args.items() if v is not None]
        facts["method"] = ", ".join([config.method.name, *values])
    else:
        facts["method"] = f"{config.method.name}, {config.precision.name}, "
        facts["method"] += f"adapter {config.adapter.name}, {_batch(config)}"
        tasks = ", ".join(task.name for task in data.tasks)
        mix = ", ".join(f"{s.weight:.4g} {s.path or s.hub_id}" for s in data.sources)
        is_generated = data.kind in ("reasoning", "code")
        rows = f"{data.num_train} generated problems of {tasks}; {data.num_heldout} held out"
        files = mix or data.path or data.heldout_path or data.hub_id
        facts["data"] = rows if is_generated else f"{data.kind} {files}"
        facts["expected speed"] = _speed(plan)
    if plan.data_cache:
        preview = "the same command with data.preview=5 instead of mode=plan"
        unknown = f"not prepared yet; {preview} shows lengths, cuts and packing"
        facts["its rows"] = data_cache.describe_rows(plan.data) if plan.data else unknown
    servers = f"{placement.num_server_gpus(config)} GPU(s) generate, " if topology.servers else ""
    ranks = f"{placement.num_trainers(config)} rank(s)"
    ranks += f" by {topology.strategy}" if topology.strategy != "none" else ""
    place = f"slurm ({runtime.on_node} on the node)" if runtime.name == "slurm" else runtime.name
    facts["topology"] = f"{topology.name} on {place}: {servers}{ranks}"
    if image := image_json(config):
        unverified = "" if image["verified"] else " (unverified)"
        facts["image"] = f"{image['reference']}, built on {image.get('base', '?')}{unverified}"
    if plan.balance:
        facts["balance"] = _balance(plan.balance, batch_counts.batch(config).sequences)
    facts["run directory"] = str(plan.run_dir)
    targets = plan.targets.items()
    return facts | {f"target {name}": f"{t.value:g} ({t.source})" for name, t in targets}


def _batch(config: Config) -> str:
    size = batch_counts.batch(config)
    if not config.method.trains:
        samples = int(argument(config, "samples_per_prompt"))
        return f"{size.per_device} problems at a time, {samples} sample(s) of each"
    split = f"{size.ranks} rank(s) x {size.per_device} x {size.accumulation} accumulated"
    return f"{size.sequences} sequences per step ({split}), up to {size.sequence} tokens each"


def _speed(plan: Plan) -> str:
    speed, plain = plan.speed, plan.plain_speed
    if speed.tokens_per_second is None or speed.step_s is None:
        return f"unknown: {speed.basis}"
    text = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.step_s:.3g} s per step"
    text += f", {speed.run_hours:.3g} h" if speed.run_hours is not None else ""
    text += f", costs {speed.cost:,.2f}" if speed.cost is not None else ""
    if plain and plain.tokens_per_second:
        text += f"; {plain.tokens_per_second:,.0f} tokens/s under speed=off"
    return f"{text} ({speed.basis})"


def _balance(balance: Balance, sequences: int) -> str:
    halves = (
        f"generation {balance.generation_s:.3g} s, training {balance.training_s:.3g} s per step; "
        f"{balance.bound} is the bottleneck; "
    )
    if balance.gain == 1.0:
        return halves + "no other number of servers that fits is predicted to be faster"
    servers = f"topology.servers={balance.servers} is predicted {balance.gain:.2f}x as fast"
    at = f", at {balance.sequences} sequences per step" if balance.sequences != sequences else ""
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
