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


def stored(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor from every file that transformers loads, in the order of file names.

    Other files (such as consolidated.safetensors) duplicate these weights. Raises UserError if the
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
                    yield name, file.get_tensor(name)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read, so the model is incomplete: {error}") from error


class Shards:
    """Write files of at most `most` bytes (or one larger tensor), with transformers' names.

    If there are several files, write an index.
    """

    def __init__(self, folder: Path, most: int = SHARD_BYTES) -> None:
        self.folder, self.most = folder, most
        self.held: dict[str, torch.Tensor] = {}
        self.written: list[list[str]] = []  # names of each file
        self.held_bytes = self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.held_bytes + size > self.most:
            self._write()
        self.held[name] = tensor.contiguous()
        self.held_bytes += size
        self.num_bytes += size

    def close(self) -> None:
        if self.held:
            self._write()
        count = len(self.written)
        names = [SINGLE] * count
        if count > 1:
            names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        for number, name in enumerate(names):
            self._unnamed(number).rename(self.folder / name)
        if count > 1:
            pairs = zip(names, self.written, strict=True)
            weights = {tensor: name for name, tensors in pairs for tensor in tensors}
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weights}
            (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        save_file(self.held, self._unnamed(len(self.written)), metadata={"format": "pt"})
        self.written.append([*self.held])
        self.held, self.held_bytes = {}, 0

    def _unnamed(self, number: int) -> Path:
        """Return a file's temporary path, used until the number of files is known."""
        return self.folder / f".{number}.safetensors"
