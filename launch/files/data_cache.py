"""Where prepared rows are kept, and what is known of a composition's rows from a run or a preview before.

The launcher reads no data: it knows a composition's figures when recipes/common/data_prepare.py has left them under the same key.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from launch import trainer_args
from launch.files import paths, samples
from launch.files.data_files import named_files
from launch.machine.detect import Host
from launch.rules.data import TRAINS_ON_ROWS
from launch.schema import Config

PREPARED_BY = Path(__file__).parents[2] / "recipes/common"
# Of the arguments, those that change which rows there are, their tokens, what is cut and how they are packed.
ARGUMENTS = (
    *("max_length", "packing", "packing_strategy", "truncation_mode", "completion_only_loss", "assistant_only_loss"),
    *("per_device_train_batch_size", "max_completion_length", "max_steps"),
)
ASIDE = ("preview", "cache")  # keys of data that change no row
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def directory(config: Config, host: Host) -> Path:
    """data.cache, or a place beside the runs; in a container that of its caches, which outlives it."""
    if config.data.cache:
        return Path(config.data.cache)
    return paths.home(config, host) / "data" if config.runtime.on_node == "docker" else Path(config.run_root) / ".cache/data"


def for_ranks(config: Config, host: Host) -> dict[str, str] | None:
    """`data_cache` in the file that ranks read; None for methods that train on no rows."""
    if config.method.name not in TRAINS_ON_ROWS:
        return None
    return {"directory": str(directory(config, host)), "key": key(config)}


def known(config: Config, host: Host) -> dict[str, Any] | None:
    """Figures of the rows, as data.json of a run has them; None where no run or preview has prepared these."""
    from launch.files.rundir import read_json  # which imports launch.plan, and that this module

    place = for_ranks(config, host)
    return read_json(Path(place["directory"]) / "statistics" / f"{place['key']}.json") if place else None


def key(config: Config) -> str:
    """A hash of what rows and their figures follow from. A file stands in it by its size and time, so that a plan stays quick: the rows
    themselves are kept under the hash of their content."""
    from launch.plan import plain  # as above

    data, model = plain(config.data), config.model
    content = {
        "data": {name: value for name, value in data.items() if name not in ASIDE},
        "model": [model.path, model.hub_id, model.revision, model.init.name, model.vocab_size, model.max_positions, model.chat_template],
        "method": config.method.name,
        "arguments": {name: trainer_args.argument(config, name) for name in ARGUMENTS},
        "server": [config.topology.servers > 0, config.topology.server_max_length],
        "files": [_stat(file) for file in _files(config)],
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _files(config: Config) -> list[Path]:
    given = [config.data.path, config.data.heldout_path, *named_files(config).values()]
    files = [Path(file) for path in given if path for file in samples.files(path)]
    folder = config.model.path and Path(config.model.path)
    return [*files, *(sorted(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)) if folder else [])]


def _stat(file: Path) -> list[Any]:
    found = file.stat() if file.exists() else None
    return [str(file), found and found.st_size, found and found.st_mtime_ns]


@functools.cache
def _code() -> list[str]:
    """Of our own code its content, of the packages the version that the arguments were read from."""
    made_by = [*sorted(PREPARED_BY.glob("data*.py")), *(PREPARED_BY / name for name in ("tasks.py", "code_tasks.py", "model.py"))]
    files = [hashlib.sha256(file.read_bytes()).hexdigest() for file in made_by]
    return [*files, str(trainer_args.lock()["trl"])]


def said(config: Config, found: dict[str, Any] | None) -> str:
    """A line or a few for a plan: how long the rows are, what is cut, how full batches are."""
    if found is None:
        return "not prepared yet; the same command with data.preview=5 in place of mode=plan shows lengths, cuts and packing"
    length = found["length"]
    lines = [f"{found['rows']} rows, lengths {length['shortest']} to {length['longest']} tokens, mean {length['mean']:.1f}"]
    most = max(number for _, _, number in found["histogram"])
    lines += [f"{low:6}-{high:<6} {'█' * round(24 * number / most):24} {number}" for low, high, number in found["histogram"]]
    if found["max_length"]:
        lines.append(f"{found['truncated']} cut to {found['max_length']} tokens")
    if found["efficiency"] is not None:
        lines.append(f"{found['efficiency']:.1%} of a batch's places hold a token, {'packed' if found['packing'] else 'not packed'}")
    return "\n".join(lines)
