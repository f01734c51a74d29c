"""Compute pass@k, maj@k and 95% intervals from right and wrong samples."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # two-sided 95% of the normal distribution
ROUNDING = 1e-9  # tolerance for a share that is a sum of floats
# Enough that the ends of a 95% interval differ between seeds by under a twentieth of its width.
RESAMPLES = 2000


def wilson(right: float, total: int) -> tuple[float, float]:
    """Return the interval of the share `right`/`total` of independent trials (Wilson, 1927).

    Unlike p +- 1.96 standard errors, it stays within 0 and 1, and is valid for few trials and
    extreme shares.
    """
    share, spread = right / total, Z * Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    # For shares of 0 and 1, the interval ends exactly there, which rounding would miss.
    return (0.0 if right == 0 else middle - half), (1.0 if right == total else middle + half)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the percentile interval of the mean of `values`, one per problem, by resampling.

    Problems are resampled, not samples, because samples of one problem are correlated. If all
    values are equal up to rounding, every draw would be the same, so the interval is Wilson's. The
    same seed gives the same interval.
    """
    if max(values) - min(values) < ROUNDING:
        return wilson(round(sum(values), 6), len(values))
    rng, array = np.random.default_rng(seed), np.asarray(values, dtype=float)
    means = [float(array[rng.integers(0, len(array), len(array))].mean()) for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def pass_at_k(right: int, total: int, k: int) -> float:
    """Return the chance that at least one of k samples drawn from `total` is right.

    It is 1 - C(total-right, k) / C(total, k), the unbiased estimator of arXiv:2107.03374, section
    2.1.
    """
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def maj_at_k(answers: Sequence[tuple[str, float]], k: int) -> float:
    """Return the chance that the most frequent answer among k drawn samples is right.

    `answers` pairs each sample's final answer with 1 if it is right, else 0. Ties are broken at
    random. Counting subsets makes the value exact.
    """
    counts = Counter(answer for answer, _ in answers)
    value = {
        answer: sum(right for other, right in answers if other == answer) / count
        for answer, count in counts.items()
    }
    total = 0.0
    for answer, count in counts.items():
        if value[answer]:
            others = tuple(sorted(n for other, n in counts.items() if other != answer))
            total += value[answer] * _chance_to_win(count, others, k)
    return total


def ks(num_samples: int) -> list[int]:
    """Return the values of k for a curve: 1, 2, 4 ... and `num_samples`."""
    return sorted(
        {*(2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples), num_samples}
    )


@functools.lru_cache(maxsize=65536)  # many problems have the same counts
def _chance_to_win(count: int, others: tuple[int, ...], k: int) -> float:
    """Return the chance that an answer with `count` samples is the most frequent among k of them.

    `others` are the numbers of samples with other answers.
    """
    total = count + sum(others)
    won = 0.0
    for votes in range(1, min(count, k) + 1):
        if 2 * votes > k:  # every other answer has fewer votes
            won += math.comb(count, votes) * math.comb(total - count, k - votes)
            continue
        ways = {(0, 0): 1}  # (answers with as many votes, votes cast) -> subsets
        for other in others:
            grown: Counter[tuple[int, int]] = Counter()
            for (ties, votes_cast), number in ways.items():
                for more in range(min(other, votes, k - votes - votes_cast) + 1):
                    grown[ties + (more == votes), votes_cast + more] += number * math.comb(
                        other, more
                    )
            ways = dict(grown)
        won += math.comb(count, votes) * sum(
            number / (ties + 1)
            for (ties, votes_cast), number in ways.items()
            if votes_cast == k - votes
        )
    return won / math.comb(total, k)
