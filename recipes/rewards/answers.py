"""Compare answers, as mathematics if the whole right answer is an expression, else as text.

math-verify finds an expression in any text, so it would find `blue 5` and `red 5` equal. It is
called only if the whole text is an expression.
"""

from __future__ import annotations

import re

NUMBER = re.compile(
    r"[-+−]?\s*[$€£¥]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\s*\\?%?|[-+−]?\d+\s*/\s*\d+"
)
LATEX = re.compile(r"\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)
# An expression has no words: letters are single variables or LaTeX commands. Adjacent digits are
# not sufficient, since dates, scores and units look similar.
NO_WORDS = re.compile(r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^A-Za-z])+")
OPERATOR = re.compile(r"[=^*√<>≤≥\\]|(?<!\d)[-+−](?=.)|[-+−](?!\d)")
LIST = re.compile(r"[\d.]+(?:[\s,;:]+[\d.]+)+")
ANNOUNCED = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*:)\s*", re.IGNORECASE)
# A number in a text, not part of a word such as F5 or 1e5.
NUMBERS = re.compile(
    r"(?<![A-Za-z\d.])(?:[-+−]\s?)?[$€£¥]?"
    r"(?:\d+\s?/\s?\d+|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
    r"(?![\d/]|[eE][-+]?\d)(?:\s?\\?%)?"
)
FRACTION = re.compile(
    r"([-−]?)\s*\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
)
# A separator after which a result follows.
RESULT = re.compile(r":\s|[=≈→⇒>\n]|\\(?:approx|to|[Rr]ightarrow|implies)\b")
JOINED = re.compile(
    r"(?:\b(?:or|and|to|plus|minus|times|by|over)\b|\\[A-Za-z]++|[^A-Za-z])*+", re.IGNORECASE
)
EITHER = re.compile(r"(?:\\pm|±)\s*$")
ASSIGNED = re.compile(r"(?<![\w)}])([A-Za-z])\s*=\s*$")
FIRST_SENTENCE = re.compile(r"[^\n]*?(?=\.\s|\n|$)")
# GSM8K's annotations, and LaTeX within a number.
ANNOTATIONS = re.compile(r"<<[^<>]*>>|\\[!,;]|(?<=\d)\{(?=,\}\d)|(?<=\d\{,)\}(?=\d)")
UNSEEN = re.compile(r"\\text\w*|[\s${}]")  # notation that does not change the meaning


def equal(right: str, answer: str) -> bool:
    """Return whether `answer`, a model's final answer, is `right`.

    `right` may be a solution that states its answer after `####` or in \\boxed.
    """
    right, answer = (
        ANNOTATIONS.sub("", text.rpartition("####")[2].strip()) for text in (right, answer)
    )
    (right, _), (stated, announced) = _stated(right), _stated(answer)
    if _plain(right) in (_plain(answer), _plain(stated)):
        return True
    expression = _expression(right)
    # math-verify would accept a single item of a list
    if expression is None or (LIST.fullmatch(stated) and not NUMBER.fullmatch(stated)):
        return False
    if NUMBER.fullmatch(right):
        number = _number(stated, announced)
        if number is None or not _verified(expression, number):
            return False
        # Reject quotients that were not computed, such as 10/2 for 5.
        if "/" in number and "/" not in right and "." not in right:
            return False
    return _verified(expression, _expression(stated) or answer)


def _verified(right: str, answer: str) -> bool:
    from math_verify import parse, verify  # takes half a second

    # For a timeout, math-verify sets SIGALRM, which works only in the main thread. Answers are so
    # short that they need no timeout.
    parsed = [parse(text, parsing_timeout=None) for text in (right, answer)]
    return bool(verify(*parsed, timeout_seconds=None))


def _number(stated: str, announced: bool) -> str | None:
    """Return the number that a text states: the last one, or the first of an announced result.

    Return None if another number is adjacent, as in `4 or 5` and `12 * 12`, because a completion
    that lists candidates or repeats the question has not answered it.
    """
    text = FRACTION.sub(r" \1\2\3/\4\5 ", stated)
    numbers = list(NUMBERS.finditer(text))
    if not numbers:
        return None
    at = len(numbers) - 1
    while (
        announced and at > 0 and not RESULT.search(text, numbers[at - 1].end(), numbers[at].start())
    ):
        at -= 1
    if EITHER.search(text, 0, numbers[at].start()) or any(
        _is_ambiguous(text, *numbers[n : n + 2]) for n in (at - 1, at) if 0 <= n < len(numbers) - 1
    ):
        return None
    return numbers[at].group().replace("−", "-").replace(" ", "").removeprefix("+")


def _is_ambiguous(text: str, first: re.Match[str], second: re.Match[str]) -> bool:
    """Return True if it is unclear which of two adjacent numbers is the result.

    This includes `x = 2 or x = 3`.
    """
    between = text[first.end() : second.start()]
    names = ASSIGNED.search(text, 0, first.start()), ASSIGNED.search(between)
    if names[0] and names[1] and names[0][1] == names[1][1]:
        between = between[: names[1].start()]
    return not RESULT.search(between) and JOINED.fullmatch(between) is not None


def _expression(text: str) -> str | None:
    """Return the text in a form that math-verify reads as a whole, or None for other texts."""
    text = text.replace("−", "-")
    if NUMBER.fullmatch(text):
        return text.removeprefix("+")
    inside = text.strip("$") if LATEX.fullmatch(text) else text
    if (
        not NO_WORDS.fullmatch(inside)
        or "\\text" in inside
        or (inside == text and not OPERATOR.search(text))
    ):
        return None
    return text if LATEX.fullmatch(text) else f"${text}$"


def _stated(answer: str) -> tuple[str, bool]:
    """Return the boxed part of an answer, the announced part, or all; and whether announced."""
    _, boxed, rest = answer.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if boxed else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:at].strip(), False
    *before, stated = ANNOUNCED.split(answer)
    stated = stated.strip(" \n*")
    if before and (first := FIRST_SENTENCE.match(stated)) and NUMBERS.search(first.group()):
        stated = first.group()  # what follows an announced number does not matter
    return stated.removesuffix("."), bool(before)


def _plain(text: str) -> str:
    return UNSEEN.sub("", text)
