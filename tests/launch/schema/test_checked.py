"""Test the words of a range, which messages show as the remedy."""

import pytest

from launch.schema.checked import Range


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(least=1), "at least 1"),
        (Range(least=1, most=8), "at least 1 and at most 8"),
        (Range(above=0, below=1), "above 0 and below 1"),
        (Range(below=10), "below 10"),
        (Range(most=10), "at most 10"),
    ],
)
def test_words_of_a_range(allowed, words):
    assert str(allowed) == words
