"""Compose overrides into one checked configuration.

Hydra composes it, and launch/config/wording.py translates Hydra's errors.
"""

from __future__ import annotations

import functools
import os
import pickle
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir, version
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import MISSING, DictConfig, OmegaConf, flag_override
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from launch.config import auto, follow_files, follow_run, thinking
from launch.config.request import Request, leaves
from launch.config.row_reward import follow_rows
from launch.config.wording import CONF, check_key, groups, translate
from launch.core.errors import UserError
from launch.inputs import model_config
from launch.inputs.paths import pinned
from launch.schema import Config, trainer_args
from launch.schema.data import Data, Source
from launch.schema.enums import Init
from launch.schema.method import Method

# What speed=auto may choose, topology.servers=auto (effective_batch), and an offer (overlap)
CHOOSABLE = (
    *("method.args.", "hardware.dataloader.", "step.", "topology.fsdp."),
    "effective_batch",
    "topology.overlap",
)
# Files with defaults, which speed=auto may change. It keeps the values of all other files.
DEFAULTS = ("config", "schema", "method/", "hardware/base/common")
SMOKE_SIZES = (
    *("method.args.", "model.", "data.", "adapter.", "effective_batch"),
    "topology.server_max_length",
)
PATHS = (
    *("model.path", "model.chat_template", "adapter.path", "data.path", "data.heldout_path"),
    *("data.chat_template", "data.cache", "data.pass_rates"),
)
ConfigStore.instance().store(name="schema", node=Config)
# OmegaConf reads conf/ with this class. The loader in C, which some builds of PyYAML lack, saves 40
# ms of every command.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]


def compose(overrides: Sequence[str], typed: Request | None = None) -> Config:
    """Return the composition of `overrides`, with every `auto` resolved. Raises UserError.

    `typed` are the overrides that the user typed, by default all of them. A smoke run does not
    change their values (smoke_keeps).
    """
    request = Request(overrides)
    typed = request if typed is None else typed
    # Hydra rejects this override, although it is the default.
    checked = Request(override for override in request.checked() if override != "experiment=null")
    try:
        config, run = _resolved(checked)
        _make_paths_absolute(config)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise translate(error) from error
    if typed is request:  # a phase of a pipeline has the pipeline's data
        follow_run.follow(config, request, run)
        _check_experiment(config, request)
    follow_rows(config, request.keys)
    thinking.follow_template(config, run)
    for key in typed.keys:
        group = key.partition(".")[0]
        if not config.method.reads(group):
            raise UserError(
                f"{key} with method={config.method.name}: this method does not read {group}, so "
                f"the key takes no effect. Remove {key}."
            )
    if config.model.path and config.model.init == Init.random and "model.init" in typed.keys:
        raise UserError(
            f"model.init=random takes no effect with model.path={config.model.path}, whose weights "
            "are loaded. Remove model.init, or for random weights use: model.path=null."
        )
    for name in ("speed_keeps", "smoke_keeps"):
        for key in getattr(config, name):
            check_key(key, f"{name}={key}")
    choosable = {key for key in request.keys if key.startswith(CHOOSABLE)}
    config.speed_keeps = sorted({*config.speed_keeps, *choosable})
    if config.smoke:
        sizes = {key for key in typed.keys if key.startswith(SMOKE_SIZES)}
        config.smoke_keeps = sorted({*config.smoke_keeps, *sizes})
    return config


def _check_experiment(config: Config, request: Request) -> None:
    """Raise UserError if the experiment sets an argument that only its own method has."""
    options = {override.key_or_group: str(override.value()) for override in request.parsed}
    if "method" not in options or options.get("experiment", "None") == "None":
        return
    known, keys = trainer_args.known(config), {key.rpartition(".")[2] for key in request.keys}
    unknown = [name for name in config.method.args if name not in known and name not in keys]
    if not unknown:
        return
    files = ("experiment=", "hydra.searchpath=")
    own = _compose(Request(line for line in request if line.startswith(files))).method.name
    if own == config.method.name:
        return
    experiment, method = f"experiment={options['experiment']}", f"method={config.method.name}"
    remedy = f"Leave out {experiment}, or {method}"
    if not (config.method.trains or config.method.has_cycles):
        remedy = f"Use: {method} model.path=<the run that trained the model>, without {experiment}"
    raise UserError(
        f"{experiment} is for method={own} and sets method.args.{unknown[0]}="
        f"{config.method.args[unknown[0]]}, which {method} does not have. {remedy}."
    )


def _resolved(request: Request) -> tuple[Config, dict[str, Any]]:
    """Return the composition with every `auto` resolved, and that of the run of its model.

    `speed_keeps` is completed from files.
    """
    composed = _compose(request)
    run = follow_run.source(composed)
    if composed.model.base_of:
        request = follow_run.with_base(request, run, composed.model.base_of)
        composed = _compose(request)
    followed = follow_files.follow(request, composed, run)
    if followed is not request:
        request, composed = followed, _compose(followed)
    # Hardware comes first, because the choices of other groups depend on it.
    for choose in (auto.hardware, auto.other_groups):
        chosen = choose(composed)
        if chosen:
            request = request.plus(*chosen)
            composed = _compose(request)
    try:
        config = typing.cast(Config, OmegaConf.to_object(composed))
    except MissingMandatoryValue as error:  # about the first key
        missing = sorted(OmegaConf.missing_keys(composed))
        raise UserError(
            f"{', '.join(missing)}: no value. Set one, for example {missing[0]}=..."
        ) from error
    if config.topology.overlap is None and auto.overlap(config):
        config.topology.overlap = True
    options = _group_options(request)
    if options is None or GlobalHydra.instance().is_initialized():
        # In a sweep or with a search path it is unknown which file sets a key, so keep all keys.
        keys = {f"method.args.{name}" for name in config.method.args}
        keys.add("hardware.dataloader.num_workers")
    else:
        keys = set(_compose_options(options)[1])
    config.speed_keeps = sorted({*config.speed_keeps, *keys})
    return config, run


def _make_paths_absolute(config: Config) -> None:
    """Make paths absolute, because ranks and later commands run in other directories."""
    config.run_root = str(Path(config.run_root).absolute())
    for key in PATHS:
        _make_absolute(config, key)
    for number, source in enumerate(config.data.sources):
        _make_absolute(source, "path", f"data.sources[{number}].")
    every: list[Data | Source] = [config.data, *config.data.sources]
    for rows in every:
        if rows.hub_id and rows.hub_id.startswith(("/", ".", "~")):  # a directory
            rows.hub_id, rows.revision = str(pinned(rows.hub_id)), None
    if "PYTHONPATH" in config.user_env:
        folders = filter(None, config.user_env["PYTHONPATH"].split(os.pathsep))
        config.user_env["PYTHONPATH"] = os.pathsep.join(str(pinned(folder)) for folder in folders)
    if config.model.path:
        config.model.path = str(model_config.directory_of(config.model.path))
    # The arguments of method=raft include its phases' arguments.
    phases = [config.method.args.get(name) for name in ("sample", "evaluate")]
    for args in (config.method.args, *(phase for phase in phases if isinstance(phase, dict))):
        for name in ("reuse", "lm_eval_include", "gguf_converter", "results_from", "dataset"):
            if isinstance(args.get(name), str):
                args[name] = str(pinned(args[name]))


def _make_absolute(holder: Any, key: str, prefix: str = "") -> None:
    *groups, name = key.split(".")
    holder = functools.reduce(getattr, groups, holder)
    path = getattr(holder, name)
    if path == "":  # often from an unset shell variable
        raise UserError(f"{prefix}{key}=: the path is empty. Use: {prefix}{key}=<a path or null>.")
    setattr(holder, name, path and str(pinned(path)))


def leaf(config: Config, key: str) -> object:
    """Return the value at a dotted key; None if a free mapping does not have the key."""
    node: object = config
    for part in key.split("."):
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


# The functions below compose as Hydra does, but faster.


def _interpolation_map(overrides: Any, defaults_list: list[Any], self_added: bool) -> DictConfig:
    """Return the choices that interpolations in a defaults list read; empty if it has none."""
    if any(default.is_interpolation() for default in defaults_list):
        return _full_map(overrides, defaults_list, self_added)
    return _NO_CHOICES


_NO_CHOICES = OmegaConf.create()
# Hydra makes this map of nodes for every file, in a quarter of the time of a composition.
_full_map = hydra_defaults._create_interpolation_map
hydra_defaults._create_interpolation_map = _interpolation_map


def _compose(request: Request) -> DictConfig:
    """Compose as Hydra does: first all group options, then keys in order.

    Composing the options takes 40 ms, so it is cached. `auto`, find=, pipelines and sweeps compose
    the same options dozens of times in one process.
    """
    if GlobalHydra.instance().is_initialized():  # inside a sweep
        return hydra_compose("config", [*request])
    options = _group_options(request)
    if options is None:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("config", [*request])
    composed = pickle.loads(_compose_options(options)[0])  # takes 2 ms
    key_overrides = [each for each in request.parsed if each.key_or_group not in groups()]
    ConfigLoaderImpl._apply_overrides_to_config(key_overrides, composed)
    return typing.cast(DictConfig, composed)


def arguments(options: Request) -> Collection[str]:
    """Return the arguments of the method that group options choose. Raises UserError."""
    method = OmegaConf.to_object(_compose(options).method)
    return trainer_args.known(Config(method=typing.cast(Method, method)))


def _group_options(request: Request) -> Request | None:
    """Return the overrides that choose an option; None if the request needs Hydra's compose()."""
    options = [override for override in request.parsed if override.key_or_group in groups()]
    is_plain = all(
        o.type == OverrideType.CHANGE and o.package is None and isinstance(o.value(), str)
        for o in options
    )
    needs_hydra = any(
        o.is_sweep_override() or o.is_hydra_override() or "/" in o.key_or_group
        for o in request.parsed
    )
    return Request(str(o.input_line) for o in options) if is_plain and not needs_hydra else None


@functools.cache
def _compose_options(options: Request) -> tuple[bytes, frozenset[str]]:
    """Return the pickled composition of options, and the keys that speed=auto must keep.

    Files other than DEFAULTS set these keys. Hydra decides the files to merge and their order.
    The schema checks the merged values once, which is three times as fast as after each file.
    """
    defaults = hydra_defaults.create_defaults_list(
        CachingConfigRepository(_files()),
        "config",
        options.parsed,
        prepend_hydra=False,
        skip_missing=False,
    ).defaults
    keys_to_keep: set[str] = set()
    merged: dict[str, Any] = {}
    for default in defaults:
        path = str(default.config_path)
        values = _files().values[path]
        for key in reversed(default.package.split(".") if default.package else []):
            values = {key: values}
        _merge(merged, values)
        if not path.startswith(DEFAULTS):
            keys_to_keep |= {key for key in leaves("", values) if key.startswith(CHOOSABLE)}
    try:
        composed = _typed(merged)
    except OmegaConfBaseException:  # repeat it with Hydra, whose error contains the file's name
        with initialize_config_dir(str(CONF), version_base="1.3"):
            hydra_compose("config", [*options])
        raise
    OmegaConf.set_struct(composed, True)
    return pickle.dumps(composed), frozenset(keys_to_keep)


def _typed(values: dict[str, Any]) -> DictConfig:
    """Return values as nodes of the schema. Raises an error of OmegaConf for a wrong value.

    Most compositions of a process share most groups, so their nodes are cached.
    """
    composed = pickle.loads(_schema())
    identities = {key: (key, repr(value)) for key, value in values.items()}
    new = {key: value for key, value in values.items() if identities[key] not in _nodes}
    with flag_override(composed, "no_deepcopy_set_nodes", True):
        composed.merge_with(new)
    for key, identity in identities.items():
        if key in new:
            node = composed._get_node(key)
            node._set_parent(None)
            _nodes[identity] = pickle.dumps(node)
        else:
            node = composed._content[key] = pickle.loads(_nodes[identity])
        node._set_parent(composed)
    return typing.cast(DictConfig, composed)


_nodes: dict[tuple[str, str], bytes] = {}


@functools.cache
def _schema() -> bytes:
    return pickle.dumps(ConfigStore.instance().repo["schema.yaml"].node)


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge nested values into `into` as OmegaConf does: replace lists, and ignore `???`."""
    for key, value in more.items():
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value)
        elif value != MISSING or key not in into:
            into[key] = value


class _Files(ConfigRepository):
    """Read each file of conf/ once per process.

    Hydra gets only the defaults list of a file; `values` has its values. Both exclude Hydra's own
    settings, which hydra_compose would drop in the end, and the schema, which has no defaults.
    """

    def __init__(self) -> None:
        version.setbase("1.3")
        super().__init__(ConfigSearchPathImpl())
        self.loader = get_yaml_loader()
        self.values: dict[str, dict[str, Any]] = {"schema": {}}
        schema = ConfigResult("schema", "schema", OmegaConf.create(), {"package": None}, [])
        self.results: dict[str, bytes] = {"schema": pickle.dumps(schema)}

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        self.sources = [FileConfigSource("main", f"file://{CONF}")]

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigRepository:
        """Return self. Hydra needs a copy only for search paths, which do not use this class."""
        return self

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.results:
            self.results[config_path] = pickle.dumps(self._read(config_path))
        return typing.cast(ConfigResult | None, pickle.loads(self.results[config_path]))

    def _read(self, config_path: str) -> ConfigResult | None:
        path = CONF / f"{config_path}.yaml"
        if not path.is_file():
            return None
        text = path.read_text(encoding="utf-8")
        values = yaml.load(text, self.loader) or {}
        if not isinstance(values, dict):
            raise UserError(f"{path}: contains no keys. Write one in each line, such as seed: 1.")
        values.pop("hydra", None)
        raw_defaults = OmegaConf.create(values.pop("defaults", None) or [])
        self.values[config_path] = values
        defaults = [
            default
            for default in self._create_defaults_list(config_path, raw_defaults)
            if not str(getattr(default, "group", "")).startswith("hydra/")
        ]
        header = ConfigSource._get_header_dict(text)
        return ConfigResult("main", str(path), OmegaConf.create(), header, defaults)


_files = functools.cache(_Files)
