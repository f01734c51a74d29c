"""-m, --cfg, --info and shell completion: Hydra's own command line, with our words for its errors."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from launch.compose import CONF, freed, translate
from launch.errors import EXIT_DONE, HostError, UserError


def wanted(arguments: list[str]) -> bool:
    return any(argument.startswith("-") for argument in arguments)


def _checked(arguments: list[str]) -> list[str]:
    """The arguments with their overrides checked; what a half-typed line for completion holds is left alone."""
    parsed = get_args_parser().parse_args(arguments)
    if parsed.shell_completion:
        return arguments
    return [*(a for a in arguments if a not in parsed.overrides), *freed(parsed.overrides)]


def run(arguments: list[str], job: Callable[[list[str]], int]) -> int:
    """Hand the arguments to Hydra; every job of a sweep runs even if one before it failed. Returns the first exit code not 0."""
    exit_codes: list[int] = []

    def task(_composed: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            print(f"\n[{len(exit_codes)}] {' '.join(overrides)}", file=sys.stderr)
        try:
            exit_codes.append(job(overrides))
        except (UserError, HostError) as error:
            print(error, file=sys.stderr)
            exit_codes.append(error.exit_code)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that the message is ours
    with tempfile.TemporaryDirectory() as scratch:
        nothing_kept = [f"hydra.sweep.dir={scratch}"] if "mode=plan" in arguments else []
        sys.argv = [sys.argv[0], *_checked(arguments), *nothing_kept]
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
        except (HydraException, OmegaConfBaseException) as error:
            raise translate(error) from error
    return next((code for code in exit_codes if code), EXIT_DONE)
