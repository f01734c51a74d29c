"""Evaluate a run's model on the held-out rows and by the rewards of that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.config.request import Request
from launch.core.json_files import read_json
from launch.schema import Choice, Config, trainer_args
from launch.schema.data import Data

# The keys of data that held-out rows depend on. Others, such as data.limit, are for training.
HELDOUT_KEYS = (
    *("name", "kind", "tasks", "num_train", "num_heldout", "seed", "path", "heldout_path"),
    *("hub_id", "revision", "subset", "split", "heldout_split", "sources", "columns"),
    *("answer_pattern", "system_prompt", "filter", "heldout_fraction", "chat_template"),
)


def follow(config: Config, request: Request) -> None:
    """Set data and rewards of an evaluation to those of the run that trained its model.

    Keys of the command stay. With data= or experiment=, nothing is taken from the run.
    """
    run = _run(config, request)
    data = _data(run.get("data"), config.data, request)
    if data is None:
        return
    config.data = data
    method = run.get("method") or {}
    if any(str(override.key_or_group).startswith("method.reward") for override in request.parsed):
        return
    rewards, fields = method.get("rewards") or {}, trainer_args.lock()["rewards"]
    # Others, such as a penalty of length, would count correct answers as wrong.
    judges = {name: weight for name, weight in rewards.items() if fields.get(name)}
    config.method.rewards = judges or {name: w for name, w in rewards.items() if "." in name}
    config.method.reward_chain = [x for x in method.get("reward_chain") or [] if x in judges]
    config.method.reward_pattern = method.get("reward_pattern")


def choices(config: Config, request: Request) -> list[Choice]:
    """Return what `follow` took from the run, for the plan."""
    run = _run(config, request)
    if _data(run.get("data"), config.data, request) is None:
        return []
    reason = f"of the run in model.path={config.model.path}"
    values = {"data": config.data.name, "method.rewards": config.method.rewards}
    return [Choice(key, value, reason) for key, value in values.items() if value]


def _run(config: Config, request: Request) -> dict[str, Any]:
    """Return the composition of the run that left the evaluated model; {} to follow none."""
    typed = {str(override.key_or_group) for override in request.parsed}
    is_followed = config.method.measures_model and not {"data", "experiment"} & typed
    return composition(config.model.path) if is_followed else {}


def composition(path: str | None) -> dict[str, Any]:
    """Return the composition of the run that trained a model. An export has its source's."""
    record = read_json(Path(path).parent / "record.json") if path else None
    recorded: dict[str, Any] = (record or {}).get("composition") or {}
    if (recorded.get("method") or {}).get("kind") == "exporter":
        return composition((recorded.get("model") or {}).get("path"))
    return recorded


def _data(recorded: dict[str, Any] | None, composed: Data, request: Request) -> Data | None:
    """Return the run's data with the keys of the command; None without held-out rows."""
    if not recorded:
        return None
    values = {key: recorded[key] for key in HELDOUT_KEYS if key in recorded}
    typed = [key.partition(".")[2] for key in request.keys if key.startswith("data.")]
    try:
        data = OmegaConf.merge(OmegaConf.structured(Data), values)
        for key in typed:
            OmegaConf.update(data, key, OmegaConf.select(OmegaConf.structured(composed), key))
        followed: Any = OmegaConf.to_object(data)
    except OmegaConfBaseException:  # a record of another version
        return None
    return followed if followed.has_heldout else None
