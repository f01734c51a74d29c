"""Compare two evaluations of the same problems: the difference, its interval and its p-value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054  # two-sided 95% of the normal distribution


@dataclass(frozen=True)
class Comparison:
    """The difference between two accuracies or mean rewards, which are from 0 to 1."""

    before: float
    after: float
    difference: float  # after minus before
    low: float  # ends of the 95% interval of the difference
    high: float
    p: float  # of the sign-flip test
    num_problems: int
    better: int  # problems with a larger share of correct samples, or reward, after than before
    worse: int  # problems with a smaller one


def compare(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> Comparison:
    """Compare two lists with each problem's score as (numerator, denominator), in the same order.

    The interval is Bonett and Price's adjusted Wald interval (Journal of Educational and Behavioral
    Statistics 37, 2012, 479-488). It adds one problem that only `after` solves and one that only
    `before` solves, so the interval has a width even if all problems change in the same way. The
    formula is for differences of -1, 0 and 1. Rewards, and problems with several samples, have
    fractions instead.
    """
    # Differences are integers, in units of 1/scale, so that equal sums are exactly equal.
    scale = math.lcm(*(total for _, total in [*before, *after]))
    differences = [
        a * scale // m - b * scale // n for (b, n), (a, m) in zip(before, after, strict=True)
    ]
    count, added = len(differences), 2
    middle = sum(differences) / scale / (count + added)
    squares = sum((d / scale) ** 2 for d in differences) + added
    half_width = Z * math.sqrt((squares / (count + added) - middle**2) / (count + added))
    return Comparison(
        before=sum(b / n for b, n in before) / count,
        after=sum(a / m for a, m in after) / count,
        difference=sum(differences) / scale / count,
        low=max(-1.0, middle - half_width),
        high=min(1.0, middle + half_width),
        p=sign_flip_p(differences),
        num_problems=count,
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
    )


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the two-sided p-value of the exact paired permutation test.

    It is the chance of a sum at least as far from 0, if each difference had a random sign. For
    differences of -1, 0 and 1, this is McNemar's exact test.
    """
    import numpy as np  # imported here because it takes 0.1 s

    sizes = [abs(d) for d in differences if d]
    chances = np.ones(1)  # the chance of each possible sum, from lowest to highest in steps of 2
    for size in sizes:
        with_next = np.zeros(len(chances) + size)
        with_next[: len(chances)] += chances / 2
        with_next[size:] += chances / 2
        chances = with_next
    sums = np.arange(len(chances)) * 2 - sum(sizes)
    return min(1.0, float(chances[abs(sums) >= abs(sum(differences))].sum()))
