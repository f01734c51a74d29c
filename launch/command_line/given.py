"""What a command line gives twice: the last value counts, since scripts append theirs, and a person is told."""

from __future__ import annotations

import sys

from hydra.core.override_parser.types import OverrideType

from launch.compose import LONGEST_SHOWN, leaves, parse


def repeated(overrides: list[str]) -> list[str]:
    """A line for each key or group that has several values."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for override in parse(overrides):
        key = override.key_or_group
        if override.type == OverrideType.DEL:
            found.pop(key, None)
            continue
        typed, value, varies = str(override.input_line).partition("=")[2], override.value(), override.is_sweep_override()
        for leaf, inner in (leaves(key, value) if isinstance(value, dict) else {key: typed}).items():
            found.setdefault(leaf, []).append((_shown(f"{leaf}={inner}"), varies))
    return [_line(key, given) for key, given in found.items() if len({one for one, _ in given}) > 1]


def say(lines: list[str]) -> None:
    """On stderr: stdout is for the plan of a pipeline or a sweep, which may be JSON."""
    for line in lines:
        print(f"! {line}", file=sys.stderr)


def _line(key: str, given: list[tuple[str, bool]]) -> str:
    """Values that a sweep varies stand behind those that all its trials share, wherever they were typed."""
    often, named = "twice" if len(given) == 2 else f"{len(given)} times", [one for one, _ in given]
    listed = next((one for one, varies in reversed(given) if varies), None)
    counts = "the last counts" if listed in (None, named[-1]) else f"{listed} counts, which the sweep varies"
    if key.startswith("user_env."):  # a value may be a secret
        return f"{key} is given {often}: the last counts."
    return f"{key} is given {often}, {', '.join(named[:-1])} and {named[-1]}: {counts}."


def _shown(given: str) -> str:
    return given if len(given) <= LONGEST_SHOWN else f"{given[:LONGEST_SHOWN]}..."
