"""Types of the schema in a person's words: what a key takes, and how a value of another form is written."""

from __future__ import annotations

import dataclasses
import re
import typing
from enum import Enum
from typing import Any

from omegaconf import Node

from launch.errors import near
from launch.schema import Config

# What OmegaConf says of a value of another type.
OF_ANOTHER_TYPE = re.compile(
    r"could not be converted|is not a valid bool|Invalid value|Invalid type assigned|Cannot (assign|merge|convert)|is not Optional"
)
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# key -> a value as it is written, for `{}` the one that was given
WRITTEN = {
    "data.tasks": "data.tasks=[{{name: {}, level: 0}}]",
    "data.sources": "data.sources=[{{path: {}, weight: 1.0}}]",
    "phases": "phases=[{{name: {}, overrides: ['method={}']}}]",
    "method.rewards": "method.rewards.{}=1.0",
}
USUAL = {"data.tasks": "chain_sum", "data.sources": "train.jsonl", "phases": "sft", "method.rewards": "accuracy"}
UNKNOWN = object()
HUB = " One of the hub: model=<a model of the same architecture and shape> model.hub_id={} model.revision=<its commit>."
WORD = re.compile(r"[A-Za-z_][\w./-]*")


def fields(node: Any) -> dict[str, Any]:
    """Name -> type of a dataclass of the schema; nothing for what is none."""
    return typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}


def type_of(key: str) -> Any:
    """As the schema has it; None below what is free, and for what is unknown."""
    node: Any = Config
    for part in key.replace("[", ".").replace("]", "").split("."):
        node, origin = _bare(node), typing.get_origin(_bare(node))
        node = typing.get_args(node)[0 if origin is list else 1] if origin in (list, dict) else fields(node).get(part)
    return node


def _bare(node: Any) -> Any:
    """Without Optional."""
    kinds = [kind for kind in typing.get_args(node) if kind is not type(None)]
    return kinds[0] if typing.get_origin(node) is typing.Union else node


def refused(key: str, error: BaseException, rule: str) -> str:
    """What to say of a value that OmegaConf refused by `rule`: the key, the value, what it takes, and how that is written."""
    if "does not support deletion" in rule:
        return cannot_go(key)
    node, value = type_of(key), _value_of(error, rule)
    bare = _bare(node)
    if isinstance(bare, type) and issubclass(bare, Enum):
        words = ", ".join(bare.__members__)
        return f"{key}=null: it takes {words}." if "is not Optional" in rule else f"{key}: {rule}.{near(str(value), bare.__members__)}"
    merged = "Cannot merge" in rule  # a list and a mapping
    if (node is None and not merged) or not OF_ANOTHER_TYPE.search(rule):
        return f"{key}: {rule}."
    given = key if value is UNKNOWN else f"{key}={'null' if value is None else value}"
    if bare in WORDS:
        return f"{given}: it takes {WORDS[bare]}{' or null' if bare is not node else ''}."
    listed = re.sub(r"\[\d+\]$", "", key)  # an entry of a list is shown in it
    # What is free has no type: there OmegaConf's text alone says what was to be merged into.
    is_list = typing.get_origin(bare) is list or (merged and "object_type=list" in str(error))
    if is_list or listed != key:
        entry = fields(type_of(listed) if listed != key else next(iter(typing.get_args(bare)), None)) or fields(bare)
        keys = f"; keys of an entry: {', '.join(entry)}" if entry else ""
        what = "an entry has keys of its own" if listed != key else "it takes a list" + (", and a mapping was given" if merged else "")
        return f"{given}: {what}. Use: {_written(listed, value, is_list=True)}{keys}."
    if dataclasses.is_dataclass(bare):
        return f"{given}: it has keys of its own. Use: {key}.<key>=<value>; keys: {', '.join(fields(bare))}."
    return f"{given}: it takes names with a value each{', and a list was given' if merged else ''}. Use: {_written(key, value)}."


def cannot_go(key: str) -> str:
    """What to say of `~key`, where the schema has the key: what stands for none of it."""
    node = type_of(key)
    if typing.get_origin(node) is list:
        remedy = f"{key}=[]"
    elif typing.get_origin(node) is dict:
        remedy = f"'~{key}.NAME' for each that is to go"
    elif _bare(node) is not node:
        remedy = f"{key}=null"
    else:
        remedy = f"{key}.<key>=<value>" if dataclasses.is_dataclass(node) else f"{key}=<value>"
    return f"~{key}: every composition has one. Use: {remedy}."


def _value_of(error: BaseException, rule: str) -> Any:
    """What was given, where OmegaConf or its text keeps it: of a file the text alone is left, of a merge nothing."""
    if "Cannot merge" in rule:
        return UNKNOWN
    named = re.search(r"[Vv]alue '(.*)'(?: of type| is not|,)|value: (.*)", rule)
    if named:
        found = next(found for found in named.groups() if found is not None)
        return None if found == "None" else found
    value = getattr(error, "value", UNKNOWN)
    return value._value() if isinstance(value, Node) else value


def _written(key: str, value: Any, is_list: bool = False) -> str:
    """With the value that was given, where it is a word that may stand there."""
    is_word = isinstance(value, str) and WORD.fullmatch(value)
    if key in WRITTEN:
        word = value if is_word else USUAL[key]
        return WRITTEN[key].format(word, word)
    if is_list:
        return f"{key}=['{value}']" if isinstance(value, str) and "'" not in value else f"{key}=[...]"
    return f"{key}.<name>=<value>"
