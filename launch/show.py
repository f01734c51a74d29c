"""The text plan: a page a person reads before a run, and the few lines after it."""

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

from launch import batch, topology
from launch.files import data_cache, rundir
from launch.machine.gpu import GIB
from launch.plan import Plan, image_json
from launch.planner.balance import Balance
from launch.planner.memory import Memory
from launch.runtimes.container import Confinement, ContainerSpec
from launch.schema import Config
from launch.schema.enums import Format, Speed, Vendor
from launch.supervision import serving
from launch.trainer_args import argument


def show(config: Config, as_json: Callable[[], dict[str, Any]], *plans: Plan) -> None:
    """The plan on stdout: one JSON object, or a page for each run."""
    if config.format == Format.json:
        print(json.dumps(as_json(), indent=1))
        return
    console = _console()
    for plan in plans:
        show_plan(plan, console, config.verbose)


def show_start(config: Config, plan: Plan, image: dict[str, Any] | None, resumed: bool) -> None:
    """The page before a run, what its image was really built on, and what it continues."""
    if config.format == Format.text:
        show_plan(plan, _console(), config.verbose)
    planned, built = (image_json(plan.config) or {}).get("base"), ((image or {}).get("base") or {}).get("name")
    if planned and built != planned.partition("@")[0]:
        say(config, f"! the image here was built on {built}, in place of {planned}.")
    if resumed:
        say(config, f"Continues {_short(plan.run_dir)}; resume=never starts afresh.")


def say(config: Config, line: str) -> None:
    """A line for a person: on stdout, which format=json keeps for JSON."""
    if config.format == Format.text:
        _console().print(line, highlight=False, soft_wrap=True, markup=False)


def say_warnings(config: Config, warnings: list[str]) -> None:
    if config.format == Format.text:
        _warn(_console(), warnings)


def _warn(console: Console, warnings: list[str]) -> None:
    for warning in warnings:
        console.print(Text(f"! {warning}", style="yellow"))


def _console() -> Console:
    """As wide as the terminal; 120 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show_plan(plan: Plan, console: Console, verbose: bool) -> None:
    """Hardware, model, method, what runs where, memory against capacity, speed with its basis, warnings."""
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
        console.print("[dim]verbose=true adds full command lines, trainer arguments, and every environment variable with its reason.[/dim]")
    _warn(console, plan.warnings)


def _facts(plan: Plan) -> Table:
    config, hardware = plan.config, plan.config.hardware
    measures = config.method.kind in ("bench", "tune", "exporter")  # a series, or no batches: the arguments say what is done
    model = f"{config.model.name}, {_count(config.model.num_parameters)} parameters, from {_source(plan)}"
    rows = {
        "hardware": f"{_nodes(config)}{hardware.gpus_per_node} x {hardware.product} ({hardware.gfx}), {_size(hardware.memory_gb)} each",
        **({"model": model} if config.method.uses_model else {}),
        "method": f"{config.method.name}, " + (_arguments(plan) if measures else _training(plan)),
        **({} if measures else {"data": _data(plan)}),
        **({"its rows": data_cache.said(config, plan.data)} if plan.data_cache else {}),
        "topology": f"{config.topology.name} on {_runtime(config)}: {_spread(plan)}",
        **({"image": _image(plan)} if config.runtime.on_node == "docker" else {}),
        **({} if measures else {"expected speed": _speed(plan)}),
        **({"balance": _balance(plan.balance, batch.batch(config).sequences)} if plan.balance else {}),
        "run directory": str(plan.run_dir),
    }
    if hardware.vendor == Vendor.none:
        rows["hardware"] = hardware.product if not config.smoke else f"the CPU, in place of {hardware.product}"
    rows |= {f"target {name}": f"{target.value:g} ({target.source})" for name, target in plan.targets.items()}
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _size(memory_gb: float) -> str:
    """Both units: makers' figures, and hardware.memory_gb, count 2^30 bytes; the planner, like torch's peak in our tables, 1e9."""
    return f"{memory_gb:g} GiB ({memory_gb * GIB:.0f} GB)"


def _training(plan: Plan) -> str:
    return f"{plan.config.precision.name}, adapter {plan.config.adapter.name}, {_batch(plan)}"


def _arguments(plan: Plan) -> str:
    """What was asked of a series; the rest is said by its configuration class."""
    config = plan.config
    kept = {"precision": config.precision.name if config.method.uses_precision else None}
    kept |= {"adapter": config.adapter.name if config.method.takes_adapter else None, **config.method.args}
    return ", ".join(f"{name} {value}" for name, value in kept.items() if value is not None) or "all that it measures"


def _nodes(config: Config) -> str:
    nodes = config.runtime.slurm.nodes
    return f"{nodes} nodes of " if nodes > 1 else ""


def _runtime(config: Config) -> str:
    return f"slurm ({config.runtime.on_node} on the node)" if config.runtime.name == "slurm" else config.runtime.name


def _image(plan: Plan) -> str:
    found = image_json(plan.config) or {}
    base = f", built on {found['base']}" if "base" in found else ""
    return f"{found.get('reference')}{base}" + ("" if found.get("verified") else " (unverified)")


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _source(plan: Plan) -> str:
    model = plan.config.model
    if model.path:
        return model.path
    return "random weights" if model.init.name == "random" else f"{model.hub_id}@{(model.revision or 'main')[:12]}"


def _batch(plan: Plan) -> str:
    size = batch.batch(plan.config)
    if plan.config.method.kind != "trainer":
        samples = int(argument(plan.config, "samples_per_prompt"))
        return f"{size.per_device} problems at a time" + (f", {samples} samples of each" if samples > 1 else "")
    split = f"{size.ranks} rank(s) x {size.per_device} x {size.accumulation} accumulated"
    return f"{size.sequences} sequences a step ({split}), up to {size.sequence} tokens each"


def _data(plan: Plan) -> str:
    data = plan.config.data
    if data.kind in ("reasoning", "code"):
        return f"{data.num_train} generated problems of {', '.join(t.name for t in data.tasks)}; {data.num_heldout} held out"
    if data.sources:
        return "mix of " + ", ".join(f"{s.weight:.4g} {s.path or s.hub_id}" for s in data.sources)
    return f"{data.kind} {data.path or data.heldout_path or data.hub_id}"


def _spread(plan: Plan) -> str:
    strategy, servers = plan.config.topology.strategy, ""
    if serving.shares_gpu(plan.config):
        servers = "on one GPU a server and "
    elif plan.config.topology.servers:
        servers = f"{topology.num_server_gpus(plan.config)} GPU(s) generate, "
    return f"{servers}{topology.num_trainers(plan.config)} rank(s)" + (f" by {strategy}" if strategy != "none" else "")


def _speed(plan: Plan) -> str:
    if plan.speed.tokens_per_second is None or plan.speed.step_s is None:
        return f"unknown: {plan.speed.basis}"
    found = f"{plan.speed.tokens_per_second:,.0f} tokens/s, {plan.speed.step_s:.3g} s a step"
    if plan.speed.run_hours is not None:
        found += f", {plan.speed.run_hours:.3g} h"
    if plan.speed.cost is not None:
        found += f", costs {plan.speed.cost:,.2f}"
    plain = plan.plain_speed and plan.plain_speed.tokens_per_second
    if plain:
        found += f"; {plain:,.0f} tokens/s under speed=off"
    return f"{found} ({plan.speed.basis})"


def _balance(found: Balance, sequences: int) -> str:
    halves = f"generation {found.generation_s:.3g} s, training {found.training_s:.3g} s a step: {found.bound} is the bound; "
    if found.gain == 1.0:
        return halves + "no other number of servers that fits is predicted to be faster"
    steps = f", at {found.sequences} sequences a step" if found.sequences != sequences else ""
    return f"{halves}topology.servers={found.servers} is predicted {found.gain:.2f}x as fast{steps}"


def _processes(plan: Plan) -> Table:
    table = Table("process", "kind", "GPUs", "command", title="What runs where", title_justify="left", expand=True)
    for process in plan.processes:
        gpus = ",".join(map(str, process.gpus)) or "CPU"
        table.add_row(process.name, process.kind, gpus, Text(shlex.join(process.argv), overflow="ellipsis", no_wrap=True))
    return table


def _memory(plan: Plan) -> Table:
    table = Table("process", "GPUs", "estimated", "of", "", "parts (GB)", title="Memory of one GPU", title_justify="left", expand=True)
    for process in plan.processes:
        entry = next((m for m in plan.memory if m.process == process.name), None)
        if entry is None:
            continue
        parts = ", ".join(f"{name} {size:.3g}" for name, size in entry.parts_gb.items())
        gpus = str(len(process.gpus)) if process.gpus else "CPU"
        table.add_row(process.name, gpus, f"{entry.total_gb:.1f} GB", f"{entry.capacity_gb:.0f} GB", _bar(entry), parts)
    return table


def _chosen(plan: Plan) -> Table:
    title = "Chosen: nobody gave these; speed=off leaves them"
    table = Table("key", "value", "before", "reason", title=title, title_justify="left", expand=True)
    for choice in plan.config.chosen:
        value, before = (str(v).lower() if isinstance(v, bool) else str(v) for v in (choice.value, choice.before))
        table.add_row(choice.key, value, "" if choice.before is None else before, Text(choice.reason))
    return table


def _faster(plan: Plan) -> Table:
    table = Table("override", "gain", "price", title="Faster, if you accept it", title_justify="left", expand=True)
    for offer in plan.faster:
        table.add_row(" ".join(offer.overrides), f"{offer.gain:.2f}x", Text(offer.price))
    return table


def _bar(entry: Memory) -> Text:
    share = entry.total_gb / entry.capacity_gb
    filled = min(10, round(10 * share))
    verdict = f" {share:.0%}" if entry.fits else f" {share:.0%} does not fit"
    return Text("█" * filled + "░" * (10 - filled) + verdict, style="green" if entry.fits else "red")


def _details(plan: Plan, process: topology.Process) -> Group:
    given = plan.containers[process.name].environment if process.name in plan.containers else process.env
    table = Table("variable", "value", "origin", "reason [source]", expand=True)
    for setting in process.settings:
        table.add_row(setting.name, given[setting.name], setting.origin, Text(setting.reason))
    arguments = Text("trainer arguments: " + ", ".join(f"{k}={v}" for k, v in sorted(plan.trainer_args.items())))
    parts: list[Any] = [Text(f"\n{process.name}", style="bold"), Text(shlex.join(process.argv)), table]
    return Group(*parts, *([] if process.kind in ("server", "verifier") else [arguments]))


def _container(spec: ContainerSpec) -> Table:
    """What the container is given, each with its reason."""
    table = Table("container", spec.name, "reason", expand=True)
    for node, why in spec.devices.items():
        table.add_row("device", node, why)
    for mount in spec.mounts:
        table.add_row("read-only" if mount.read_only else "writable", mount.source, mount.reason)
    if spec.confinement:
        _add_confinement(table, spec.confinement)
    table.add_row("user", spec.user, "nobody" if spec.confinement else "yours: every file it leaves belongs to you")
    for label, values in (("group", spec.groups), ("security", spec.security_opt), ("secret", spec.secrets)):
        for value in values:
            table.add_row(label, value, "")
    table.add_row("network, IPC", f"{spec.network}, {spec.ipc}", f"/dev/shm of {spec.shm_gb:g} GB")
    limit = "unlimited" if spec.memory_gb is None else f"{spec.memory_gb:g} GB"
    table.add_row("memory", limit, f"locked memory {'unlimited' if spec.memlock else 'as the engine sets it'}")
    table.add_row("stop", f"{spec.stop_timeout_s} s", "from SIGTERM to SIGKILL: time to save")
    return table


def _add_confinement(table: Table, confinement: Confinement) -> None:
    table.add_row("containers", str(confinement.copies), "method.sandbox.workers: each runs one job at a time")
    table.add_row("read-only", "/", "all but /tmp, which is memory and emptied after each test")
    table.add_row("processes, cores", f"{confinement.pids}, {confinement.cpus:g}", "of each")


def show_end(config: Config, plan: Plan, exit_code: int) -> None:
    """A run's end on stdout: one JSON object, or lines for a person."""
    if config.format == Format.json:
        print(json.dumps(end_json(plan, exit_code), indent=1))
    else:
        say_end(config, plan, exit_code)


def end_json(plan: Plan, exit_code: int) -> dict[str, Any]:
    return {"run_dir": str(plan.run_dir), "exit_code": exit_code, "result": rundir.read_json(plan.run_dir / "result.json") or {}}


def say_end(config: Config, plan: Plan, exit_code: int) -> None:
    """One line of results, targets beside them, one line that says where everything is."""
    result = rundir.read_json(plan.run_dir / "result.json") or {}
    figures = {k: v for k, v in result.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "exit_code"}
    line = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    verdict = {0: "done", 75: "interrupted; the same command resumes it"}.get(exit_code, f"failed, exit code {exit_code}")
    say(config, f"{plan.name}: {verdict}" + (f" ({line})" if line else ""))
    for name, target in plan.targets.items():
        if name in figures:
            say(config, f"  {name} {figures[name]:.4g}, target {target.value:g} ({target.source})")
    say(config, f"Everything is in {_short(plan.run_dir)}")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
