"""List the commands that a user may want after a run, with paths that can be pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

from launch.config.compose import compose
from launch.config.request import Request
from launch.core.json_files import read_json
from launch.inputs.run_models import run_with_model
from launch.plan.process_env import ROOT
from launch.rules.data import has_heldout
from launch.schema import Config

# Groups and keys of the run's command that its export and its evaluation need too.
PLACE = ("hardware", "runtime", "container", "smoke", "run_root", "user_env")
SUBJECT = (*PLACE, "model", "data")
REPLACED = ("model.path", "model.hub_id", "model.revision", "model.init")


def commands(config: Config, run_dir: Path, request: Request) -> dict[str, str]:
    """Return the commands by what they do. A run without a model has only a report."""
    run = str(short_path(run_dir))
    steps = {"report": command_line("report", run)}
    source = run_with_model(run_dir)
    if source is None:
        return steps
    model = f"model.path={short_path(source)}"
    subject, place = (_repeated(config, request, groups) for groups in (SUBJECT, PLACE))
    # A pipeline has its own evaluations. The data of an experiment may consist of further keys.
    is_exact = subject == kept(request, SUBJECT) or compose(subject).data == config.data
    if has_heldout(config) and not config.phases and is_exact:
        steps["evaluate"] = command_line("run", *subject, "method=evaluate", model)
    steps["chat"] = command_line("chat", run)
    if (read_json(source / "plan.json") or {}).get("method") != "export":
        steps["export"] = command_line("run", *place, "method=export", model)
    return steps


def short_path(path: str | Path) -> str:
    """Return a path in the current directory as a relative path, and any other path unchanged."""
    cwd = Path.cwd()
    return str(Path(path).relative_to(cwd) if Path(path).is_relative_to(cwd) else path)


def command_line(program: str, *words: str) -> str:
    """Return the command of a program of launch/, ready to be pasted."""
    return shlex.join(["python", short_path(ROOT / "launch" / f"{program}.py"), *words])


def _repeated(config: Config, request: Request, groups: tuple[str, ...]) -> list[str]:
    """Return the overrides that repeat the run's choice of groups, without those of its method.

    An experiment, which also sets arguments of the method, is replaced by the groups' names.
    """
    typed = kept(request, groups)
    if all(override.key_or_group != "experiment" for override in request.parsed):
        return typed
    names = [group for group in ("hardware", "model", "data") if group in groups]
    # The later of two values is used.
    return [*(f"{group}={getattr(config, group).name}" for group in names), *typed]


def kept(request: Request, groups: tuple[str, ...]) -> list[str]:
    """Return the overrides of some groups and of their keys."""
    return [
        str(override.input_line)
        for override in request.parsed
        if override.key_or_group.partition(".")[0] in groups
        and override.key_or_group not in REPLACED
    ]
