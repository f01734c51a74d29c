"""Test the comparison of two evaluations against values computed by hand."""

import itertools
import math

import pytest

from launch.reports import paired

Z = 1.959963984540054  # two-sided 95% of the normal distribution


def test_the_sign_flip_test_equals_enumeration_and_mcnemar():
    for differences in ([3, -1, 2, 2, 0, -4, 5], [1, 1], [0, 0], [], [7]):
        observed = abs(sum(differences))
        flips = itertools.product((1, -1), repeat=len(differences))
        sums = [
            sum(sign * d for sign, d in zip(signs, differences, strict=True)) for signs in flips
        ]
        assert paired.sign_flip_p(differences) == pytest.approx(
            sum(abs(s) >= observed for s in sums) / len(sums)
        )
    for better, worse in [(9, 2), (5, 5), (0, 6), (30, 12)]:
        n, least = better + worse, min(better, worse)
        mcnemar = min(1.0, 2 * sum(math.comb(n, i) for i in range(least + 1)) / 2**n)
        assert paired.sign_flip_p([1] * better + [-1] * worse + [0] * 20) == pytest.approx(mcnemar)


def test_two_evaluations_compared():
    compared = paired.compare([(0, 1)] * 6 + [(1, 1)] * 2, [(1, 1)] * 6 + [(1, 1), (0, 1)])
    assert (compared.before, compared.after, compared.difference) == (0.25, 0.875, 0.625)
    assert (compared.better, compared.worse, compared.num_problems) == (6, 1, 8)
    assert compared.p == pytest.approx(2 * (1 + 7) / 2**7)
    # By hand: 7 and 2 of 10 with the two that are added; variance (0.7 + 0.2 - 0.5^2) / 10 = 0.065.
    half = Z * math.sqrt(0.065)
    assert (compared.low, compared.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert (compared.low, compared.high) == pytest.approx((0.000305, 0.999695), abs=1e-6)
    unequal = paired.compare([(1, 2), (0, 2)], [(3, 4), (0, 4)])  # another number of samples
    assert (unequal.difference, unequal.better, unequal.worse) == (0.125, 1, 0)
    with pytest.raises(ValueError, match="zip"):
        paired.compare([(0, 1), (1, 1)], [(0, 1)])


@pytest.mark.parametrize(("better", "worse", "same", "low", "high"), [
    # 6/7 and 1/7; no difference is beyond 1.
    (5, 0, 0, 5 / 7 - Z * math.sqrt((1 - 25 / 49) / 7), 1.0),
    (0, 0, 10, -Z / math.sqrt(72), Z / math.sqrt(72)),  # 1/12 and 1/12
    (1, 0, 0, 1 / 3 - Z * math.sqrt(8 / 27), 1.0),  # 2/3 and 1/3
    (130, 25, 345, 0.163793, 0.254534),  # 105/502 -+ 1.96 sqrt((157/502 - (105/502)^2) / 502)
])  # fmt: skip
def test_problems_that_all_change_alike_have_an_interval(better, worse, same, low, high):
    compared = paired.compare(
        [(0, 1)] * better + [(1, 1)] * (worse + same),
        [(1, 1)] * better + [(0, 1)] * worse + [(1, 1)] * same,
    )
    assert (compared.low, compared.high) == pytest.approx((low, high), abs=1e-6)
