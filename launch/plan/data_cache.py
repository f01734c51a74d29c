"""Locate the cache of prepared rows, and read the rows' statistics for a plan.

The launcher does not prepare rows. recipes/data/data_prepare.py does, and stores the statistics
under the key that is computed here.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from launch.core.json_files import plain, read_json
from launch.inputs import paths, sample_files
from launch.inputs.jsonl_files import local_set_files, named_files
from launch.machine.detect import Host
from launch.schema import Config, trainer_args

RECIPES = Path(__file__).parents[2] / "recipes"
# The arguments that change the rows, their tokens, truncation or packing.
ARGUMENTS = (
    "max_length packing packing_strategy truncation_mode completion_only_loss assistant_only_loss "
    "per_device_train_batch_size max_completion_length max_steps"
).split()
NOT_IN_KEY = ("preview", "cache")  # keys of data that do not change rows
# Statistics that describe_rows prints as counts.
COUNTS = (
    "read held_out duplicates prompts_without_pair filtered without_answer by_task by_level"
).split()
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def directory(config: Config, host: Host) -> Path:
    """Return data.cache, or the default: a folder next to the containers' homes or in run_root."""
    if config.data.cache:
        return Path(config.data.cache)
    if config.runtime.in_container:
        return paths.home(config, host).parent / "data"  # the key of rows has what changes them
    return Path(config.run_root) / ".cache/data"


def for_ranks(config: Config, host: Host) -> dict[str, str] | None:
    """Return the value of `data_cache` in config.yaml; None if the method prepares no rows."""
    if not config.method.prepares_rows:
        return None
    return {"directory": str(directory(config, host)), "key": key(config)}


def statistics(config: Config, host: Host) -> dict[str, Any] | None:
    """Return the rows' statistics, as in a run's data.json; None if the rows are not prepared."""
    cache = for_ranks(config, host)
    if cache is None:
        return None
    return read_json(Path(cache["directory"]) / "statistics" / f"{cache['key']}.json")


def key(config: Config) -> str:
    """Return a hash of everything that determines the rows and their statistics.

    To keep a plan quick, it covers the size and modification time of files. The cache of the rows
    themselves uses a hash of the content.
    """
    data, model = plain(config.data), config.model
    paths = [config.data.path, config.data.heldout_path, *named_files(config).values()]
    files = [Path(file) for path in paths if path for file in sample_files.files(path)]
    files += map(Path, local_set_files(config))
    if model.path:
        folder = Path(model.path)
        files += sorted(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern))
    stats = [(str(file), file.stat() if file.exists() else None) for file in files]
    content = {
        "data": {name: value for name, value in data.items() if name not in NOT_IN_KEY},
        "model": [
            *(model.path, model.hub_id, model.revision, model.init.name),
            *(model.vocab_size, model.max_positions, model.chat_template),
        ],
        "method": config.method.name,
        "arguments": {name: trainer_args.value_or_none(config, name) for name in ARGUMENTS},
        "server": [config.topology.servers > 0, config.topology.server_max_length],
        "files": [[file, stat and stat.st_size, stat and stat.st_mtime_ns] for file, stat in stats],
        "code": _code_hashes(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def _code_hashes() -> list[str]:
    """Return hashes of the modules that prepare rows, and the locked version of TRL."""
    others = ("data/tasks.py", "data/code_tasks.py", "models/model_build.py")
    modules = [*sorted((RECIPES / "data").glob("data*.py")), *(RECIPES / name for name in others)]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in modules]
    return [*digests, str(trainer_args.lock()["trl"])]


def short_description(stats: dict[str, Any]) -> str:
    """Return the number of rows and their lengths."""
    length = stats["length"]
    lengths = f"{length['mean']:.0f} tokens on average, {length['shortest']} to {length['longest']}"
    cut = f"; {stats['truncated']} truncated to {stats['max_length']}" if stats["truncated"] else ""
    return f"{stats['rows']} prepared rows of {lengths}{cut}"


def describe_rows(stats: dict[str, Any]) -> str:
    """Return lines with a histogram of row lengths, truncation, padding and counts of rows."""
    length = stats["length"]
    lines = [
        f"{stats['rows']} rows, lengths {length['shortest']} to {length['longest']} tokens, "
        f"mean {length['mean']:.1f}"
    ]
    largest = max(count for _, _, count in stats["histogram"])
    lines += [
        f"{low:6}-{high:<6} {'█' * round(24 * count / largest):24} {count}"
        for low, high, count in stats["histogram"]
    ]
    if stats["max_length"]:
        lines.append(f"{stats['truncated']} rows truncated to {stats['max_length']} tokens")
    if stats["efficiency"] is not None:
        packed = "packed" if stats["packing"] else "not packed"
        lines.append(
            f"{stats['efficiency']:.1%} of the tokens in a batch are not padding, {packed}"
        )
    for name in filter(stats.get, COUNTS):
        count = stats[name]
        parts = count.items() if isinstance(count, dict) else ()
        lines.append(f"{name}: {', '.join(f'{part} {n}' for part, n in parts) or count}")
    return "\n".join(lines)
