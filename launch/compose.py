"""Overrides in, one checked composition out. Hydra does the composing; this file says in a person's words what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch import auto
from launch.errors import UserError, near
from launch.schema import Config

CONF = Path(__file__).parents[1] / "conf"
ConfigStore.instance().store(name="schema", node=Config)

# Names people try for what training here does not do, and what does it instead.
NOT_A_TOPOLOGY = dict.fromkeys(
    ("tensor", "tp", "tensor_parallel", "pipeline", "pp", "pipeline_parallel", "3d", "megatron"),
    "training here shards by data (fsdp, zero2, zero3): topology=fsdp holds a model that one GPU cannot; "
    "vLLM's servers take topology.server_tensor_parallel=N under topology=split",
)


@functools.cache  # looked at for every override
def groups() -> dict[str, list[str]]:
    """Every group of conf/ with its options; shared, so read it only. Folders of shared bases (`base/`) are no options."""
    found = {}
    for folder in sorted(p for p in CONF.iterdir() if p.is_dir()):
        names = sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml"))
        found[folder.name] = [n for n in names if not n.startswith("base/")]
    return found


def compose(overrides: list[str], given: list[str] | None = None) -> Config:
    """The composition that `overrides` name, every `auto` resolved. `given`: those that a person gave, all unless said otherwise; under
    smoke=true their arguments of the method stay as they are. Raises UserError.
    """
    names = _argument_names(overrides if given is None else given)
    overrides = [o for o in freed(overrides) if o != "experiment=null"]  # the default, which Hydra refuses to be told
    composed = _compose(overrides)
    # The hardware comes first: what the other groups choose by themselves follows from it.
    for choose in (auto.hardware, auto.others):
        chosen = choose(composed)
        if chosen:
            overrides = [*overrides, *chosen]
            composed = _compose(overrides)
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise UserError(f"{', '.join(missing)}: no value. Give one, for example {missing[0]}=...")
    config = _absolute(typing.cast(Config, OmegaConf.to_object(composed)))
    if config.smoke:
        config.method.smoke |= {name: config.method.args[name] for name in names if name in config.method.args}
    return config


def _argument_names(overrides: list[str]) -> list[str]:
    """Of method.args, as overrides give them."""
    keys = [str(override.key_or_group).split(".") for override in _parse(overrides)]
    return [key[2] for key in keys if key[:2] == ["method", "args"] and len(key) > 2]


def _absolute(config: Config) -> Config:
    """Paths as seen from where the command was typed: ranks, records and later commands stand elsewhere."""
    config.run_root = str(Path(config.run_root).absolute())
    of_data = ("path", "heldout_path", "chat_template", "cache", "pass_rates")
    sources = [(source, ("path",)) for source in config.data.sources]
    for group, names in ((config.model, ("path", "chat_template")), (config.adapter, ("path",)), (config.data, of_data), *sources):
        for name in names:
            given = getattr(group, name)
            setattr(group, name, given and str(Path(given).expanduser().absolute()))
    config.model.path = config.model.path and _model_of(Path(config.model.path))
    parts = [config.method.args.get(name) for name in ("sample", "evaluate")]  # method=raft's, for these phases
    for args in (config.method.args, *(part for part in parts if isinstance(part, dict))):
        for name in ("reuse", "lm_eval_include", "gguf_converter", "results_from"):
            if isinstance(args.get(name), str):
                args[name] = str(Path(args[name]).expanduser().absolute())
    return config


def _model_of(path: Path) -> str:
    """`path`, and where it is the directory of a run the model in it."""
    is_run = (path / "record.json").is_file() and not (path / "config.json").is_file()
    return str(path / "model" if is_run else path)


def freed(overrides: list[str]) -> list[str]:
    """Checked overrides, with `++` before those of free keys: method.args.beta=0.1 needs no plus to be new."""
    found, parsed = [], _parse(overrides)
    elsewhere = any(override.key_or_group == "hydra.searchpath" for override in parsed)  # options may stand outside conf/
    for override in parsed:
        free = _check_override(override, elsewhere)
        line = str(override.input_line)
        if override.key_or_group.startswith("user_env.") and not re.search(r"=\s*['\"$]", line):
            line = re.sub(r"=(.*)$", lambda m: "='" + m.group(1).replace("'", "\\'") + "'", line, count=1, flags=re.DOTALL)  # `true` stays
        found.append(f"++{line}" if free and override.type == OverrideType.CHANGE else line)
    return found


def _compose(overrides: list[str]) -> DictConfig:
    """As Hydra composes: the options of groups first, whatever stands where, then the keys in their order. The options are the slow part
    (a tenth of a second), and the same ones come again: `auto`, find=, pipelines and sweeps compose dozens of times in a process."""
    try:
        if GlobalHydra.instance().is_initialized():  # inside a sweep Hydra is up already
            return hydra_compose("config", overrides)
        parsed = OverridesParser.create().parse_overrides(overrides)
        options = [o for o in parsed if o.key_or_group in groups()]
        plain = all(o.type == OverrideType.CHANGE and o.package is None and isinstance(o.value(), str) for o in options)
        if not plain or any(o.is_sweep_override() or o.is_hydra_override() or "/" in o.key_or_group for o in parsed):
            return _hydra(overrides)
        composed = pickle.loads(_options(tuple(str(o.input_line) for o in options)))  # a copy: a hundredth of the time
        ConfigLoaderImpl._apply_overrides_to_config([o for o in parsed if o.key_or_group not in groups()], composed)
        return typing.cast(DictConfig, composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise translate(error) from error


@functools.cache
def _options(overrides: tuple[str, ...]) -> bytes:
    """What options of groups alone compose to, pickled."""
    return pickle.dumps(_hydra(list(overrides)))


def _hydra(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", overrides)


def _parse(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(
            f"{str(error).splitlines()[0]}. An override is key=value or group=option; quote values with special characters."
        ) from error


def _check_override(override: Override, elsewhere: bool) -> bool:
    """Refuse an option or a key that does not exist, before Hydra does it in longer words. True for a free key."""
    key = override.key_or_group
    if key.startswith(("hydra/", "hydra.")) or override.type == OverrideType.DEL:
        return False
    options = groups().get(key)
    if options is None:
        return _check_key(key, override.input_line or key)
    elif elsewhere or not isinstance(override.value(), (str, type(None))) or override.is_sweep_override():
        pass  # a sweep or a list of options: Hydra looks at each
    elif override.value() not in options and not (key == "experiment" and override.value() is None):
        raise unknown_option(key, str(override.value()))
    return False


def unknown_option(group: str, option: str) -> UserError:
    options = groups()[group]
    if group == "topology" and option in NOT_A_TOPOLOGY:
        return UserError(f"topology={option}: tensor- and pipeline-parallel training is not offered; {NOT_A_TOPOLOGY[option]}.")
    return UserError(f"{group}={option}: no such {group}.{near(option, options)} Options: {', '.join(options)}.")


def _check_key(key: str, given: str) -> bool:
    """Walk the schema along a dotted key. True where the key is free: checked where it is used, not here."""
    node: Any = Config
    free = False
    parts = key.replace("/", ".").replace("[", ".").replace("]", "").split(".")
    for depth, part in enumerate(parts):
        origin = typing.get_origin(node)
        if origin is typing.Union:
            node = next(a for a in typing.get_args(node) if a is not type(None))
            origin = typing.get_origin(node)
        if origin is dict and dataclasses.is_dataclass(typing.get_args(node)[1]):  # any name, and below it keys of the schema
            free, node = True, typing.get_args(node)[1]
            continue
        if origin is dict or node is Any:
            return True
        if origin is list:
            node = typing.get_args(node)[0]
            continue
        hints = typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}
        if part not in hints:
            at = ".".join(parts[:depth])
            names = [".".join([*parts[:depth], name]) for name in hints] + (list(groups()) if not depth else [])
            where = f" in {at}" if at else ""
            raise UserError(f"{given}: no key {part!r}{where}.{near('.'.join(parts[: depth + 1]), names)}{_list(hints, where)}")
        node = hints[part]
    return free


def _list(hints: dict[str, Any], where: str) -> str:
    return f" Keys{where}: {', '.join(hints)}." if hints else ""


def translate(error: Exception) -> UserError:
    """What Hydra or OmegaConf refused, as one message that names key, value and rule."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    missing = getattr(error, "missing_cfg_file", None)
    if missing and "/" in str(missing):
        group, option = str(missing).split("/", 1)
        if group in groups():
            return unknown_option(group, option)
    for inner in reversed(chain):
        # Where a file is at fault Hydra keeps the key in its text only.
        named = re.search(r"full_key: (\S+)", str(inner))
        key = getattr(inner, "full_key", None) or (named.group(1) if named else None)
        if key:
            rule = next((line for line in str(inner).splitlines() if not line.startswith("In '")), str(inner))
            where = str(error).split(":", 1)[0] + ": " if str(error).startswith("In '") else ""
            try:
                _check_key(key, key)
            except UserError as unknown:
                return UserError(f"{where}{unknown}")
            return UserError(f"{where}{key}: {rule}.{_expected(key, rule)}")
    return UserError(" ".join(str(error).split()))


def _expected(key: str, rule: str) -> str:
    node: Any = Config
    for part in key.split("."):
        node = typing.get_type_hints(node).get(part) if dataclasses.is_dataclass(node) else None
    if isinstance(node, type) and hasattr(node, "__members__"):
        value = rule.split("'")[1] if "'" in rule else ""
        return near(value, node.__members__)
    name = getattr(node, "__name__", None) if typing.get_origin(node) is None else str(node).replace("typing.", "")
    return f" It takes {name}." if name else ""
