"""Compose the messages for wrong options, keys and values, each with a valid example.

Options are the files of conf/. Keys and types come from the schema. Hydra and OmegaConf raise
the errors that `translate` rewrites.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import typing
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from launch.core.errors import UserError, near
from launch.core.near_names import key_hint, rewards, word_hint
from launch.core.near_names import names as near_names
from launch.schema import Config, Phase, Task
from launch.schema.data import Source
from launch.schema.trainer_args import OWNED, lock

CONF = Path(__file__).parents[2] / "conf"
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
EXAMPLES = {
    "data.tasks": "[{name: chain_sum, level: 0}]",
    "data.sources": "[{path: train.jsonl, weight: 1.0}]",
    "phases": "[{name: sft, overrides: ['method=sft']}]",
}
# class of a list's entries -> (key of the list, keys of an entry)
ENTRIES = {
    kind.__name__: (key, [field.name for field in dataclasses.fields(kind)])
    for key, kind in {"phases": Phase, "data.tasks": Task, "data.sources": Source}.items()
}
HUB = " For a model on the Hub, use: model.hub_id={}."


@functools.cache  # called for every override
def groups() -> dict[str, list[str]]:
    """Return the options of each group of conf/, except shared bases. Do not modify the result."""
    options = {}
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir()):
        names = sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml"))
        options[folder.name] = [name for name in names if not name.startswith("base/")]
    return options


def headers(file: Path) -> dict[str, str]:
    """Return the comment that opens a file of conf/, as about, Needs, Launch and Override."""
    parts, name = {"about": ""}, "about"
    for line in file.read_text().splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("#"):
            break
        text = line[1:].strip()
        if match := re.match(r"(Needs|Launch|Override): +(.*)", text):
            name, text = match.groups()
            parts[name] = text
        elif name == "about" or (name == "Needs" and line.startswith("#     ")):
            parts[name] += f" {text}"
    return {key: value.strip() for key, value in parts.items()}


def summary(file: Path) -> str:
    """Return the first sentence of a file of conf/."""
    return re.split(r"(?<=\.) ", headers(file)["about"])[0]


def unknown_option(group: str, option: str) -> UserError:
    """Return the error for an unknown option of a group; `GROUP=` lists the options."""
    options = groups()[group]
    if not option:
        width = max(map(len, options))
        lines = [f"  {name:{width}}  {summary(CONF / group / f'{name}.yaml')}" for name in options]
        return UserError("\n".join([f"{group}=: add one of these options:", *lines]))
    hub = HUB.format(option) if group == "model" and "/" in option else ""
    # The Hub model Qwen/Qwen3-4B is qwen3_4b in conf/model.
    local_name = re.sub(r"[^a-z0-9]+", "_", option.rpartition("/")[2].lower())
    suggestion = word_hint(group, option, options) or near(local_name, options)
    return UserError(
        f"{group}={option}: no such {group}.{suggestion}{hub} Options: {', '.join(options)}."
    )


@functools.cache
def fields(node: Any) -> dict[str, Any]:
    """Return the types of the fields of a schema class, by name; {} for any other type."""
    return typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}


def type_of(key: str) -> Any:
    """Return the schema's type of a key; None if the key is unknown or below a free key."""
    node: Any = Config
    for part in _path(key):
        node = _without_optional(node)
        origin, inner = typing.get_origin(node), typing.get_args(node)
        node = inner[-1] if origin in (list, dict) else fields(node).get(part)
    return node


def all_arguments() -> set[str]:
    """Return the arguments of all methods."""
    return set[str]().union(*lock()["arguments"].values())


def check_key(
    key: str, override: str, arguments: Callable[[], Collection[str]] = all_arguments
) -> bool:
    """Return whether a key is free, so that the schema does not check its value.

    Raises UserError if the schema does not have the key. The message starts with `override`, and
    offers only those of method.args that `arguments` returns.
    """
    node: Any = Config
    free = False
    path = _path(key)
    for depth, part in enumerate(path):
        node = _without_optional(node)
        origin, inner = typing.get_origin(node), typing.get_args(node)
        if origin is list:
            node = inner[0]
        elif origin is dict and dataclasses.is_dataclass(inner[1]):
            free, node = True, inner[1]  # any name, followed by keys of the schema
        elif origin is dict or node is Any:
            return True
        elif part in fields(node):
            node = fields(node)[part]
        else:
            raise _unknown_key(path[: depth + 1], [*fields(node)], override, arguments())
    return free or typing.get_origin(node) is dict


def _unknown_key(
    path: list[str], names: list[str], override: str, arguments: Collection[str]
) -> UserError:
    """Return the error for the last part of `path`; `names` are the keys at its level."""
    *parents, name = path
    where, value = f" in {'.'.join(parents)}" if parents else "", override.partition("=")[2]
    if hint := key_hint(name, arguments, value):
        return UserError(f"{override}: no key {name!r}{where}.{hint}")
    if not parents:
        keys = [f"{group}.{name}" for group, node in fields(Config).items() if name in fields(node)]
        similar = dict.fromkeys([near_names("arguments").get(name, name), name])
        keys += [f"method.args.{n}" for n in similar if n in arguments and n not in OWNED]
        full = [shlex.quote(f"{key}={value}") for key in keys]
        full += [OWNED[name]] if name in OWNED else []
        if full:
            return UserError(f"{override}: no top-level key {name!r}. Use: {' or '.join(full)}.")
    keys = [".".join([*parents, other]) for other in names] + ([] if parents else [*groups()])
    listing = f" Keys{where}: {', '.join(names)}." if names else ""
    return UserError(f"{override}: no key {name!r}{where}.{near('.'.join(path), keys)}{listing}")


def _path(key: str) -> list[str]:
    """Return the parts of a key such as a.b, a/b or a[0]."""
    return key.replace("/", ".").replace("[", ".").replace("]", "").split(".")


def _without_optional(node: Any) -> Any:
    """Return the type inside Optional; any other type unchanged."""
    if typing.get_origin(node) is not typing.Union:
        return node
    return next(kind for kind in typing.get_args(node) if kind is not type(None))


def is_field(key: str) -> bool:
    """Return whether the key is a field of the schema, which cannot be deleted."""
    parent, _, name = key.rpartition(".")
    return name in fields(_without_optional(type_of(parent)) if parent else Config)


def remedy(key: str) -> str:
    """Return an override that sets a key of the schema correctly; '' below a free key."""
    node, list_key = type_of(key), re.sub(r"\[\w+\]$", "", key)
    bare = _without_optional(node)
    if key in groups():
        return f"{key}=<option>, one of {', '.join(groups()[key])}"
    if typing.get_origin(bare) is dict:
        return f"{key}.<name>=<value>, or '~{key}.<name>' to delete one"
    if typing.get_origin(bare) is list or list_key != key:
        names = fields(bare if list_key != key else typing.get_args(bare)[0])
        keys = f"; keys of an entry: {', '.join(names)}" if names else ""
        return f"{list_key}={EXAMPLES.get(list_key, '[...]')}{keys}"
    if dataclasses.is_dataclass(bare):
        parent, _, name = key.rpartition(".")
        # a free mapping accepts only complete entries
        is_entry = typing.get_origin(type_of(parent)) is dict
        override = (
            f"'+{parent}={{{name}: {{<key>: <value>}}}}'" if is_entry else f"{key}.<key>=<value>"
        )
        return f"{override}; keys: {', '.join(fields(typing.cast(type, bare)))}"
    words = TYPES.get(bare)
    if isinstance(bare, type) and issubclass(bare, Enum):
        words = ", ".join(bare.__members__)
    return f"{key}=<{words}{'' if bare is node else ' or null'}>" if words else ""


def quoted_text(override: str) -> str | None:
    """Return an override whose value is plain text in the quotes that Hydra and a shell need.

    Return None unless its value is a prompt, a pattern or an existing path, and is meant as plain
    text. Names and words do not need quotes.
    """
    key, equals, value = override.partition("=")
    is_text = _without_optional(type_of(key.lstrip("+"))) is str and (
        key.endswith(("prompt", "pattern")) or os.path.exists(value)
    )
    if not (equals and is_text) or value.startswith(tuple("[{(\"'")) or "${" in value:
        return None
    escaped = re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + (m[2] and f"\\{m[2]}"), value)
    quoted = f'{key}="{escaped}"'
    with contextlib.suppress(HydraException):
        if OverridesParser.create().parse_override(quoted).value() == value:
            return shlex.quote(quoted)
    return None


def translate(error: Exception) -> UserError:
    """Return an error of Hydra or OmegaConf as one message with key, value and rule."""
    group, _, option = str(getattr(error, "missing_cfg_file", None) or "").partition("/")
    if option and group in groups():
        return unknown_option(group, option)
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        # For an error in a file, only the text of Hydra's error has the key.
        in_text = re.search(r"full_key: (\S+)", str(cause))
        key = getattr(cause, "full_key", None) or (in_text and in_text[1])
        if key:
            file = str(error).split(":", 1)[0] + ": " if str(error).startswith("In '") else ""
            return UserError(file + _key_message(key, cause, str(error)))
    text = " ".join(str(error).split())
    ambiguous = re.match(r"Ambiguous value for argument '[+~]*(.*?)' 1\. To use it as a list", text)
    if ambiguous:
        key = ambiguous[1].partition("=")[0]
        quoted = quoted_text(ambiguous[1])
        kind = typing.get_origin(type_of(key)) or type_of(key)
        as_list = f", or {key}=[...] for a list" if kind in (list, Any) else ""
        if type_of(key) == dict[str, float]:
            as_list = f", or '{key}={{{rewards(ambiguous[1].partition('=')[2])}}}' for all"
        text = (
            f"{ambiguous[1]}: several values, but a run needs one. Use: {quoted or 'one value'}, "
            f"or -m for a sweep over all of them{as_list}."
        )
    absent = re.match(r"Could not delete from config\. '(.*)' does not exist", text)
    if absent:
        text = f"~{absent[1]}: cannot be deleted, because it is not set. Remove ~{absent[1]}."
    return UserError(text)


def _key_message(key: str, cause: BaseException, text: str) -> str:
    """Return the message for an unknown key, or for a wrong value of a known one.

    `text` is Hydra's message.
    """
    lines = [line for line in str(cause).splitlines() if not line.startswith("In '")]
    rule = next(iter(lines), str(cause)).rstrip(".")
    # In an entry of a list, OmegaConf reports the key relative to the entry, without the index.
    kind = re.search(r"object_type=(\w+)", str(cause))
    entry = ENTRIES.get(kind[1]) if kind else None
    name = key.partition("[")[0]
    if name != key:  # such as overrides[0]
        entry = next((entry for entry in ENTRIES.values() if name in entry[1]), None)
    if entry and "." not in key:
        listed, names = entry
        if name not in names:
            return f"{listed}: {rule}.{near(key, names)} Keys of an entry: {', '.join(names)}."
        key = f"{listed}[n].{key}"
    try:
        check_key(key, key)
    except UserError as unknown:
        override = re.search(r"override '?[+~]*([\w.]+)", text)
        if "Key '" in rule or not override:
            return str(unknown)
        key = override[1]  # the error of OmegaConf has only the last part of the key
    if rule.startswith("Cannot merge"):
        rule = "a list and a mapping cannot be merged"
    assigned = re.search(rf"override '?[+~]*{re.escape(key)}=\[?([\w.]+(?:, ?[\w.]+)*)", text)
    if assigned and type_of(key) == dict[str, float]:
        return f"{key}: {rule}. Use: '{key}={{{rewards(assigned[1])}}}'."
    value, bare = re.search("[Vv]alue '(.*)', expected", rule), _without_optional(type_of(key))
    hint = near(value[1], bare.__members__) if value and isinstance(bare, type(Enum)) else ""
    use = f" Use: {remedy(key)}." if remedy(key) and not value else ""
    return f"{key}: {rule}.{hint}{use}"
