"""A model directory's safetensors, read and written a tensor at a time: no more than a file of them is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from recipes.common.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of a file: what memory is needed, and what a broken download repeats


def stored(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every file that transformers loads, in the order of their names: others beside them (consolidated.safetensors of
    some models) hold the same weights once more. Raises UserError where the directory is not whole."""
    index, names = directory / INDEX, [SINGLE]
    if not (directory / SINGLE).is_file():
        if not index.is_file():
            raise UserError(f"{directory} is not whole: it has neither {SINGLE} nor {INDEX}.")
        names = sorted({*json.loads(index.read_text())["weight_map"].values()})
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise UserError(f"{directory} is not whole: {INDEX} names {missing[0]}, which is not there.")
    for path in (directory / name for name in names):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no iterator)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read, so the model is not whole: {error}") from error


class Shards:
    """Files of at most `most` bytes (or of one larger tensor) in `folder`, named as transformers names them; an index where there are
    several."""

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
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._unnamed(number).rename(self.folder / name)
        if count > 1:
            weights = {tensor: name for name, tensors in zip(names, self.written, strict=True) for tensor in tensors}
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weights}
            (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        save_file(self.held, self._unnamed(len(self.written)), metadata={"format": "pt"})
        self.written.append([*self.held])
        self.held, self.held_bytes = {}, 0

    def _unnamed(self, number: int) -> Path:
        """Of a file, while it is not known of how many."""
        return self.folder / f".{number}.safetensors"
