"""Two evaluations of the same problems: by how much they differ, and whether that can be chance. Pure functions of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # two-sided 95% of the normal distribution


@dataclass(frozen=True)
class Comparison:
    """`difference`: mean of after minus before, in shares; `low`, `high`: its 95% interval; `p`: of the sign-flip test."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    p: float
    num_problems: int
    better: int  # problems on which `after` has the larger share of right samples
    worse: int


def compare(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> Comparison:
    """`before`, `after`: of each problem in the same order how many samples were right, of how many.

    The interval is Bonett and Price's adjusted Wald interval (Journal of Educational and Behavioral Statistics 37, 2012, 479-488): to the
    problems one is added that only `after` has right and one that only `before` has, so that problems that change alike leave a width.
    Of several samples a problem, differences of shares stand in for -1, 0 and 1. Raises ValueError for no problems and unequal numbers.
    """
    if not before or len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} problems cannot be paired")
    unit = math.lcm(*(total for _, total in [*before, *after]))
    # Whole numbers, in units of 1/unit: equal sums are then equal.
    differences = [a * unit // m - b * unit // n for (b, n), (a, m) in zip(before, after, strict=True)]
    count, added = len(differences), 2
    middle = sum(differences) / unit / (count + added)
    squares = sum((d / unit) ** 2 for d in differences) + added
    half = Z * math.sqrt((squares / (count + added) - middle**2) / (count + added))
    return Comparison(
        sum(b / n for b, n in before) / count,
        sum(a / m for a, m in after) / count,
        sum(differences) / unit / count,
        max(-1.0, middle - half),
        min(1.0, middle + half),
        sign_flip_p(differences),
        count,
        sum(d > 0 for d in differences),
        sum(d < 0 for d in differences),
    )


def sign_flip_p(differences: Sequence[int]) -> float:
    """The chance of a sum at least as far from 0 if each difference were as likely to have the other sign (two-sided, exact).

    The paired permutation test. With differences of -1, 0 and 1, one sample a problem, it is McNemar's exact test.
    """
    import numpy as np  # a tenth of a second that no other page has to take

    sizes = [abs(d) for d in differences if d]
    chances = np.ones(1)  # of each sum from -reach to reach in steps of 2
    for size in sizes:
        grown = np.zeros(len(chances) + size)
        grown[: len(chances)] += chances / 2
        grown[size:] += chances / 2
        chances = grown
    reach, observed = sum(sizes), abs(sum(differences))
    sums = np.arange(len(chances)) * 2 - reach
    return min(1.0, float(chances[abs(sums) >= observed].sum()))
