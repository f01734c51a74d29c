"""Define a task that is missing from reasoning-gym: find the ball after swaps of two cups.

Each swap depends on the one before. A transformer that answers immediately can compute only as many
steps as it has layers (arXiv:2404.08819). If it first writes a worked solution, each token adds a
step. The task resembles BIG-bench's "tracking shuffled objects" (arXiv:2206.04615).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset

NAME = "shuffled_cups"


@dataclass
class CupsConfig:
    """Hold the task's arguments. reasoning-gym expects `validate` to raise AssertionError."""

    cups: int = 5
    min_swaps: int = 4
    max_swaps: int = 4
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert 2 <= self.cups <= 9, "cups must be from 2 to 9"  # a single digit is a single token
        assert 1 <= self.min_swaps <= self.max_swaps, (
            "min_swaps must be at least 1, and max_swaps at least min_swaps"
        )


class CupsDataset(ProceduralDataset):
    def __init__(self, config: CupsConfig):
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        rng = random.Random(self.seed + idx)
        cups = range(1, self.config.cups + 1)
        start = rng.choice(cups)
        swaps = [
            rng.sample(cups, 2)
            for _ in range(rng.randint(self.config.min_swaps, self.config.max_swaps))
        ]
        swap_text = ", ".join(f"{a} {b}" for a, b in swaps)
        return {
            "question": f"The ball is under cup {start} of {len(cups)}. These are swapped: "
            f"{swap_text}. Under which cup is the ball?",
            "answer": str(positions(start, swaps)[-1]),
            "metadata": {
                "source_dataset": NAME,
                "source_index": idx,
                "start": start,
                "swaps": swaps,
            },
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(answer is not None and answer.strip() == entry["answer"])


def positions(start: int, swaps: list[list[int]]) -> list[int]:
    """Return the position of the ball after each swap."""
    path, position = [], start
    for a, b in swaps:
        position = {a: b, b: a}.get(position, position)
        path.append(position)
    return path


def worked_solution(metadata: dict[str, Any]) -> str:
    """Return the ball's positions as text, such as `2 2 4` for start 1 and swaps 1 2, 3 4, 4 2."""
    return " ".join(map(str, positions(metadata["start"], metadata["swaps"])))


register_dataset(NAME, CupsDataset, CupsConfig)
