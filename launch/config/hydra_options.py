"""Run --cfg, --info and shell completion through Hydra's command line, with our error messages.

launch/study/sweep.py runs -m.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
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
from launch.core.near_names import key_hint


def is_requested(arguments: list[str]) -> bool:
    return any(argument.startswith("-") for argument in arguments)


def reject_hydra_keys(request: Request) -> None:
    """Raise UserError for keys of Hydra, because we use Hydra only to compose."""
    for override in request.parsed:
        if belongs_to_hydra(override) and override.key_or_group != "hydra.searchpath":
            raise UserError(
                f"{override.input_line}: no effect, because the launcher uses Hydra only to "
                "compose. Use: run_root=<directory> and name=<name> for the run directory; "
                "hydra.searchpath=[...] for your own configuration files; or -m for a sweep, which "
                "runtime=slurm submits as jobs."
            )


def _reject_option(arguments: list[str], message: str) -> NoReturn:
    """Raise UserError in place of argparse's method, which would print Hydra's usage.

    The message has the override that `--key value` or `--key=value` would be.
    """
    unknown = re.match(r"unrecognized arguments: (--([^\s=]+))(=\S+)?", message)
    use = ""
    if unknown:
        option, name, given = unknown.groups()
        following = dict(zip(arguments, arguments[1:], strict=False)).get(option, "")
        value = given.removeprefix("=") if given else following
        override = f"{name.replace('-', '_')}={value}"
        if value and "=" not in value and not re.match("-[a-z-]", value):
            others = [each for each in arguments if "=" in each and not each.startswith("-")]
            Request([*others, override]).checked()  # which may know another key for it
            use = f" Use: {shlex.quote(override)}."
        else:
            use = key_hint(name.replace("-", "_"), ())
    raise UserError(f"{message}. Overrides are key=value.{use} See python launch/run.py --help.")


def run(arguments: list[str], job: Callable[[list[str]], int]) -> int:
    """Pass the arguments to Hydra, which prints something or calls `job`. Return the exit code."""
    parser = get_args_parser()
    parser.error = functools.partial(_reject_option, arguments)  # type: ignore[method-assign]
    parsed = parser.parse_args(arguments)
    if not parsed.shell_completion:  # completion gets half-typed overrides
        options = [argument for argument in arguments if argument not in parsed.overrides]
        arguments = [*options, *Request(parsed.overrides).checked()]
    exit_codes: list[int] = []

    def task(_composed: DictConfig) -> None:
        exit_codes.append(job(list(HydraConfig.get().overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors rather than print them
    sys.argv = [sys.argv[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise translate(error) from error
    return next(iter(exit_codes), EXIT_DONE)
