"""Test statistics of evaluations against published values and complete enumeration."""

import itertools
import math
import random
from collections import Counter

import pytest

from recipes.measure import statistics


def test_wilson_intervals_equal_published_ones():
    # Newcombe (Statistics in Medicine 17, 1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20,
    # 1 of 29.
    for right, total, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert statistics.wilson(right, total) == pytest.approx((low, high), abs=5e-5)
        mirrored = statistics.wilson(total - right, total)
        assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for total in range(1, 8):
        for right, k in itertools.product(range(total + 1), range(1, total + 1)):
            subsets = list(itertools.combinations([1] * right + [0] * (total - right), k))
            assert statistics.pass_at_k(right, total, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets)
            )


def test_maj_at_k_is_the_share_of_subsets_whose_majority_is_right():
    rng = random.Random(0)
    for _ in range(60):
        answers = [(a, float(a == "a")) for a in rng.choices("abcd", k=rng.randint(1, 8))]
        for k in range(1, len(answers) + 1):
            shares = []
            for subset in itertools.combinations(answers, k):
                counts = Counter(answer for answer, _ in subset)
                most = [answer for answer, n in counts.items() if n == max(counts.values())]
                shares.append(("a" in most) / len(most))
            assert statistics.maj_at_k(answers, k) == pytest.approx(sum(shares) / len(shares))


def test_a_bootstrap_interval_depends_only_on_values_and_seed():
    values = [0.0, 0.5, 1.0, 0.5] * 50
    low, high = statistics.bootstrap(values, seed=3)
    half = statistics.Z * math.sqrt(0.125 / len(values))  # 0.125: the variance of the values
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)
    assert statistics.bootstrap(values, seed=3) == (low, high)
    # All draws are equal, so resampling gives no interval.
    assert statistics.bootstrap([1.0] * 9) == statistics.wilson(9, 9)


def test_problems_with_equal_shares_have_an_interval():
    """Resampling one half-right problem would suggest certainty about other problems."""
    assert statistics.bootstrap([0.5]) == statistics.wilson(0.5, 1)
    low, high = statistics.bootstrap([0.25] * 8)
    assert low < 0.1
    assert high > 0.5
