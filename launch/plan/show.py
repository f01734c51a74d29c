"""Print the plan before a run and the results after it."""

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
from launch.plan.views import as_json, at_steps, image_json
from launch.schema import Config
from launch.schema.data import Data
from launch.schema.enums import Format, Init, SpeedMode, Vendor
from launch.schema.plan import Balance, Plan
from launch.schema.trainer_args import value_or_none


def show(config: Config, content: Callable[[], dict[str, Any]], *plans: Plan) -> None:
    """Print `content` as JSON under format=json, otherwise each plan as text."""
    if config.format == Format.json:
        print(json.dumps(content(), indent=1))
        return
    console = _console()
    for plan in plans:
        show_plan(plan, console, config.verbose)


def show_start(config: Config, plan: Plan, image: dict[str, Any] | None, resumed: bool) -> None:
    """Print the plan, and notes on an image with another base and on a resumed run.

    `image` describes the image that this machine has.
    """
    if config.format == Format.text:
        show_plan(plan, _console(), config.verbose)
    planned_base = (image_json(plan.config) or {}).get("base")
    base = ((image or {}).get("base") or {}).get("name")
    if planned_base and base != planned_base.partition("@")[0]:
        say(config, f"! The image on this machine is based on {base}, not on {planned_base}.")
    if resumed:
        say(config, f"Resuming {short_path(plan.run_dir)}; resume=never starts afresh.")


def say(config: Config, line: str) -> None:
    """Print a line, except under format=json, which reserves stdout for JSON."""
    if config.format == Format.text:
        _console().print(line, highlight=False, soft_wrap=True, markup=False)


def print_warnings(config: Config, warnings: list[str]) -> None:
    for warning in warnings if config.format == Format.text else ():
        _console().print(Text(f"! {warning}", style="yellow"))


def _console() -> Console:
    """Return a console as wide as the terminal, or with 120 columns without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show_plan(plan: Plan, console: Console, verbose: bool) -> None:
    """Print the plan's facts, then tables of processes, memory and choices, then its warnings."""
    facts = Table.grid(padding=(0, 2))
    for name, fact in _facts(plan).items():
        facts.add_row(Text(name, style="bold"), Text(fact))
    console.print(Panel(facts, title=f"[bold]{plan.name}[/bold]", title_align="left"))
    chosen = plan.config.chosen if plan.config.speed == SpeedMode.auto else []
    tables: dict[str, list[dict[str, str]]] = {
        "Processes": [
            {"process": p.name, "kind": p.kind, "GPUs": ",".join(map(str, p.gpus)) or "CPU"}
            | {"command": shlex.join(p.argv)}
            for p in plan.processes
        ],
        "Memory per GPU": [
            {"process": m.process, "estimated": f"{m.total_gb:.1f} GB"}
            | {"of": f"{m.capacity_gb:.0f} GB"}
            | {"share": f"{m.total_gb / m.capacity_gb:.0%}" if m.capacity_gb else "none"}
            | {"fits": "yes" if m.fits else "no"}
            | {"parts (GB)": ", ".join(f"{name} {gb:.3g}" for name, gb in m.parts_gb.items())}
            for m in {m.process: m for m in plan.memory}.values()
        ],
        "Chosen for speed, because you did not set them (speed=off disables this)": [
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
            for row in rows:  # Text, because a plain string could contain markup
                table.add_row(*(Text(cell, no_wrap=key == "command") for key, cell in row.items()))
            console.print(table)
    if verbose:
        plan_json = as_json(plan)
        processes = [{**p, "argv": shlex.join(p["argv"])} for p in plan_json["processes"]]
        content = {"processes": processes, "trainer_args": plan_json["trainer_args"]}
        content = json.loads(json.dumps(content))  # a copy without aliases, for readable YAML
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    else:
        details = "command lines in full, trainer arguments, and environment variables with reasons"
        console.print(f"[dim]verbose=true shows {details}.[/dim]")
    print_warnings(plan.config, plan.warnings)


def _facts(plan: Plan) -> dict[str, str]:
    """Return the (label, text) lines at the top of a plan."""
    config, hardware, model = plan.config, plan.config.hardware, plan.config.model
    runtime, topology, data = plan.config.runtime, plan.config.topology, plan.config.data
    # hardware.memory_gb is in GiB, as vendors state it. The planner and torch use 1e9 bytes.
    size = f"{hardware.memory_gb:g} GiB ({hardware.memory_gb * GIB:.0f} GB)"
    gpus = f"{hardware.gpus_per_node} x {hardware.product} ({hardware.gfx}), {size} each"
    nodes = f"{runtime.slurm.nodes} nodes of " if runtime.slurm.nodes > 1 else ""
    cpu = f"{'the CPU, instead of ' * config.smoke}{hardware.product}"
    facts = {"hardware": cpu if hardware.vendor == Vendor.none else f"{nodes}{gpus}"}
    if config.method.uses_model:
        source = model.path or f"{model.hub_id}@{(model.revision or 'main')[:12]}"
        if not model.path and model.init == Init.random:
            source = "random weights"
        millions = model.num_parameters / 1e6
        size = f"{millions / 1e3:.3g} billion" if millions >= 1e3 else f"{millions:.3g} million"
        facts["model"] = f"{model.name}, {size} parameters, from {source}"
    if config.method.measures_machine or config.method.exports:  # neither has batches or data
        values = [f"{name} {v}" for name, v in config.method.args.items() if v is not None]
        facts["method"] = ", ".join([config.method.name, *values])
    else:
        facts["method"] = f"{config.method.name}, {config.precision.name}, "
        facts["method"] += f"adapter {config.adapter.name}, {_batch(config)}"
        tasks = _tasks(data)
        mix = ", ".join(f"{s.weight:.4g} {s.path or s.hub_id}" for s in data.sources)
        is_generated = data.kind in ("reasoning", "code")
        rows = f"{data.num_train} generated problems of {tasks}; {data.num_heldout} held out"
        files = mix or data.path or data.heldout_path or data.hub_id
        facts["data"] = rows if is_generated else f"{data.kind} {files}"
        if config.method.rewards:
            rewards = (f"{weight:g} {name}" for name, weight in config.method.rewards.items())
            facts["rewards"] = " + ".join(rewards)
        facts["expected speed"] = _speed(plan)
    if plan.data_cache:
        unknown = "not prepared yet; data.preview=5 instead of mode=plan shows them"
        facts["rows"] = data_cache.describe_rows(plan.data) if plan.data else unknown
    servers = f"{placement.num_server_gpus(config)} GPU(s) generate, " if topology.servers else ""
    ranks = f"{placement.num_trainers(config)} rank(s)"
    ranks += f" with {topology.strategy}" if topology.strategy != "none" else ""
    place = f"slurm ({runtime.on_node} on the node)" if runtime.name == "slurm" else runtime.name
    facts["topology"] = f"{topology.name} on {place}: {servers}{ranks}"
    if image := image_json(config):
        unverified = "" if image["verified"] else " (unverified)"
        facts["image"] = f"{image['reference']}, based on {image.get('base', '?')}{unverified}"
    if plan.balance:
        facts["balance"] = _balance(plan.balance, batch_counts.batch(config).sequences)
    facts["run directory"] = str(plan.run_dir)
    targets = plan.targets.items()
    return facts | {f"target {name}": f"{t.value:g} ({t.source})" for name, t in targets}


def _tasks(data: Data) -> str:
    """Return the tasks with their levels, if they have any, such as `countdown (levels 0, 1)`."""
    levels: dict[str, list[int]] = {}
    for task in data.tasks:
        levels.setdefault(task.name, []).append(task.level)
    return ", ".join(
        f"{name} (level{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))})"
        for name, numbers in levels.items()
    )


def _batch(config: Config) -> str:
    batch = batch_counts.batch(config)
    if not config.method.trains:
        samples = int(value_or_none(config, "samples_per_prompt"))
        return f"{batch.per_device} problems at a time, {samples} sample(s) of each"
    factors = f"{batch.ranks} rank(s) x {batch.per_device} x {batch.accumulation} accumulated"
    return f"{batch.sequences} sequences per step ({factors}), up to {batch.sequence} tokens each"


def _speed(plan: Plan) -> str:
    speed, plain = plan.speed, plan.plain_speed
    if speed.tokens_per_second is None or speed.step_s is None:
        return f"unknown: {speed.basis}"
    text = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.step_s:.3g} s per step"
    text += f", {speed.run_hours:.3g} h" if speed.run_hours is not None else ""
    text += f", cost {speed.cost:,.2f}" if speed.cost is not None else ""
    if plain and plain.tokens_per_second:
        text += f"; {plain.tokens_per_second:,.0f} tokens/s under speed=off"
    return f"{text} ({speed.basis})"


def _balance(balance: Balance, sequences: int) -> str:
    """Describe where a step's time goes and the fastest split; a step has `sequences` sequences."""
    halves = (
        f"generation {balance.generation_s:.3g} s, training {balance.training_s:.3g} s per step; "
        f"{balance.bound} is the bottleneck; "
    )
    if balance.gain == 1.0:
        return halves + "no other number of servers that fits is predicted to be faster"
    servers = f"topology.servers={balance.servers} is predicted to be {balance.gain:.2f}x as fast"
    at = f", at {balance.sequences} sequences per step" if balance.sequences != sequences else ""
    return f"{halves}{servers}{at}"


def show_end(config: Config, plan: Plan, exit_code: int) -> None:
    """Print a run's end: one JSON object under format=json, otherwise text."""
    if config.format == Format.json:
        print(json.dumps(end_json(plan, exit_code), indent=1))
    else:
        say_end(config, plan, exit_code)


def end_json(plan: Plan, exit_code: int) -> dict[str, Any]:
    result = json_files.read_json(plan.run_dir / "result.json") or {}
    return {"run_dir": str(plan.run_dir), "exit_code": exit_code, "result": result}


def say_end(config: Config, plan: Plan, exit_code: int) -> None:
    """Print the run's status, its results next to their targets, and its directory."""
    result = json_files.read_json(plan.run_dir / "result.json") or {}
    figures = {
        key: value
        for key, value in result.items()
        if type(value) in (int, float) and key != "exit_code"
    }
    results = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    statuses = {0: "done", 75: "interrupted; the same command resumes it"}
    status = statuses.get(exit_code, f"failed, exit code {exit_code}")
    say(config, f"{plan.name}: {status}" + (f" ({results})" if results else ""))
    figures |= at_steps(plan.targets, json_files.read_metrics(plan.run_dir / "metrics.jsonl"))
    for name, target in plan.targets.items():
        if name in figures:
            say(config, f"  {name} {figures[name]:.4g}, target {target.value:g} ({target.source})")
    say(config, f"Everything is in {short_path(plan.run_dir)}")


def short_path(path: str | Path) -> str:
    """Return a path in the current directory as a relative path, and any other path unchanged."""
    cwd = Path.cwd()
    return str(Path(path).relative_to(cwd) if Path(path).is_relative_to(cwd) else path)
