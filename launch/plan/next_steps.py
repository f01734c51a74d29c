"""List the commands that a user may want after a run, with paths that can be pasted."""

import shlex
from pathlib import Path

from launch.config.compose import compose
from launch.config.request import Request
from launch.core.errors import UserError
from launch.core.json_files import read_json
from launch.inputs.run_models import run_with_model
from launch.plan.check_files import check_files
from launch.plan.planning import prepare
from launch.plan.process_env import ROOT
from launch.schema import Config

# Groups and keys of the run's command that its export and its evaluation need too. They take
# model and data from the run's record.
PLACE = ("hardware", "runtime", "container", "smoke", "run_root", "user_env")


def commands(config: Config, run_dir: Path, request: Request) -> dict[str, str]:
    """Return the commands by what they do. A run without a model has only a report."""
    run = str(short_path(run_dir))
    steps = {"report": command_line("report", run)}
    source = run_with_model(run_dir)
    if source is None:
        return steps
    model = f"model.path={short_path(source)}"
    # An experiment also sets arguments of the method, so its hardware replaces it.
    groups, place = {override.key_or_group for override in request.parsed}, kept(request)
    if "experiment" in groups and "hardware" not in groups:
        place = [f"hardware={config.hardware.name}", *place]
    evaluation = Request([*place, "method=evaluate", model])
    # A pipeline has its own evaluations.
    if config.data.has_heldout and not config.phases and _can_score(config, evaluation):
        steps["evaluate"] = command_line("run", *evaluation)
    steps["chat"] = command_line("chat", run)
    if (read_json(source / "plan.json") or {}).get("method") != "export":
        steps["export"] = command_line("run", *place, "method=export", model)
    return steps


def _can_score(config: Config, evaluation: Request) -> bool:
    """Return whether an evaluation can score the run's held-out rows; it cannot score chats.

    Rows of the Hub are not read here, so their columns and the run's rewards tell.
    """
    if config.data.kind == "hub" and not config.data.columns.get("answer"):
        return bool(config.method.rewards)
    try:
        planned, _ = prepare(compose(evaluation))
        check_files(planned, all_lines=False)
    except UserError:
        return False
    return True


def short_path(path: str | Path) -> str:
    """Return a path in the current directory as a relative path, and any other path unchanged."""
    cwd = Path.cwd()
    return str(Path(path).relative_to(cwd) if Path(path).is_relative_to(cwd) else path)


def command_line(program: str, *words: str) -> str:
    """Return the command of a program of launch/, ready to be pasted."""
    return shlex.join(["python", short_path(ROOT / "launch" / f"{program}.py"), *words])


def kept(request: Request) -> list[str]:
    """Return the overrides of PLACE."""
    return [
        str(override.input_line)
        for override in request.parsed
        if override.key_or_group.partition(".")[0] in PLACE
    ]
