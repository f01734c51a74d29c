"""Move secrets of the command line into the environment, which records do not contain."""

from __future__ import annotations

import os
import sys
from typing import Any

from launch.config.request import Request
from launch.schema.variables import RANK_NAMES, is_public

PASS, PUBLIC = "runtime.pass_env", "runtime.public_env"


def to_environment(arguments: list[str]) -> list[str]:
    """Return the arguments with `runtime.pass_env` in place of secret values of user_env.

    This process sets the variables, and its processes inherit them. Raises UserError.
    """
    is_sweep = any(argument in ("-m", "--multirun") for argument in arguments)
    public, moved, others = _names(arguments, PUBLIC), dict[str, str](), list[str]()
    for argument in arguments:
        key, _, value = argument.partition("=")
        group, _, name = key.lstrip("+").partition(".")
        # A rule rejects these.
        is_unclear = (
            "${" in value or (is_sweep and set(value) & set(",(")) or not name.isidentifier()
        )
        if group != "user_env" or is_unclear or name in public or RANK_NAMES.fullmatch(name):
            others.append(argument)
            continue
        text = str(Request([argument]).parsed[0].value()) if value[:1] in ("'", '"') else value
        if is_public(name, text):
            others.append(argument)
        else:
            moved[name] = text
    if not moved:
        return arguments
    os.environ.update(moved)
    print(
        f"! user_env: records will not contain {', '.join(moved)}, which may be secret. "
        f"{PUBLIC}=[{','.join(moved)}] records it.",
        file=sys.stderr,
    )
    passed = dict.fromkeys([*_names(arguments, PASS), *moved])
    others = [argument for argument in others if not _sets(argument, PASS)]
    return [*others, f"{PASS}=[{','.join(passed)}]"]


def _names(arguments: list[str], key: str) -> list[str]:
    """Return the last list of names that the arguments set at the key."""
    lists = [argument for argument in arguments if _sets(argument, key)]
    names: Any = Request(lists[-1:]).parsed[0].value() if lists else []
    return [str(name) for name in names] if isinstance(names, list) else []


def _sets(argument: str, key: str) -> bool:
    return argument.lstrip("+").startswith(f"{key}=")
