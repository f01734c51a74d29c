"""Read a command's overrides, once."""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from launch.config.wording import (
    check_key,
    fields,
    groups,
    is_field,
    remedy,
    type_of,
    unknown_option,
)
from launch.core.errors import UserError
from launch.schema.enums import Mode

OVERRIDE = "An override is key=value or group=option"
LONGEST_SHOWN = 80  # characters of an override in a message


class Request(tuple[str, ...]):
    """A command's overrides. Raises UserError if one cannot be parsed."""

    @functools.cached_property
    def parsed(self) -> list[Override]:
        return [_parsed(override) for override in self]

    @functools.cached_property
    def keys(self) -> list[str]:
        """Return the keys that the overrides set. Groups are left out, mappings count by leaf."""
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
        """Return a line for each key or group with several values; scripts append theirs last.

        The lines show no values, which may be secrets. Mappings are merged, so all of theirs count.
        """
        values: dict[str, list[Override]] = {}
        for override in self.parsed:
            if override.type == OverrideType.DEL:
                values.pop(override.key_or_group, None)
            elif not isinstance(override.value(), dict):
                values.setdefault(override.key_or_group, []).append(override)
        return [
            f"{key} is given {len(several)} times: the "
            f"{'one that the sweep varies' if swept else 'last'} counts."
            for key, several in values.items()
            if len({str(override.input_line).partition("=")[2] for override in several}) > 1
            for swept in [any(override.is_sweep_override() for override in several)]
        ]

    def plus(self, *overrides: str) -> Request:
        """Return a request with more overrides."""
        return Request((*self, *overrides))

    def without(self, key: str) -> Request:
        """Return a request without the overrides of a key or group."""
        return Request(override for override in self if override.partition("=")[0] != key)

    def say_warnings(self) -> None:
        """Print the warnings to stderr, because stdout may be a pipeline's or sweep's JSON plan."""
        for line in self.warnings:
            print(f"! {line}", file=sys.stderr)

    def checked(self) -> Request:
        """Return overrides that Hydra accepts. Free keys get `++`, so users need not type it.

        Raises UserError for an unknown key or option.
        """
        # With a search path, options may lie outside conf/.
        elsewhere = any(override.key_or_group == "hydra.searchpath" for override in self.parsed)
        return Request(_checked(self.parsed, elsewhere))


@functools.cache  # parsing at every use took a tenth of a plan's time
def _parsed(override: str) -> Override:
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
        return parsed
    except (HydraException, ValueError) as error:  # ValueError: too many digits
        is_word = "=" not in override and not override.startswith("~")
        fault = "no '=' in it" if is_word else "not an override"
        options = " or ".join(_options_named(override))
        form = f"{OVERRIDE}. Quote values with special characters; close quotes and brackets."
        hint = f"Did you mean {options}?" if options else form
        text = override if override.isprintable() and override.strip() else repr(override)
        raise UserError(f"{_shortened(text)}: {fault}. {hint}") from error


def _checked(parsed: Iterable[Override], elsewhere: bool) -> Iterator[str]:
    for override in parsed:
        is_free = _check(override, elsewhere)
        line = str(override.input_line)
        key, equals, value = line.partition("=")
        is_env = override.key_or_group.startswith("user_env.")
        if is_env and equals and not value.lstrip().startswith(("'", '"', "$")):
            line = f"{key}='" + value.replace("'", "\\'") + "'"  # `true` stays as typed
        yield f"++{line}" if is_free and override.type == OverrideType.CHANGE else line


def _check(override: Override, elsewhere: bool) -> bool:
    """Raise UserError for an unknown option or key; return whether the key is free."""
    key, line = override.key_or_group, str(override.input_line)
    if belongs_to_hydra(override):
        return False
    if override.type == OverrideType.DEL:
        if key not in groups():
            check_key(key, line)
        if is_field(key):
            raise UserError(f"~{key}: every composition has one. Use: {remedy(key)}.")
        return False
    value = override.value()
    if key in groups():
        is_option = value in groups()[key] or (key == "experiment" and value is None)
        if not (is_option or elsewhere or override.is_sweep_override()):
            raise unknown_option(key, line.partition("=")[2])
        return False
    if value == {} and (fields(type_of(key)) or typing.get_origin(type_of(key)) is dict):
        message = "merging it with the present value changes nothing"
        raise UserError(f"{line}: {message}. Use: {remedy(key)}.")
    return check_key(key, line)


def belongs_to_hydra(override: Override) -> bool:
    return str(override.key_or_group).startswith(("hydra/", "hydra."))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _options_named(word: str) -> list[str]:
    """Return group=word for each group with such an option, including mode."""
    words = {**groups(), "mode": [*Mode.__members__]}
    return [f"{group}={word}" for group, options in words.items() if word in options]


def leaves(key: str, value: Any) -> dict[str, Any]:
    """Return {a.b: 1} for {b: 1} at key a; for the key "", the mapping's own keys."""
    if not isinstance(value, dict):
        return {key: value}
    return {
        leaf: inner
        for name, item in value.items()
        for leaf, inner in leaves(f"{key}.{name}" if key else str(name), item).items()
    }
