"""Write rows to files, and build configurations of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch.core.json_files import plain
from launch.schema import Data

CONF = Path(__file__).parents[2] / "conf/data"


def data_config(name: str, **keys: Any) -> DictConfig:
    """Return data=`name` with `keys` changed, as a rank reads it from config.yaml."""
    defaults = OmegaConf.load(CONF / f"{name}.yaml")
    merged = OmegaConf.merge(OmegaConf.structured(Data), defaults, keys)
    config = OmegaConf.create(plain(OmegaConf.to_object(merged)))
    OmegaConf.set_struct(config, True)
    return config


def jsonl(file: Path, rows: list[Any]) -> str:
    """Write rows as JSON and strings unchanged, one per line. Return the path."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)
