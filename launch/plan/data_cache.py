"""Locate prepared rows, and the statistics of them that an earlier run or preview wrote.

The launcher does not read data. It gets the statistics that recipes/data/data_prepare.py stored
under the same key.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from launch.core.json_files import plain, read_json
from launch.inputs import paths, sample_files
from launch.inputs.jsonl_files import named_files
from launch.machine.detect import Host
from launch.schema import Config, trainer_args

RECIPES = Path(__file__).parents[2] / "recipes"
# The arguments that change the rows, their tokens, truncation or packing.
# fmt: off
ARGUMENTS = [
    "max_length", "packing", "packing_strategy", "truncation_mode", "completion_only_loss",
    "assistant_only_loss", "per_device_train_batch_size", "max_completion_length", "max_steps",
]
# fmt: on
ASIDE = ("preview", "cache")  # keys of data that do not change rows
# Counts of the rows that were left out, and of those that were not.
COUNTS = (
    *("read", "held_out", "duplicates", "prompts_without_pair", "filtered", "without_answer"),
    *("by_task", "by_level"),
)
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def directory(config: Config, host: Host) -> Path:
    """Return data.cache; by default a folder among the container's caches or next to the runs."""
    if config.data.cache:
        return Path(config.data.cache)
    if config.runtime.on_node == "docker":
        return paths.home(config, host) / "data"
    return Path(config.run_root) / ".cache/data"


def for_ranks(config: Config, host: Host) -> dict[str, str] | None:
    """Return `data_cache` of the ranks' config.yaml; None if the method prepares no rows."""
    if not config.method.prepares_rows:
        return None
    return {"directory": str(directory(config, host)), "key": key(config)}


def known(config: Config, host: Host) -> dict[str, Any] | None:
    """Return the statistics of the rows, as in a run's data.json.

    Return None if no run or preview has prepared them.
    """
    cache = for_ranks(config, host)
    if cache is None:
        return None
    return read_json(Path(cache["directory"]) / "statistics" / f"{cache['key']}.json")


def key(config: Config) -> str:
    """Return a hash of everything that determines the rows and their statistics.

    It includes the size and time of files, not their content, so that a plan stays quick. The cache
    of the rows themselves uses a hash of the content.
    """
    data, model = plain(config.data), config.model
    sources = [config.data.path, config.data.heldout_path, *named_files(config).values()]
    files = [Path(file) for path in sources if path for file in sample_files.files(path)]
    if model.path:
        folder = Path(model.path)
        files += sorted(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern))
    stats = [(str(file), file.stat() if file.exists() else None) for file in files]
    content = {
        "data": {name: value for name, value in data.items() if name not in ASIDE},
        "model": [
            *(model.path, model.hub_id, model.revision, model.init.name),
            *(model.vocab_size, model.max_positions, model.chat_template),
        ],
        "method": config.method.name,
        "arguments": {name: trainer_args.argument(config, name) for name in ARGUMENTS},
        "server": [config.topology.servers > 0, config.topology.server_max_length],
        "files": [[file, stat and stat.st_size, stat and stat.st_mtime_ns] for file, stat in stats],
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def _code() -> list[str]:
    """Return hashes of our own code, and the version of TRL whose arguments are locked."""
    others = ("data/tasks.py", "data/code_tasks.py", "models/model_build.py")
    sources = [*sorted((RECIPES / "data").glob("data*.py")), *(RECIPES / name for name in others)]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sources]
    return [*digests, str(trainer_args.lock()["trl"])]


def describe_rows(statistics: dict[str, Any]) -> str:
    """Describe rows: lengths, what was left out or cut, and how full batches are."""
    length = statistics["length"]
    lines = [
        f"{statistics['rows']} rows, lengths {length['shortest']} to {length['longest']} tokens, "
        f"mean {length['mean']:.1f}"
    ]
    most = max(number for _, _, number in statistics["histogram"])
    lines += [
        f"{low:6}-{high:<6} {'█' * round(24 * number / most):24} {number}"
        for low, high, number in statistics["histogram"]
    ]
    if statistics["max_length"]:
        lines.append(f"{statistics['truncated']} cut to {statistics['max_length']} tokens")
    if statistics["efficiency"] is not None:
        packed = "packed" if statistics["packing"] else "not packed"
        lines.append(f"{statistics['efficiency']:.1%} of a batch's places hold a token, {packed}")
    for name in filter(statistics.get, COUNTS):
        count = statistics[name]
        parts = count.items() if isinstance(count, dict) else ()
        lines.append(f"{name}: {', '.join(f'{part} {n}' for part, n in parts) or count}")
    return "\n".join(lines)
