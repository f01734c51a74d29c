"""Compare two evaluations of the same problems: the difference, and whether it may be chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # two-sided 95% of the normal distribution


@dataclass(frozen=True)
class Comparison:
    """The mean of after minus before, in shares, its 95% interval, and p of the sign-flip test."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    p: float
    num_problems: int
    better: int  # problems on which `after` has the larger share of correct samples
    worse: int


def compare(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> Comparison:
    """Compare (correct samples, samples) of each problem, given in the same order.

    The interval is Bonett and Price's adjusted Wald interval (Journal of Educational and Behavioral
    Statistics 37, 2012, 479-488). It adds one problem that only `after` solves and one that only
    `before` solves, so the interval has a width even if all problems change in the same way. If a
    problem has several samples, differences of shares stand in for -1, 0 and 1.
    """
    # Integers in units of 1/unit, so that equal sums compare equal.
    unit = math.lcm(*(total for _, total in [*before, *after]))
    differences = [
        a * unit // m - b * unit // n for (b, n), (a, m) in zip(before, after, strict=True)
    ]
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
    """Return the two-sided p of the exact paired permutation test.

    It is the chance of a sum at least as far from 0 if each difference were equally likely to have
    the other sign. With differences of -1, 0 and 1 it is McNemar's exact test.
    """
    import numpy as np  # 0.1 s, only for pages that compare

    sizes = [abs(d) for d in differences if d]
    chances = np.ones(1)  # chance of each sum from -reach to reach, in steps of 2
    for size in sizes:
        grown = np.zeros(len(chances) + size)
        grown[: len(chances)] += chances / 2
        grown[size:] += chances / 2
        chances = grown
    reach, observed = sum(sizes), abs(sum(differences))
    sums = np.arange(len(chances)) * 2 - reach
    return min(1.0, float(chances[abs(sums) >= observed].sum()))
