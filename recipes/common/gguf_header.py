"""What the header of a GGUF file claims, held against the file before anything is built from it.

transformers and the package gguf believe every length and every size: of a damaged file they allocate what it claims.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)  # that the package gguf reads
ALIGNMENT = 32  # of the tensors' data, where the header names none
MOST = 2**22  # our choice, of the entries of a list and the bytes of a text: vocabularies have up to some 300 thousand
WHOLE = "Give the whole file; of a model in several, the one that llama.cpp's llama-gguf-split --merge makes of them."


class _Damaged(Exception):
    """What does not fit together, in words."""


class _Reader:
    """The file's values in their order, none of them beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.order = data, 4, "<"  # after the magic
        version = self.number("I")
        if version & 0xFFFF == 0:  # of a machine of the other byte order
            self.order, version = ">", version >> 24
        if version not in VERSIONS:
            raise _Damaged(f"version {version} of the format, and {' and '.join(map(str, VERSIONS))} are read")

    def scalars(self, form: str, count: int = 1) -> tuple[Any, ...]:
        begin, size = self.at, struct.calcsize(f"<{form}") * count
        self.at += size
        if self.at > len(self.data):
            raise _Damaged(f"{size:,} bytes are to come at byte {begin:,}, and the file ends at {len(self.data):,}")
        return struct.unpack_from(f"{self.order}{count}{form}", self.data, begin)

    def number(self, form: str) -> int:
        return int(self.scalars(form)[0])

    def count(self, form: str = "Q") -> int:
        begin, found = self.at, self.number(form)
        if found > MOST:
            raise _Damaged(f"a length of {found:,} stands at byte {begin:,}, and {MOST:,} is the most that is read")
        return found

    def text(self) -> str:
        return bytes(self.scalars("B", self.count())).decode(errors="replace")

    def value(self) -> Any:
        kind = self.number("I")
        if kind != ARRAY:
            return self._of_kind(kind, 1)[0]
        kind = self.number("I")
        return self._of_kind(kind, self.count())

    def _of_kind(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise _Damaged(f"a value of type {kind} stands before byte {self.at:,}, and models have none")
        return list(self.scalars(SCALARS[kind], count))


def check_header(file: Path) -> int:
    """How many numbers the tensors of a GGUF file hold. Raises UserError for a header that claims what the file cannot hold."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            reader = _Reader(data)
            num_tensors, num_fields = reader.count(), reader.count()
            fields = {reader.text(): reader.value() for _ in range(num_fields)}
            elements = _elements(reader, num_tensors, fields.get("general.alignment", ALIGNMENT))
            _check_claims(fields, elements)
        except _Damaged as error:
            raise UserError(f"{file}: damaged, or not whole: {error}. {WHOLE}") from error
    return elements


def _elements(reader: _Reader, num_tensors: int, alignment: Any) -> int:
    """Of all tensors, each of which lies in the file."""
    from gguf import GGML_QUANT_SIZES

    tensors = []
    for _ in range(num_tensors):
        name, dims = reader.text(), reader.scalars("Q", reader.count("I"))
        tensors.append((name, math.prod(dims), reader.number("I"), reader.number("Q")))
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"general.alignment is {alignment}")
    start, end = -(-reader.at // alignment) * alignment, len(reader.data)
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    left = end - start
    for name, elements, kind, offset in tensors:
        if kind not in sizes:
            raise _Damaged(f"tensor {name} is of type {kind}, which the package gguf does not know")
        per_block, bytes_of_block = sizes[kind]
        taken = -(-elements // per_block) * bytes_of_block
        left -= taken
        if start + offset + taken > end or left < 0:
            raise _Damaged(f"tensor {name} has {taken:,} bytes at byte {start + offset:,}, and the file ends at {end:,}")
    return sum(elements for _, elements, _, _ in tensors)


def _check_claims(fields: dict[str, Any], elements: int) -> None:
    """A model has the embeddings of its vocabulary, and in each block at least one matrix of its feed-forward."""
    architecture = fields.get("general.architecture")
    tokens = fields.get("tokenizer.ggml.tokens")
    names = {"embedding length": "embedding_length", "blocks": "block_count", "feed-forward": "feed_forward_length"}
    claimed = {"vocabulary": fields.get(f"{architecture}.vocab_size", len(tokens) if isinstance(tokens, list) else 0)}
    claimed |= {said: fields.get(f"{architecture}.{name}", 0) for said, name in names.items()}
    for said, given in claimed.items():
        if not all(isinstance(n, int) and n >= 0 for n in (given if isinstance(given, list) and said == "feed-forward" else [given])):
            raise _Damaged(f"{said} {given!r:.80} in its header, which is no size")
    vocabulary, width, blocks, inner = claimed.values()
    of_blocks = sum(inner) if isinstance(inner, list) else blocks * max(1, inner)  # a list: one number for each block
    least = max(width * (vocabulary + of_blocks), blocks)
    if least > elements:
        sizes = ", ".join(f"{said} {given!r:.80}" for said, given in claimed.items())
        raise _Damaged(f"its header claims {sizes}: {least:,} parameters or more, and its tensors hold {elements:,}")
