"""Overrides in, one checked composition out. Hydra does the composing; this file says in a person's words what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch import auto
from launch.command_line.wording import HUB, cannot_go, fields, refused, type_of
from launch.errors import UserError, near
from launch.schema import Config, Phase, Task
from launch.schema.data import Source
from launch.schema.enums import Mode
from launch.trainer_args import OWNED, lock

CONF = Path(__file__).parents[1] / "conf"
OVERRIDE = "An override is key=value or group=option"
CHOOSABLE = ("method.args.", "hardware.dataloader.", "step.")  # what speed=auto may choose
DEFAULTS = ("config", "schema", "method/", "hardware/base/common")  # files whose values are defaults; what others say was given
SIZED = ("method.args.", "model.", "data.", "adapter.", "effective_batch")  # where smoke=true makes things smaller
LONGEST_SHOWN = 80  # characters of what is no override
ConfigStore.instance().store(name="schema", node=Config)

# Entries of lists, by the name of their class: the list's key, and the keys of an entry.
LISTED = {
    kind.__name__: (key, [field.name for field in dataclasses.fields(kind)])
    for key, kind in {"phases": Phase, "data.tasks": Task, "data.sources": Source}.items()
}

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
    smoke=true their values stay as they are (smoke_keeps). Raises UserError.
    """
    kept = keys(overrides if given is None else given)
    if any(key.startswith("chosen") for key in keys(overrides)):
        raise UserError("chosen: what a plan has chosen, which its record keeps. Leave it out: what you give stays as you give it.")
    overrides = [o for o in freed(overrides) if o != "experiment=null"]  # the default, which Hydra refuses to be told
    try:
        config = _absolute(_resolved(overrides))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise translate(error, overrides) from error
    _check_read(config, kept)
    for key in config.speed_keeps:
        _check_key(key, f"speed_keeps={key}")
    config.speed_keeps = sorted({*config.speed_keeps, *(key for key in keys(overrides) if key.startswith(CHOOSABLE))})
    for key in config.smoke_keeps:
        _check_key(key, f"smoke_keeps={key}")
    if config.smoke:
        config.smoke_keeps = sorted({*config.smoke_keeps, *(key for key in kept if key.startswith(SIZED))})
    return config


def _resolved(overrides: list[str]) -> Config:
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
    config = typing.cast(Config, OmegaConf.to_object(composed))
    config.speed_keeps = sorted({*config.speed_keeps, *_given_in_files(overrides, config)})
    return config


def _given_in_files(overrides: list[str], config: Config) -> set[str]:
    """Keys that speed=auto may choose and a file gives that is not DEFAULTS: an experiment, a model with a method, a GPU's own, conf/local.

    All that there are where Hydra composed on its own way (inside a sweep of Hydra's, with a search path): nobody knows then.
    """
    options = _group_options(OverridesParser.create().parse_overrides(overrides))
    if options is None or GlobalHydra.instance().is_initialized():
        args = {f"method.args.{name}" for name in config.method.args}
        return args | {"hardware.dataloader.num_workers"}
    return set(_options(options)[1])


def keys(overrides: list[str]) -> list[str]:
    """Keys that overrides give a value, none of them a group; those of a mapping one by one."""
    found: list[str] = []
    for override in parse(overrides):
        key = override.key_or_group
        if override.type != OverrideType.DEL and key not in groups() and not key.startswith(("hydra.", "hydra/")):
            found += leaves(key, override.value())
    return found


def leaves(key: str, value: Any) -> dict[str, Any]:
    """{a.b: 1} for {b: 1} at a."""
    if not isinstance(value, dict):
        return {key: value}
    return {leaf: given for name, inner in value.items() for leaf, given in leaves(f"{key}.{name}", inner).items()}


def _check_read(config: Config, given: list[str]) -> None:
    """Refuses keys of groups that the method does not read; rules refuse another option of such a group. Raises UserError."""
    for key in given:
        group = key.partition(".")[0]
        if not config.method.reads(group):
            raise UserError(f"{key} with method={config.method.name}: it reads nothing of {group}, and would ignore it. Leave it out.")


def _absolute(config: Config) -> Config:
    """Paths as seen from where the command was typed: ranks, records and later commands stand elsewhere."""
    config.run_root = str(Path(config.run_root).absolute())
    of_data = ("path", "heldout_path", "chat_template", "cache", "pass_rates")
    sources = [(f"data.sources[{n}]", source, ("path",)) for n, source in enumerate(config.data.sources)]
    paths = [("model", config.model, ("path", "chat_template")), ("adapter", config.adapter, ("path",)), ("data", config.data, of_data)]
    for key, group, names in [*paths, *sources]:
        for name in names:
            given = getattr(group, name)
            if given == "":  # often of a variable that the shell does not have
                raise UserError(f"{key}.{name}=: an empty path. Use: a path, or null for none.")
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
    found, parsed = [], parse(overrides)
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
    if GlobalHydra.instance().is_initialized():  # inside a sweep Hydra is up already
        return hydra_compose("config", overrides)
    parsed = OverridesParser.create().parse_overrides(overrides)
    options = _group_options(parsed)
    if options is None:
        return _hydra(overrides)
    composed = pickle.loads(_options(options)[0])  # a copy: a hundredth of the time
    ConfigLoaderImpl._apply_overrides_to_config([o for o in parsed if o.key_or_group not in groups()], composed)
    return typing.cast(DictConfig, composed)


def _group_options(parsed: list[Override]) -> tuple[str, ...] | None:
    """Of overrides those that choose an option of a group; None where Hydra has to see all of them at once."""
    options = [o for o in parsed if o.key_or_group in groups()]
    plain = all(o.type == OverrideType.CHANGE and o.package is None and isinstance(o.value(), str) for o in options)
    if not plain or any(o.is_sweep_override() or o.is_hydra_override() or "/" in o.key_or_group for o in parsed):
        return None
    return tuple(str(o.input_line) for o in options)


@functools.cache
def _options(overrides: tuple[str, ...]) -> tuple[bytes, frozenset[str]]:
    """What options of groups alone compose to, pickled; and the keys that files other than DEFAULTS give a value."""
    _ReadOnce.used = []
    composed = pickle.dumps(_of_files(overrides))
    return composed, frozenset(key for path in _ReadOnce.used for key in _given_in(path))


def _given_in(path: str) -> Iterator[str]:
    """Keys that speed=auto may choose, of a file of conf/."""
    found = pickle.loads(_ReadOnce.parsed[path])
    if found is None or path.startswith(DEFAULTS):
        return
    content = typing.cast(dict[str, Any], OmegaConf.to_container(found.config, resolve=False))
    group = "" if found.header.get("package") == "_global_" else path.partition("/")[0]
    for name, value in content.items():
        yield from (key for key in leaves(f"{group}.{name}".lstrip("."), value) if key.startswith(CHOOSABLE))


def _of_files(options: tuple[str, ...]) -> DictConfig:
    """Compose options of groups as Hydra does, but without its own settings: a third of all files, which hydra_compose drops in the end."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = typing.cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())
        repository = CachingConfigRepository(_ReadOnce(loader.config_search_path))
        parsed = OverridesParser.create().parse_overrides(list(options))
        found = create_defaults_list(repository, "config", parsed, prepend_hydra=False, skip_missing=False)
        composed = loader._compose_config_from_defaults_list(found.defaults, repository)
    OmegaConf.set_struct(composed, True)
    return composed


class _ReadOnce(ConfigRepository):
    """Each file of conf/ is parsed once in a process; what it says of Hydra itself is left out."""

    parsed: typing.ClassVar[dict[str, bytes]] = {}
    used: typing.ClassVar[list[str]] = []  # files of the composition that is being made

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigRepository:
        """Hydra copies it, with every schema, in case the composition has a search path of its own; those compose without it."""
        return self

    def load_config(self, config_path: str) -> ConfigResult | None:
        self.used.append(config_path)
        if config_path not in self.parsed:
            found = super().load_config(config_path)
            if found is not None and isinstance(found.config, DictConfig):
                found.defaults_list = [one for one in found.defaults_list or [] if not str(getattr(one, "group", "")).startswith("hydra/")]
                if "hydra" in found.config:
                    del found.config["hydra"]
            self.parsed[config_path] = pickle.dumps(found)
        return typing.cast(ConfigResult | None, pickle.loads(self.parsed[config_path]))


def _hydra(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", overrides)


def parse(overrides: list[str]) -> list[Override]:
    """Raises UserError for the first that is no override."""
    found, parser = [], OverridesParser.create()
    for given in overrides:
        try:
            found += parser.parse_overrides([given])
        except (HydraException, ValueError) as error:  # ValueError: more digits than Python reads
            shown = given if given.isprintable() and given.strip() else repr(given)
            shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
            meant = _options_named(given)
            remedy = f" Did you mean {' or '.join(meant)}?" if meant else f" {OVERRIDE}; quote values with special characters."
            raise UserError(f"{shown}: {_why_none(given)}.{remedy}") from error
    return found


def _options_named(word: str) -> list[str]:
    """group=word of each group that has such an option; the mode, too."""
    return [f"{group}={word}" for group, options in {**groups(), "mode": [*Mode.__members__]}.items() if word in options]


def _why_none(given: str) -> str:
    """What is wrong with what is no override, as far as it shows."""
    if "=" not in given and not given.startswith("~"):
        return "no '=' in it"
    if any(given.count(quote) % 2 for quote in "'\""):
        return "a quote is opened and not closed"
    if any(given.count(opening) != given.count(closing) for opening, closing in ("[]", "{}", "()")):
        return "its brackets do not match"
    return "no override"


def _check_override(override: Override, elsewhere: bool) -> bool:
    """Refuse an option or a key that does not exist, before Hydra does it in longer words. True for a free key."""
    key = override.key_or_group
    if key.startswith(("hydra/", "hydra.")):
        return False
    if not key:
        raise UserError(f"{override.input_line}: no key in it. {OVERRIDE}.")
    if override.type != OverrideType.DEL and override.value() == {} and _holds_keys(key):
        raise UserError(
            f"{override.input_line}: merged with what is there, it would change nothing. Use: '~{key}.NAME' for each that is to go."
        )
    options = groups().get(key)
    if override.type == OverrideType.DEL:
        if options and key in fields(Config):
            raise UserError(f"{override.input_line}: every composition has one. Use: {key}=<option>, one of {', '.join(options)}.")
        if options is None:
            _check_key(key, override.input_line or key)
        return False
    if options is None:
        meant = [] if key.partition(".")[0] in fields(Config) else _options_named(str(override.value()))
        if meant:
            raise UserError(f"{override.input_line}: no key {key!r}. Did you mean {' or '.join(meant)}?")
        return _check_key(key, override.input_line or key)
    elif isinstance(listed := override.value(), list):
        names = [str(name) for name in listed] or options[:1]
        several = f", or -m {key}={','.join(names)} for a run of each" if len(names) > 1 else ""
        raise UserError(f"{override.input_line}: a list, and a composition has one {key}. Use: {key}={names[0]}{several}.")
    elif isinstance(override.value(), (int, float)):
        raise unknown_option(key, str(override.value()))
    elif elsewhere or not isinstance(override.value(), (str, type(None))) or override.is_sweep_override():
        pass  # a sweep: Hydra looks at each
    elif override.value() not in options and not (key == "experiment" and override.value() is None):
        raise unknown_option(key, str(override.value()))
    return False


def unknown_option(group: str, option: str) -> UserError:
    options = groups()[group]
    if group == "topology" and option in NOT_A_TOPOLOGY:
        return UserError(f"topology={option}: tensor- and pipeline-parallel training is not offered; {NOT_A_TOPOLOGY[option]}.")
    hub = HUB.format(option) if group == "model" and "/" in option else ""
    as_here = re.sub(r"[^a-z0-9]+", "_", option.rpartition("/")[2].lower())  # Qwen/Qwen3-4B is the hub's name of qwen3_4b
    meant = near(option, options) or near(as_here, options)
    return UserError(f"{group}={option}: no such {group}.{meant}{hub} Options: {', '.join(options)}.")


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
        hints = fields(node)
        if part not in hints:
            at = ".".join(parts[:depth])
            if not at and (meant := _ending_in(part)):
                raise UserError(f"{given}: no key {part!r} by itself. Use: {' or '.join(meant)}.")
            names = [".".join([*parts[:depth], name]) for name in hints] + (list(groups()) if not depth else [])
            where = f" in {at}" if at else ""
            raise UserError(f"{given}: no key {part!r}{where}.{near('.'.join(parts[: depth + 1]), names)}{_list(hints, where)}")
        node = hints[part]
    return free or typing.get_origin(node) is dict


def _ending_in(name: str) -> list[str]:
    """Keys in a group whose last part is `name`, and method.args, or what decides it there, where a method has such an argument."""
    found = [f"{group}.{name}" for group, node in fields(Config).items() if name in fields(node)]
    is_argument = any(name in arguments for arguments in lock()["arguments"].values())
    return found + ([OWNED.get(name, f"method.args.{name}")] if is_argument else [])


def _list(hints: dict[str, Any], where: str) -> str:
    return f" Keys{where}: {', '.join(hints)}." if hints else ""


def translate(error: Exception, overrides: Sequence[str] = ()) -> UserError:
    """What Hydra or OmegaConf refused of `overrides`, as one message that names key, value and rule."""
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
            rule = next((line for line in str(inner).splitlines() if not line.startswith("In '")), str(inner)).rstrip(".")
            where = str(error).split(":", 1)[0] + ": " if str(error).startswith("In '") else ""
            item = re.search(r"object_type=(\w+)", str(inner))
            entry = LISTED.get(item.group(1)) if item else None
            key = _in_entry(key)
            if entry and "." not in key:  # OmegaConf names it from the entry on
                listed, keys = entry
                if key in keys:
                    key = f"{listed}[n].{key}"  # which entry it is nobody says
                    return UserError(where + refused(key, inner, rule))
                return UserError(f"{where}{listed}: {rule}.{near(key, keys)} Keys of an entry: {', '.join(keys)}.")
            try:
                _check_key(key, key)
            except UserError as unknown:
                typed = re.search(r"override '?[+~]*([\w.]+)", str(error))
                if "Key '" in rule or not typed:
                    return UserError(f"{where}{unknown}")
                key = typed.group(1)  # where OmegaConf names the last part only
            return UserError(where + refused(key, inner, rule))
    return UserError(_of_hydra(" ".join(str(error).split()), overrides))


def _in_entry(key: str) -> str:
    """The whole key of a list in an entry of a list, of which OmegaConf names `overrides[0]`: of which entry nobody says."""
    name, is_item, _ = key.partition("[")
    listed = next((listed for listed, keys in LISTED.values() if is_item and name in keys), None)
    return f"{listed}[n].{key}" if listed else key


def _of_hydra(said: str, overrides: Sequence[str]) -> str:
    """What names no key of the schema: Hydra's own words, with the remedy where there is one."""
    several = re.match(r"Ambiguous value for argument '[+~]*(.*?)' 1\. To use it as a list", said)
    if several:
        key = several.group(1).partition("=")[0]
        as_list = "" if key in groups() else f", or {key}=[...] for a list"
        return f"{several.group(1)}: several values, and a run has one. Use: one value, or -m for a sweep over them{as_list}."
    there = re.match(r"Could not append to config\. An item is already at '([^']*)'", said)
    if there:
        return f"+{there.group(1)}: it has a value already. Use: {there.group(1)}=<value>, without the plus."
    missing = re.match(r"Could not delete from config\. '([^']*)' does not exist", said)
    if missing:
        return _nothing_to_delete(missing.group(1), overrides)
    differs = re.match(r"Could not delete from config\. The value of '([^']*)' is (.*) and not (.*)\.$", said)
    if differs:
        key, is_now, given = differs.groups()
        return f"~{key}={given}: its value is {is_now}. Use: '~{key}', which deletes it whatever it is."
    return said


def _nothing_to_delete(key: str, overrides: Sequence[str]) -> str:
    """Near names are of the options that were chosen: Hydra takes these first, and of the keys none after the one that it refused."""
    above, _, name = key.rpartition(".")
    if name in fields(type_of(above) if above else Config):
        return cannot_go(key)  # it is null, which Hydra takes for missing
    chosen = [o for o in overrides if o.partition("=")[0] in (*groups(), "hydra.searchpath")]
    names = list(OmegaConf.select(_compose(chosen), above) or {})
    if name in names:
        return f"~{key}: it is null, and there is nothing to delete. Leave it out."
    known = f" Keys in {above}: {', '.join(names)}." if names else ""
    return f"~{key}: there is none to delete.{near(key, [f'{above}.{one}' for one in names])}{known or ' Leave it out.'}"


def _holds_keys(key: str) -> bool:
    node = type_of(key)
    return dataclasses.is_dataclass(node) or typing.get_origin(node) is dict
