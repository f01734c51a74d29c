"""Simulate torch's allocator of GPU memory for a training, on fake tensors, without a GPU.

It has the pools of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) for small and for large requests.
A request takes the smallest free block that holds it, and the rest of the block stays next to it.
Without one, a segment is requested from the driver; if that has none, entirely free segments are
returned first. With max_split_size_mb a block of that size or more is never split, and serves
nearly its own size.

Unlike there, of equal blocks the older segment's comes first, not the lower address. There is one
stream. What a kernel takes for itself while it runs (cuBLAS's workspace) is not seen.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.models import head
from tests.helpers.counted import ALIGNED, Counter, loss_of, model_of

MIB = 1 << 20
SMALL = MIB  # requests up to this have segments of 2 MiB of their own
# Size of the segment for a request below half of it, and how much larger than a request an unsplit
# block may be.
LARGE = 20 * MIB
NO_LIMIT = 1 << 62

Event = tuple[int, int]  # tensor, bytes; 0 where it is freed


class OutOfMemory(Exception):
    pass


@dataclass(eq=False)
class Block:
    size: int
    small: bool  # the pool
    order: tuple[int, int]  # segment, and place in it
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class Allocator:
    """Allocate from `capacity` bytes.

    `allocated` and `reserved` are the peaks, as in torch.cuda.memory_stats.
    """

    def __init__(self, capacity: float, max_split: int = NO_LIMIT) -> None:
        self.capacity, self.max_split = capacity, max_split
        self.allocated = self.reserved = self._live = self._held = self._segments = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # by pool, the smallest first
        self._used: dict[int, Block] = {}

    def replay(self, events: Sequence[Event]) -> Allocator:
        """Replay the events. Raise OutOfMemory if one does not fit."""
        for tensor, size in events:
            if size:
                self._allocate(tensor, size)
            else:
                self._release(self._used.pop(tensor))
        return self

    def _allocate(self, tensor: int, size: int) -> None:
        small = size <= SMALL
        block = self._found(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= ALIGNED if small else (left > SMALL and size < self.max_split):
            rest = Block(left, small, (block.order[0], block.order[1] + size), block, block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        self._used[tensor] = block
        self._live += block.size
        self.allocated = max(self.allocated, self._live)

    def _found(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, size, key=lambda block: block.size)
        if at == len(free):
            return None
        kept_whole = free[at].size >= self.max_split
        if kept_whole and (size < self.max_split or free[at].size >= size + LARGE):
            return None
        block = free.pop(at)
        block.free = False
        return block

    def _segment(self, size: int, small: bool) -> Block:
        asked = (
            2 * MIB if small else LARGE if size < LARGE // 2 else -(-size // (2 * MIB)) * 2 * MIB
        )
        if self._held + asked > self.capacity and self.max_split < NO_LIMIT:
            self._give_back_for(max(asked, self.max_split), small)
        if self._held + asked > self.capacity:
            self._give_back(self._whole())
        if self._held + asked > self.capacity:
            raise OutOfMemory(
                f"{size / 1e9:.2f} GB asked for, {self._live / 1e9:.1f} in use, "
                f"{self._held / 1e9:.1f} held"
            )
        self._held += asked
        self.reserved = max(self.reserved, self._held)
        self._segments += 1
        return Block(asked, small, (self._segments, 0))

    def _whole(self) -> list[Block]:
        """Return the segments that are entirely free, the smallest first in each pool."""
        return [
            block
            for pool in self._free.values()
            for block in pool
            if not block.before and not block.after
        ]

    def _give_back_for(self, wanted: int, small: bool) -> None:
        """Free the smallest segment that is enough, else the largest ones until they are."""
        whole = [block for block in self._whole() if block.small == small]
        enough = next((block for block in whole if block.size >= wanted), None)
        for block in (
            [enough]
            if enough
            else reversed([block for block in whole if block.size >= self.max_split])
        ):
            if wanted > 0:
                self._give_back([block])
                wanted -= block.size

    def _give_back(self, segments: Sequence[Block]) -> None:
        for block in segments:
            self._free[block.small].remove(block)
            self._held -= block.size

    def _release(self, block: Block) -> None:
        self._live -= block.size
        if block.before and block.before.free:
            self._free[block.small].remove(block.before)
            block = _joined(block.before, block)
        if block.after and block.after.free:
            self._free[block.small].remove(block.after)
            block = _joined(block, block.after)
        self._put(block)

    def _put(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], block, key=lambda one: (one.size, one.order))


def _joined(first: Block, second: Block) -> Block:
    first.size += second.size
    first.after = second.after
    if second.after:
        second.after.before = first
    return first


class Recorder(Counter):
    """Record every tensor as it is made and freed."""

    def __init__(self, sums: tuple[int, int]) -> None:
        super().__init__(sums)
        self.events: list[Event] = []
        self._made_so_far = 0

    def _made(self, storage: Any, size: int) -> None:
        self.seen[storage] = size
        if size:
            self._made_so_far += 1
            self.events.append((self._made_so_far, size))
            weakref.finalize(storage, self.events.append, (self._made_so_far, 0))


def training(
    shape: SimpleNamespace,
    numerics: str,
    rows: int,
    length: int,
    checkpointing: bool,
    steps: int = 2,
) -> list[Event]:
    """Return the events of SFT with AdamW, loading of weights included.

    `numerics` is named as in launch.estimate.activations.
    """
    recorder = Recorder((shape.vocab_size, shape.hidden_size))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        model = model_of(shape, numerics)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        head.add(model)
        moments: list[torch.Tensor] = []
        for _ in range(steps):
            loss_of(model, numerics, rows, length).backward()
            moments = moments or [
                torch.zeros_like(one) for one in model.parameters() for _ in range(2)
            ]
            model.zero_grad()
        found = list(recorder.events)  # before the model goes
    return found
