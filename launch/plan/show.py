"""Print the plan before a run and the results after it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.config.request import Request
from launch.core import json_files
from launch.machine.detect import Host
from launch.plan import next_steps, plan_page
from launch.plan.next_steps import short_path
from launch.plan.views import at_steps, image_json
from launch.schema import Config
from launch.schema.enums import Format
from launch.schema.plan import Plan

# How a run's end shows figures of result.json; it shows others by name.
UNITS = {
    "steps": "{digits} steps",
    "accuracy": "accuracy {value:.1%}",
    "pass_rate": "pass rate {value:.1%}",
    "mfu": "MFU {value:.1%}",
    "tokens_per_second": "{digits} tokens/s",
    "tflops_per_gpu": "{digits} TFLOPS per GPU",
    "memory_peak_gb": "peak {digits} GB",
    "step_s": "{digits} s per step",
    "time_s": "{digits} s",
}
# Figures of result.json that the line leaves out, because others say the same.
UNSHOWN = ("exit_code", "training_hours", "tokens_per_second_per_gpu")


def show(
    config: Config, content: Callable[[], dict[str, Any]], lines: Callable[[], list[str]]
) -> None:
    """Print `content` as JSON under format=json, otherwise `lines`."""
    if config.format == Format.json:
        print(json.dumps(content(), indent=1))
        return
    print("\n".join(lines()))


def show_start(config: Config, plan: Plan, image: dict[str, Any] | None, resumed: bool) -> None:
    """Print the plan, and notes on an image with another base and on a resumed run.

    `image` describes the image that this machine has. With pyxis, a compute node has it.
    """
    if config.format == Format.text:
        print("\n".join(plan_page.page(plan, verbose=config.verbose)))
        print_warnings(config, plan.warnings)
    planned_base = (image_json(plan.config) or {}).get("base")
    base = ((image or {}).get("base") or {}).get("name")
    if base and planned_base and base != planned_base.partition("@")[0]:
        say(config, f"! The image on this machine is based on {base}, not on {planned_base}.")
    if resumed:
        say(config, f"Resuming {short_path(plan.run_dir)}; resume=never starts afresh.")


def say(config: Config, line: str) -> None:
    """Print a line, except under format=json, which reserves stdout for JSON."""
    if config.format == Format.text:
        print(line, flush=True)


def say_next_run(
    config: Config, host: Host, request: Sequence[str], *words: str, plan: Plan | None = None
) -> None:
    """Print how to see more of a plan, the command that starts it, and what to add to that."""
    if not config.verbose:
        say(config, "verbose=true adds command lines, environment, trainer arguments and reasons.")
    lines = plan_page.next_command(request, config, host, *words)
    say(config, "\n".join([*lines, *(plan_page.preview_hint(plan) if plan else [])]))


def print_warnings(config: Config, warnings: list[str]) -> None:
    say_lines(config, [f"! {warning}" for warning in warnings])


def say_lines(config: Config, lines: list[str]) -> None:
    """Print lines, wrapped to the terminal."""
    for line in "\n".join(lines).splitlines():
        say(config, "\n".join(plan_page.wrapped(line)))


def show_end(config: Config, plan: Plan, exit_code: int) -> None:
    """Print a run's end: one JSON object under format=json, otherwise text."""
    if config.format == Format.json:
        print(json.dumps(end_json(plan, exit_code), indent=1))
        return
    say_end(config, plan, exit_code)
    say_next(config, plan.run_dir, Request(plan.overrides))


def end_json(plan: Plan, exit_code: int) -> dict[str, Any]:
    result = json_files.read_json(plan.run_dir / "result.json") or {}
    return {"run_dir": str(plan.run_dir), "exit_code": exit_code, "result": result}


def say_end(config: Config, plan: Plan, exit_code: int) -> None:
    """Print the run's status, its results next to their targets, and its directory."""
    result = json_files.read_json(plan.run_dir / "result.json") or {}
    figures = {key: value for key, value in result.items() if type(value) in (int, float)}
    shown = {n: v for n, v in figures.items() if n not in UNSHOWN and (v or "errors" not in n)}
    results = ", ".join(_rounded(name, value) for name, value in shown.items())
    statuses = {0: "done", 75: "interrupted; the same command resumes it"}
    status = statuses.get(exit_code, f"failed, exit code {exit_code}")
    say(config, f"{plan.name}: {status}" + (f" ({results})" if results else ""))
    if "warning" in result:
        print_warnings(config, [result["warning"]])
    figures |= at_steps(plan.targets, json_files.read_metrics(plan.run_dir / "metrics.jsonl"))
    for name, target in plan.targets.items():
        if name in figures:
            say(config, f"  {name} {figures[name]:.4g}, target {target.value:g} ({target.source})")
    say(config, f"Everything is in {short_path(plan.run_dir)}")


def _rounded(name: str, value: float) -> str:
    """Return a figure of result.json with three digits; integers and thousands in full."""
    is_long = isinstance(value, int) or abs(value) >= 1000
    digits = f"{value:,.0f}" if is_long else f"{value:.3g}"
    return UNITS.get(name, f"{name} {{digits}}").format(digits=digits, value=value)


def say_next(config: Config, run_dir: Path, request: Request) -> None:
    """Print the commands that read the run or use its model."""
    commands = next_steps.commands(config, run_dir, request)
    say(config, f"Next: {' - '.join(commands)}")
    for step, command in commands.items():
        say(config, f"  {step:<10}{command}")
