"""--cfg, --info and shell completion: Hydra's own command line, with our words for its errors, and its keys that have no effect here.
sweep.py has -m."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from launch.compose import CONF, freed, parse, translate
from launch.errors import EXIT_DONE, UserError


def wanted(arguments: list[str]) -> bool:
    return any(argument.startswith("-") for argument in arguments)


def refuse(overrides: list[str]) -> None:
    """Raises UserError for keys of Hydra that nothing would read: it composes, and makes no directory and starts nothing."""
    for override in parse(overrides):
        key = override.key_or_group
        if key.startswith(("hydra/launcher", "hydra.launcher")):
            raise UserError(
                f"{override.input_line}: it starts the jobs of a sweep, and this is one run. Put -m before it, or leave it out."
            )
        if key.startswith(("hydra/", "hydra.")) and key != "hydra.searchpath":
            remedy = "run_root=<directory> and name=<name> for where runs lie; hydra.searchpath=[...] for files of your own"
            raise UserError(f"{override.input_line}: Hydra only composes here, and it would be ignored. Use: {remedy}.")


def _checked(arguments: list[str]) -> list[str]:
    """The arguments with their overrides checked; what a half-typed line for completion holds is left alone."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parsed = parser.parse_args(arguments)
    if parsed.resolve and not parsed.cfg:
        raise UserError("--resolve: it shows a composition with its references filled in. Use: --cfg job --resolve.")
    if parsed.shell_completion:
        return arguments
    return [*(a for a in arguments if a not in parsed.overrides), *freed(parsed.overrides)]


def _refuse(message: str) -> NoReturn:
    """In place of argparse's, which prints Hydra's whole usage first. Raises UserError."""
    raise UserError(f"{message}. Overrides are key=value; python launch/run.py --help says more.")


def run(arguments: list[str], job: Callable[[list[str]], int]) -> int:
    """Hand the arguments to Hydra, which shows what was asked for, or calls `job`. Returns the exit code."""
    exit_codes: list[int] = []

    def task(_composed: DictConfig) -> None:
        exit_codes.append(job(list(HydraConfig.get().overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that the message is ours
    sys.argv = [sys.argv[0], *_checked(arguments)]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error) from error
    return next(iter(exit_codes), EXIT_DONE)
