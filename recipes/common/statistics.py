"""What a number of right and wrong samples says: pass@k, maj@k, and how far a share can be trusted. Pure functions.

A problem is asked once or several times; its samples are right or wrong. Intervals are of 95%.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # two-sided 95% of the normal distribution
ROUNDING = 1e-9  # of a share that is a sum of floats
RESAMPLES = 2000  # of a bootstrap: the ends of a 95% interval then move by less than a twentieth of its width from seed to seed


def wilson(right: float, total: int) -> tuple[float, float]:
    """The interval of the share `right`/`total` of independent trials (Wilson, 1927). Raises ValueError where there are none.

    Other than the usual p +- 1.96 standard errors it stays within 0 and 1, and is right for few trials and extreme shares.
    """
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} of {total} is no share")
    share, spread = right / total, Z * Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    # At both ends the interval touches the share, which rounding would miss.
    return (0.0 if right == 0 else middle - half), (1.0 if right == total else middle + half)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The interval of the mean of `values`, one a problem, by drawing as many problems with replacement RESAMPLES times (percentiles).

    Samples of one problem are alike, so problems are drawn and not samples. Where all are equal, but for rounding, every draw is the same
    and says nothing: Wilson's interval stands in. The same seed gives the same interval. Raises ValueError where there are no values.
    """
    if not values:
        raise ValueError("no values")
    if max(values) - min(values) < ROUNDING:
        return wilson(round(sum(values), 6), len(values))
    rng, given = np.random.default_rng(seed), np.asarray(values, dtype=float)
    means = [float(given[rng.integers(0, len(given), len(given))].mean()) for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def pass_at_k(right: int, total: int, k: int) -> float:
    """The chance that one of k samples is right, drawn from the `total` that there are: 1 - C(total-right, k) / C(total, k).

    The unbiased estimator of arXiv:2107.03374, section 2.1. Raises ValueError for k outside 1 to `total`.
    """
    _check(k, total)
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def maj_at_k(answers: Sequence[tuple[str, float]], k: int) -> float:
    """The chance that the answer most frequent among k samples is right, k drawn from all. Of several as frequent each is as likely taken.

    `answers`: of each sample its final answer, and 1 where that is right, else 0. Exact, by counting subsets. Raises ValueError for k
    outside 1 to their number.
    """
    _check(k, len(answers))
    counts = Counter(answer for answer, _ in answers)
    value = {answer: sum(right for other, right in answers if other == answer) / count for answer, count in counts.items()}
    total = 0.0
    for answer, count in counts.items():
        if value[answer]:
            others = tuple(sorted(n for other, n in counts.items() if other != answer))
            total += value[answer] * _chance_to_win(count, others, k)
    return total


def ks(num_samples: int) -> list[int]:
    """The k that curves are made of: 1, 2, 4 ... and all samples of a problem."""
    return sorted({*(2**n for n in range(num_samples.bit_length()) if 2**n <= num_samples), num_samples})


@functools.lru_cache(maxsize=65536)  # many problems are answered in the same pattern
def _chance_to_win(count: int, others: tuple[int, ...], k: int) -> float:
    """That an answer given `count` times is the one taken from k samples; `others` say how often each other answer was given."""
    total = count + sum(others)
    if k == 1:
        return count / total
    won = 0.0
    for votes in range(1, min(count, k) + 1):
        if 2 * votes > k:  # no other can have as many
            won += math.comb(count, votes) * math.comb(total - count, k - votes)
            continue
        ways = {(0, 0): 1}  # (answers with as many votes, votes given) -> subsets
        for other in others:
            grown: Counter[tuple[int, int]] = Counter()
            for (ties, given), number in ways.items():
                for more in range(min(other, votes, k - votes - given) + 1):
                    grown[ties + (more == votes), given + more] += number * math.comb(other, more)
            ways = dict(grown)
        won += math.comb(count, votes) * sum(number / (ties + 1) for (ties, given), number in ways.items() if given == k - votes)
    return won / math.comb(total, k)


def _check(k: int, total: int) -> None:
    if not 1 <= k <= total:
        raise ValueError(f"k={k}: from 1 to {total}, the samples of a problem")
