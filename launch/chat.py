"""Talk to the model of a run, or to another model, in this terminal.

    python launch/chat.py MODEL [key=value]...

  MODEL       a run or a pipeline (runs/<name>/latest), a checkpoint or a model directory. A run's
              model uses the hardware, runtime, image and tokenizer of the run. Without MODEL,
              model=NAME selects a model of the Hub.
  key=value   engine=transformers|vllm, temperature=T (0 is greedy), top_p=P, top_k=K,
              max_new_tokens=N, system=TEXT, or any override of launch/run.py, such as
              runtime=local

Each line is a message. /clear starts another conversation, Ctrl-C stops an answer, and /exit or
Ctrl-D ends.

Exit codes: as of launch/run.py.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))

from launch.core import stop_signals

if __name__ == "__main__":
    stop_signals.install()

import launch.core.installed  # noqa: F401

# isort: split
from dataclasses import fields
from pathlib import Path

from launch import run
from launch.config.request import Request
from launch.config.wording import groups
from launch.core.console import run_program
from launch.core.errors import EXIT_DONE, HostError, UserError, near_or_all
from launch.core.json_files import read_json
from launch.inputs.paths import pinned
from launch.inputs.run_models import run_with_model
from launch.plan import next_steps
from launch.schema import Config, trainer_args

GROUPS = ("hardware", "runtime", "container", "model")


def overrides(arguments: list[str]) -> list[str]:
    """Return the overrides of launch/run.py that the command line stands for. Raises UserError."""
    paths = [word for word in arguments if "=" not in word or os.path.exists(word)]
    typed = [_full_key(word) for word in arguments if word not in paths]
    if len(paths) > 1 or not (paths or typed):
        raise UserError(
            f"{' '.join(arguments)}: name one run or model. Use: python launch/chat.py "
            "runs/<name>/latest, or python launch/chat.py model=<name>."
        )
    if not paths:
        return ["method=chat", *typed]
    path = pinned(paths[0])
    return ["method=chat", *_of_run(path), f"model.path={run_with_model(path) or path}", *typed]


def _of_run(path: Path) -> list[str]:
    """Return the overrides that select the place and the model of the run that contains `path`."""
    path = run_with_model(path) or path
    for folder in (path, *path.parents[:2]):  # a run, its model/, or one of its checkpoints/
        record = read_json(folder / "record.json")
        if record and isinstance(record.get("composition"), dict):
            names = [f"{group}={record['composition'][group]['name']}" for group in GROUPS]
            return [*names, *next_steps.kept(Request(record["overrides"]))]
    return []


def _full_key(override: str) -> str:
    """Return an override with method.args. in front of the name of an argument of method=chat.

    Raises UserError for method= and for a name that resembles an argument.
    """
    key = override.partition("=")[0]
    arguments = {*trainer_args.lock()["arguments"]["recipes.chat.ChatConfig"]} - {"seed"}
    if key == "method":
        raise UserError(
            f"{override}: a chat is a method. For another: python launch/run.py {override}"
        )
    if key in arguments:
        return f"method.args.{override}"
    if key.isidentifier() and key not in {*groups(), *(f.name for f in fields(Config))}:
        raise UserError(
            f"{override}: no such key.{near_or_all(key, arguments - set(trainer_args.OWNED))}"
        )
    return override


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return EXIT_DONE if arguments else UserError.exit_code
    try:
        return run.main(overrides(arguments))
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    run_program(main)
