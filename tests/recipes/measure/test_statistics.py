"""Test statistics of evaluations against values worked out by hand and by counting every case."""

import itertools
import math
import random
from collections import Counter

import pytest

from launch.reports import paired
from recipes.measure import statistics


def test_wilsons_interval():
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


def test_ks():
    assert [statistics.ks(n) for n in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_bootstrap_is_that_of_the_mean_and_follows_from_its_seed():
    values = [0.0, 0.5, 1.0, 0.5] * 50
    low, high = statistics.bootstrap(values, seed=3)
    half = statistics.Z * math.sqrt(0.125 / len(values))  # 0.125: the variance of the values
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)
    assert statistics.bootstrap(values, seed=3) == (low, high)
    # Every draw is the same, and says nothing.
    assert statistics.bootstrap([1.0] * 9) == statistics.wilson(9, 9)


def test_the_sign_flip_test_counts_all_signs_and_is_mcnemars():
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
    half = statistics.Z * math.sqrt(0.065)
    assert (compared.low, compared.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert (compared.low, compared.high) == pytest.approx((0.000305, 0.999695), abs=1e-6)
    unequal = paired.compare([(1, 2), (0, 2)], [(3, 4), (0, 4)])  # another number of samples
    assert (unequal.difference, unequal.better, unequal.worse) == (0.125, 1, 0)
    with pytest.raises(ValueError, match="zip"):
        paired.compare([(0, 1), (1, 1)], [(0, 1)])


@pytest.mark.parametrize(("better", "worse", "same", "low", "high"), [
    # 6/7 and 1/7; no difference is beyond 1.
    (5, 0, 0, 5 / 7 - statistics.Z * math.sqrt((1 - 25 / 49) / 7), 1.0),
    (0, 0, 10, -statistics.Z / math.sqrt(72), statistics.Z / math.sqrt(72)),  # 1/12 and 1/12
    (1, 0, 0, 1 / 3 - statistics.Z * math.sqrt(8 / 27), 1.0),  # 2/3 and 1/3
    (130, 25, 345, 0.163793, 0.254534),  # 105/502 -+ 1.96 sqrt((157/502 - (105/502)^2) / 502)
])  # fmt: skip
def test_problems_that_change_alike_leave_an_interval(better, worse, same, low, high):
    compared = paired.compare(
        [(0, 1)] * better + [(1, 1)] * (worse + same),
        [(1, 1)] * better + [(0, 1)] * worse + [(1, 1)] * same,
    )
    assert (compared.low, compared.high) == pytest.approx((low, high), abs=1e-6)


def test_the_interval_of_a_difference_does_not_depend_on_the_number_of_samples():
    for better, worse, same in itertools.product(range(7), repeat=3):
        if better + worse + same:
            before = [0] * better + [1] * (worse + same)
            after = [1] * better + [0] * worse + [1] * same
            once, thrice = (
                paired.compare([(n * k, k) for n in before], [(n * k, k) for n in after])
                for k in (1, 3)
            )
            assert -1 <= once.low <= once.difference <= once.high <= 1
            assert once.low < once.high
            assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high))


def test_problems_with_equal_shares_have_an_interval_all_the_same():
    """Take one problem that was half right: it says little of the next, so a draw misleads."""
    assert statistics.bootstrap([0.5]) == statistics.wilson(0.5, 1)
    low, high = statistics.bootstrap([0.25] * 8)
    assert low < 0.1
    assert high > 0.5
    # maj@k of right answers of several texts is a sum of floats.
    answers = [(text, 1.0) for text in "aabcddee"]
    shares = [statistics.maj_at_k(answers, k) for k in statistics.ks(8)]
    assert any(value != 1.0 for value in shares), "rounding is what this is about"
    for value in shares:
        assert statistics.bootstrap([value] * 20) == statistics.wilson(20, 20)
