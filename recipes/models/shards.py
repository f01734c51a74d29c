"""Read and write safetensors one tensor at a time, so that memory holds at most one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from launch.core.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # per file; limits memory use and the size of a repeated download


def read_names(directory: Path) -> list[str]:
    """Return the names of the tensors in the files that transformers loads."""
    if not (directory / SINGLE).is_file():
        return list(json.loads((directory / INDEX).read_text())["weight_map"])
    with safe_open(directory / SINGLE, framework="pt") as file:
        return list(file.keys())


def read_tensors(
    directory: Path, without: tuple[str, ...] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from the files that transformers loads, sorted by file name.

    Names that start with `without` are left out.
    Other files, such as consolidated.safetensors, duplicate these weights. Raises UserError if the
    directory is incomplete.
    """
    path = directory / SINGLE
    try:
        files = [SINGLE]
        if not path.is_file():
            path = directory / INDEX
            files = sorted({*json.loads(path.read_text())["weight_map"].values()})
        for path in (directory / name for name in files):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no iterator)
                    if not name.startswith(without):
                        yield name, file.get_tensor(name)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read, so the model is incomplete: {error}. Copy the model again."
        ) from error


class Shards:
    """Write files of at most `max_bytes` (or one larger tensor), with transformers' names.

    If there are several files, write an index.
    """

    def __init__(self, folder: Path, max_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.buffer: dict[str, torch.Tensor] = {}  # tensors of the next file
        self.names: list[list[str]] = []  # of the tensors in each file
        self.buffer_bytes = self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.buffer and self.buffer_bytes + size > self.max_bytes:
            self._write()
        self.buffer[name] = tensor.contiguous()
        self.buffer_bytes += size
        self.num_bytes += size

    def close(self) -> None:
        if self.buffer:
            self._write()
        count = len(self.names)
        files = [SINGLE] * count
        if count > 1:
            files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        for number, file in enumerate(files):
            self._temporary_path(number).rename(self.folder / file)
        if count > 1:
            pairs = zip(files, self.names, strict=True)
            weights = {name: file for file, names in pairs for name in names}
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weights}
            (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        save_file(self.buffer, self._temporary_path(len(self.names)), metadata={"format": "pt"})
        self.names.append([*self.buffer])
        self.buffer, self.buffer_bytes = {}, 0

    def _temporary_path(self, number: int) -> Path:
        """Return a file's path until the number of files is known."""
        return self.folder / f".{number}.safetensors"
