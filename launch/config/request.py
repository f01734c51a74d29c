"""Parse and check the overrides of a command, each only once."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Self

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from launch.config.wording import (
    CONF,
    all_arguments,
    check_key,
    fields,
    groups,
    is_field,
    quoted_text,
    remedy,
    type_of,
    unknown_option,
)
from launch.core.errors import UserError
from launch.core.key_values import hydra_value
from launch.schema.enums import Mode

SYNTAX = "Use key=value or group=option. Quote special characters; close quotes and brackets."
MAX_SHOWN = 80  # characters of an override in a message


class Request(tuple[str, ...]):
    """The overrides of a command.

    `experiment=<file.yaml>` becomes Hydra's search path and the name of the file.
    """

    def __new__(cls, overrides: Iterable[str] = ()) -> Self:
        words = [word for line in overrides for word in _experiment_of(line)]
        if sum(word.startswith("hydra.searchpath=") for word in words) > 1:
            raise UserError("experiment=<file>: use only one file, and no hydra.searchpath.")
        return super().__new__(cls, words)

    @functools.cached_property
    def parsed(self) -> list[Override]:
        """Return the overrides as Hydra parses them. Raises UserError if one is malformed."""
        return [_parsed(override) for override in self]

    @functools.cached_property
    def keys(self) -> list[str]:
        """Return the keys that the overrides set, without groups. A mapping yields its leaves."""
        return [
            key
            for override in self.parsed
            if override.type != OverrideType.DEL
            and override.key_or_group not in groups()
            and not belongs_to_hydra(override)
            for key in leaves(override.key_or_group, override.value())
        ]

    @functools.cached_property
    def warnings(self) -> list[str]:
        """Return a warning for each key or group that has several values.

        They are allowed because scripts append overrides. Warnings show no values, which may be
        secrets. Mappings are excluded because they are merged.
        """
        values: dict[str, list[Override]] = {}
        for override in self.parsed:
            if override.type == OverrideType.DEL:
                values.pop(override.key_or_group, None)
            elif not isinstance(override.value(), dict):
                values.setdefault(override.key_or_group, []).append(override)
        return [
            f"{key}: set {len(overrides)} times. The "
            f"{'values of the sweep are' if is_swept else 'last value is'} used."
            for key, overrides in values.items()
            if len({str(override.input_line).partition("=")[2] for override in overrides}) > 1
            for is_swept in [any(override.is_sweep_override() for override in overrides)]
        ]

    def plus(self, *overrides: str) -> Request:
        """Return a request with additional overrides."""
        return Request((*self, *overrides))

    def without(self, key: str) -> Request:
        """Return a request without the overrides of a key or group."""
        return Request(override for override in self if override.partition("=")[0] != key)

    def print_warnings(self) -> None:
        """Print the warnings to stderr, because stdout may be the JSON of a pipeline or sweep."""
        for line in self.warnings:
            print(f"! {line}", file=sys.stderr)

    @property
    def searched(self) -> list[str]:
        """Return the directories of hydra.searchpath."""
        values = [each.value() for each in self.parsed if each.key_or_group == "hydra.searchpath"]
        paths = [str(path) for value in values if isinstance(value, list) for path in value]
        return [path.removeprefix("file://") for path in paths if path.startswith("file://")]

    def checked(self) -> Request:
        """Return the overrides with `++` before free keys, as Hydra requires.

        Raises UserError for an unknown key or option.
        """
        # With a search path, options may be outside conf/.
        any_option = any(override.key_or_group == "hydra.searchpath" for override in self.parsed)
        lines = []
        for override in self.parsed:
            is_free = _check(override, any_option, self._arguments)
            line = _parsable(str(override.input_line))  # in user_env, `true` remains a string
            is_added = is_free and override.type == OverrideType.CHANGE
            lines.append(f"++{line}" if is_added else line)
        return Request(lines)

    def _arguments(self) -> Collection[str]:
        """Return the arguments of the method that the overrides choose, or of all methods."""
        from launch.config import compose  # which imports this module

        options = [str(o.input_line) for o in self.parsed if o.key_or_group in groups()]
        with contextlib.suppress(HydraException, OmegaConfBaseException, UserError):
            return compose.arguments(Request(options))
        return all_arguments()


def _experiment_of(override: str) -> list[str]:
    """Return the overrides that find an experiment's file; other overrides as they are."""
    key, _, text = override.partition("=")
    value = text.strip("'\"")
    if key != "experiment" or not value.endswith((".yaml", ".yml")) or "," in value:  # a sweep's
        return [override]
    file = Path(value).expanduser().absolute()
    if not file.is_file() or file.parent.name != "experiment":
        raise UserError(f"{override}: no such file. Use: experiment=<dir>/experiment/<name>.yaml.")
    ours, name = CONF / "experiment" / file.name, file.stem
    if ours.exists() and not ours.samefile(file):  # Hydra would take ours
        raise UserError(f"{override}: conf/experiment has a {file.name} too. Rename your file.")
    if file.suffix == ".yml" or not name[0].isalpha() or hydra_value(name) != name:  # 1, null
        raise UserError(f"{override}: rename the file to <letters, digits, _ and ->.yaml.")
    path = hydra_value(f"file://{file.parents[1]}")
    return [f"hydra.searchpath=[{path}]", f"experiment={name}"]


@functools.cache  # parsing an override at each use took a tenth of the time of a plan
def _parsed(override: str) -> Override:
    parse = OverridesParser.create().parse_overrides
    if _parsable(override) != override:
        with contextlib.suppress(HydraException):  # a sweep's values have no quotes
            return parse([override])[0]
    try:
        return parse([_parsable(override)])[0]
    except (HydraException, ValueError) as error:  # ValueError: too many digits
        is_word = "=" not in override and not override.startswith("~")
        problem = "'=' is missing" if is_word else "not an override"
        groups_of_options = {**groups(), "mode": [*Mode.__members__]}
        matches = [f"{g}={override}" for g, names in groups_of_options.items() if override in names]
        hint = f"Did you mean {' or '.join(matches)}?" if matches else SYNTAX
        if quoted := quoted_text(override):
            hint = f"As one text, its value needs quotes. Use: {quoted}."
        text = override if override.isprintable() and override.strip() else repr(override)
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        raise UserError(f"{shown}: {problem}. {hint}") from error


def _parsable(override: str) -> str:
    """Return an override that Hydra can parse.

    A value of user_env, which may contain any text, gets quotes. `~/` becomes the user's home,
    because a shell expands it only after a space.
    """
    key, equals, value = override.partition("=")
    is_env = key.lstrip("+").startswith("user_env.")
    if value.startswith("~/") and not is_env:
        return f"{key}={os.path.expanduser(value)}"
    if not is_env or not equals or value.lstrip().startswith(("'", '"', "$")):
        return override
    return f"{key}='" + value.replace("'", "\\'") + "'"


def _check(override: Override, any_option: bool, arguments: Callable[[], Collection[str]]) -> bool:
    """Return whether the key is free. Raises UserError for an unknown key or option.

    With `any_option`, options outside conf/ are accepted. Messages offer only `arguments`.
    """
    key, line = override.key_or_group, str(override.input_line)
    if belongs_to_hydra(override):
        return False
    if override.type == OverrideType.DEL:
        if key not in groups():
            check_key(key, line, arguments)
        if is_field(key):
            raise UserError(f"~{key}: this key cannot be deleted. Use: {remedy(key)}.")
        return False
    value = override.value()
    if key in groups():
        is_option = value in groups()[key] or (key == "experiment" and value is None)
        if not (is_option or any_option or override.is_sweep_override()):
            raise unknown_option(key, line.partition("=")[2])
        return False
    if value == {} and (fields(type_of(key)) or typing.get_origin(type_of(key)) is dict):
        raise UserError(
            f"{line}: no effect, because an empty mapping is merged with the current value. Use: "
            f"{remedy(key)}."
        )
    return check_key(key, line, arguments)


def belongs_to_hydra(override: Override) -> bool:
    return str(override.key_or_group).startswith(("hydra/", "hydra."))


def leaves(key: str, value: Any) -> dict[str, Any]:
    """Flatten a value to dotted keys below `key`: leaves("a", {"b": 1}) is {"a.b": 1}."""
    if not isinstance(value, dict):
        return {key: value}
    return {
        leaf: inner
        for name, item in value.items()
        for leaf, inner in leaves(f"{key}.{name}" if key else str(name), item).items()
    }
