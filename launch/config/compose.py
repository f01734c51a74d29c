"""Compose overrides into one checked configuration.

Hydra composes; launch/config/wording.py rephrases its errors.
"""

from __future__ import annotations

import functools
import pickle
import typing
from collections.abc import Sequence
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
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import MISSING, DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from launch.config import auto
from launch.config.request import Request, leaves
from launch.config.wording import CONF, check_key, groups, translate
from launch.core.errors import UserError
from launch.schema import Config

CHOOSABLE = ("method.args.", "hardware.dataloader.", "step.")  # what speed=auto may choose
# Files that hold defaults. A value in any other file counts as chosen.
DEFAULTS = ("config", "schema", "method/", "hardware/base/common")
# What smoke=true makes smaller.
SIZED = ("method.args.", "model.", "data.", "adapter.", "effective_batch")
PATHS = (
    *("model.path", "model.chat_template", "adapter.path", "data.path", "data.heldout_path"),
    *("data.chat_template", "data.cache", "data.pass_rates"),
)
ConfigStore.instance().store(name="schema", node=Config)
# OmegaConf reads conf/ with this class. libyaml's, if it was built, saves 40 ms of every command.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]


def compose(overrides: Sequence[str], typed: Request | None = None) -> Config:
    """Return the composition of `overrides`, with every `auto` resolved. Raises UserError.

    `typed` are the user's own overrides, by default all. A smoke run keeps their values
    (smoke_keeps).
    """
    request = Request(overrides)
    typed = request if typed is None else typed
    # Hydra rejects this override, although it is the default.
    checked = Request(override for override in request.checked() if override != "experiment=null")
    try:
        config = _absolute(_resolved(checked))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise translate(error) from error
    for key in typed.keys:
        group = key.partition(".")[0]
        if not config.method.reads(group):
            raise UserError(
                f"{key} with method={config.method.name}: this method does not read {group}, so "
                "the key takes no effect. Leave it out."
            )
    for name in ("speed_keeps", "smoke_keeps"):
        for key in getattr(config, name):
            check_key(key, f"{name}={key}")
    choosable = {key for key in request.keys if key.startswith(CHOOSABLE)}
    config.speed_keeps = sorted({*config.speed_keeps, *choosable})
    if config.smoke:
        sized = {key for key in typed.keys if key.startswith(SIZED)}
        config.smoke_keeps = sorted({*config.smoke_keeps, *sized})
    return config


def _resolved(request: Request) -> Config:
    composed = _compose(request)
    # Hardware comes first, because the choices of other groups follow from it.
    for choose in (auto.hardware, auto.others):
        chosen = choose(composed)
        if chosen:
            request = request.plus(*chosen)
            composed = _compose(request)
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise UserError(f"{', '.join(missing)}: no value. Set one, for example {missing[0]}=...")
    config = typing.cast(Config, OmegaConf.to_object(composed))
    if config.topology.overlap is None and auto.overlap(config):
        config.topology.overlap = True
    config.speed_keeps = sorted({*config.speed_keeps, *_given_in_files(request, config)})
    return config


def _given_in_files(request: Request, config: Config) -> set[str]:
    """Return the keys that speed=auto may choose but that a file other than DEFAULTS sets.

    Within a sweep or with a search path, the file of a key is unknown, so return all such keys.
    """
    options = _group_options(request)
    if options is None or GlobalHydra.instance().is_initialized():
        args = {f"method.args.{name}" for name in config.method.args}
        return args | {"hardware.dataloader.num_workers"}
    return set(_of_options(options)[1])


def _absolute(config: Config) -> Config:
    """Make paths absolute: ranks, records and later commands run in other directories."""
    config.run_root = str(Path(config.run_root).absolute())
    for key in PATHS:
        _make_absolute(config, key)
    for number, source in enumerate(config.data.sources):
        _make_absolute(source, "path", f"data.sources[{number}].")
    if config.model.path:
        model = Path(config.model.path)
        is_run = (model / "record.json").is_file() and not (model / "config.json").is_file()
        config.model.path = str(model / "model" if is_run else model)
    # method=raft has arguments for its phases.
    phases = [config.method.args.get(name) for name in ("sample", "evaluate")]
    for args in (config.method.args, *(phase for phase in phases if isinstance(phase, dict))):
        for name in ("reuse", "lm_eval_include", "gguf_converter", "results_from"):
            if isinstance(args.get(name), str):
                args[name] = str(Path(args[name]).expanduser().absolute())
    return config


def _make_absolute(holder: Any, key: str, prefix: str = "") -> None:
    *groups, name = key.split(".")
    holder = functools.reduce(getattr, groups, holder)
    path = getattr(holder, name)
    if path == "":  # often from an unset shell variable
        raise UserError(f"{prefix}{key}=: an empty path. Use: {prefix}{key}=<a path or null>.")
    setattr(holder, name, path and str(Path(path).expanduser().absolute()))


def leaf(config: Config, key: str) -> object:
    """Return the value at a dotted key; None for a free key without one."""
    node: object = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


# Hydra


def _compose(request: Request) -> DictConfig:
    """Compose as Hydra does: first all group options, then keys in order.

    Options are the slow part, a tenth of a second, and they repeat: `auto`, find=, pipelines and
    sweeps compose dozens of times in one process.
    """
    if GlobalHydra.instance().is_initialized():  # inside a sweep
        return hydra_compose("config", [*request])
    options = _group_options(request)
    if options is None:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("config", [*request])
    composed = pickle.loads(_of_options(options)[0])  # a copy, in a hundredth of the time
    of_keys = [override for override in request.parsed if override.key_or_group not in groups()]
    ConfigLoaderImpl._apply_overrides_to_config(of_keys, composed)
    return typing.cast(DictConfig, composed)


def _group_options(request: Request) -> Request | None:
    """Return the overrides that choose an option; None if only Hydra can compose them."""
    options = [override for override in request.parsed if override.key_or_group in groups()]
    is_plain = all(
        o.type == OverrideType.CHANGE and o.package is None and isinstance(o.value(), str)
        for o in options
    )
    for_hydra = any(
        o.is_sweep_override() or o.is_hydra_override() or "/" in o.key_or_group
        for o in request.parsed
    )
    return Request(str(o.input_line) for o in options) if is_plain and not for_hydra else None


@functools.cache
def _of_options(options: Request) -> tuple[bytes, frozenset[str]]:
    """Return the pickled composition of options, and keys set in files other than DEFAULTS.

    Hydra decides which files make it up, and in which order. Their values are merged before the
    schema checks them, which takes a third of the time of checking after each file.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = typing.cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())
        files = CachingConfigRepository(_Files(loader.config_search_path))
        defaults = create_defaults_list(
            files, "config", options.parsed, prepend_hydra=False, skip_missing=False
        ).defaults
        chosen: set[str] = set()  # keys set by files that speed=auto may choose
        merged: dict[str, Any] = {}
        for default in defaults:
            path = str(default.config_path)
            values = _nested(_Files.read[path], default.package)
            _merge(merged, values)
            if not path.startswith(DEFAULTS):
                chosen |= {key for key in leaves("", values) if key.startswith(CHOOSABLE)}
        composed = pickle.loads(_schema())
        try:
            with flag_override(composed, "no_deepcopy_set_nodes", True):
                composed.merge_with(merged)
        except OmegaConfBaseException:  # Hydra's own error names the file
            hydra_compose("config", [*options])
            raise
    OmegaConf.set_struct(composed, True)
    return pickle.dumps(composed), frozenset(chosen)


@functools.cache
def _schema() -> bytes:
    return pickle.dumps(ConfigStore.instance().load("schema.yaml").node)


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge nested values as OmegaConf does: lists are replaced, and `???` replaces nothing."""
    for key, value in more.items():
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value)
        elif value != MISSING or key not in into:
            into[key] = value


def _nested(values: dict[str, Any], package: str | None) -> dict[str, Any]:
    """Return `values` nested under the keys of a dotted package."""
    for key in reversed(package.split(".") if package else []):
        values = {key: values}
    return values


class _Files(ConfigRepository):
    """Read each file of conf/ once per process.

    Hydra gets only a file's defaults; `read` keeps its values. Both leave out Hydra's own settings,
    a third of all files, which hydra_compose drops in the end.
    """

    results: typing.ClassVar[dict[str, bytes]] = {}
    read: typing.ClassVar[dict[str, dict[str, Any]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigRepository:
        """Return itself: Hydra copies it only for search paths, which compose without it."""
        return self

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.results:
            file = super().load_config(config_path)
            if file is not None:
                values: Any = {}
                if not file.is_schema_source:
                    values = OmegaConf.to_container(file.config, resolve=False) or {}
                values.pop("hydra", None)
                self.read[config_path] = values
                file.config = OmegaConf.create()
                file.defaults_list = [
                    default
                    for default in file.defaults_list or []
                    if not str(getattr(default, "group", "")).startswith("hydra/")
                ]
            self.results[config_path] = pickle.dumps(file)
        return typing.cast(ConfigResult | None, pickle.loads(self.results[config_path]))
