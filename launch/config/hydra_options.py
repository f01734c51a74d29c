"""Serve --cfg, --info and shell completion by Hydra's own command line, with our error messages.

launch/study/sweep.py serves -m.
"""

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

from launch.config.request import Request, belongs_to_hydra
from launch.config.wording import CONF, translate
from launch.core.errors import EXIT_DONE, UserError


def is_requested(arguments: list[str]) -> bool:
    return any(argument.startswith("-") for argument in arguments)


def refuse(request: Request) -> None:
    """Raise UserError for Hydra's own keys, which take no effect because Hydra only composes."""
    for override in request.parsed:
        if belongs_to_hydra(override) and override.key_or_group != "hydra.searchpath":
            raise UserError(
                f"{override.input_line}: Hydra only composes here, so it takes no effect. Use: "
                "run_root=<directory> and name=<name> to place runs; hydra.searchpath=[...] "
                "for files of your own; -m for a sweep, whose trials runtime=slurm submits as jobs."
            )


def _checked(arguments: list[str]) -> list[str]:
    """Return the arguments with their overrides checked, except on a half-typed line."""
    parser = get_args_parser()
    parser.error = _reject  # type: ignore[method-assign]
    parsed = parser.parse_args(arguments)
    if parsed.shell_completion:
        return arguments
    return [
        *(a for a in arguments if a not in parsed.overrides),
        *Request(parsed.overrides).checked(),
    ]


def _reject(message: str) -> NoReturn:
    """Raise UserError; argparse's own method would print Hydra's whole usage first."""
    raise UserError(f"{message}. Overrides are key=value. See python launch/run.py --help.")


def run(arguments: list[str], job: Callable[[list[str]], int]) -> int:
    """Hand the arguments to Hydra, which shows something or calls `job`; return the exit code."""
    exit_codes: list[int] = []

    def task(_composed: DictConfig) -> None:
        exit_codes.append(job(list(HydraConfig.get().overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors, so that the message is ours
    sys.argv = [sys.argv[0], *_checked(arguments)]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise translate(error) from error
    return next(iter(exit_codes), EXIT_DONE)
