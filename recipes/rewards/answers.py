"""Compare answers: as mathematics if the right answer is an expression, otherwise as text.

math-verify extracts an expression from any text, so `blue 5` would equal `red 5`. To prevent
that, it is called only if all of the right answer is an expression.
"""

from __future__ import annotations

import re
from decimal import Decimal

NUMBER = re.compile(
    r"[-+−]?\s*[$€£¥]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\s*\\?%?|[-+−]?\d+\s*/\s*\d+"
)
LATEX = re.compile(r"\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)
# An expression has no words: letters are single variables or LaTeX commands. It also needs an
# OPERATOR, since dates, scores and units consist of digits too.
NO_WORDS = re.compile(r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^A-Za-z])+")
OPERATOR = re.compile(r"[=^*√<>≤≥\\]|(?<!\d)[-+−](?=.)|[-+−](?!\d)")
LIST = re.compile(r"[\d.]+(?:[\s,;:]+[\d.]+)+")
ANNOUNCEMENT = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*:)\s*", re.IGNORECASE)
# A number in a text that is not part of a word, such as F5 or 1e5.
NUMBERS = re.compile(
    r"(?<![A-Za-z\d.])(?:[-+−]\s?)?[$€£¥]?"
    r"(?:\d+\s?/\s?\d+|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
    r"(?![\d/]|[eE][-+]?\d)(?:\s?\\?%)?"
)
FRACTION = re.compile(
    r"([-−]?)\s*\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
)
# Separators that precede a result.
RESULT_SEPARATOR = re.compile(r":\s|[=≈→⇒>\n]|\\(?:approx|to|[Rr]ightarrow|implies)\b")
CONNECTIVE = re.compile(
    r"(?:\b(?:or|and|to|plus|minus|times|by|over)\b|\\[A-Za-z]++|[^A-Za-z])*+", re.IGNORECASE
)
PLUS_MINUS = re.compile(r"(?:\\pm|±)\s*$")
ASSIGNMENT = re.compile(r"(?<![\w)}])([A-Za-z])\s*=\s*$")
FIRST_SENTENCE = re.compile(r"[^\n]*?(?=\.\s|\n|$)")
# GSM8K's annotations, and LaTeX within a number.
ANNOTATIONS = re.compile(r"<<[^<>]*>>|\\[!,;]|(?<=\d)\{(?=,\}\d)|(?<=\d\{,)\}(?=\d)")
DECIMAL = re.compile(r"[-+]?[\d,]+(?:\.\d+)?")
RELATIVE_TOLERANCE = Decimal("1e-5")
SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}")
FORMATTING = re.compile(r"\\text\w*|[\s${}]")  # does not change the meaning


def equal(right: str, answer: str) -> bool:
    """Return whether a model's final `answer` equals `right`.

    `right` may be a solution whose answer is after `####` or in \\boxed.
    """
    right, answer = (
        ANNOTATIONS.sub("", text.rpartition("####")[2].strip()) for text in (right, answer)
    )
    (right, _), (result, is_announced) = _result(right), _result(answer)
    if _plain(right) in (_plain(answer), _plain(result)):
        return True
    right, result, answer = (
        format(Decimal(text), "f") if SCIENTIFIC.fullmatch(text) else text
        for text in (right, result, answer)
    )
    expression = _expression(right)
    # math-verify would accept a list that contains the right answer.
    if expression is None or (LIST.fullmatch(result) and not NUMBER.fullmatch(result)):
        return False
    if NUMBER.fullmatch(right):
        number = _number(result, is_announced)
        if number is None or not _is_equivalent(expression, number):
            return False
        # math-verify rounds to 6 decimals, so 0.0000004 would equal 0.0000005.
        values = [Decimal(t.replace(",", "")) for t in (right, number) if DECIMAL.fullmatch(t)]
        if len(values) == 2 and abs(values[0] - values[1]) > RELATIVE_TOLERANCE * abs(values[0]):
            return False
        # Reject uncomputed quotients, such as 10/2 for 5.
        if "/" in number and "/" not in right and "." not in right:
            return False
    return _is_equivalent(expression, _expression(result) or answer)


def _is_equivalent(right: str, answer: str) -> bool:
    from math_verify import parse, verify  # takes half a second

    # math-verify's timeout uses SIGALRM, which works only in the main thread. Short answers do not
    # need it.
    parsed = [parse(text, parsing_timeout=None) for text in (right, answer)]
    return bool(verify(*parsed, timeout_seconds=None))


def _number(result: str, is_announced: bool) -> str | None:
    """Return the last number of a result, or the first number of an announced result.

    Return None if there is no number, if `4 or 5` lists candidates, or if `12 * 12` repeats the
    question.
    """
    text = FRACTION.sub(r" \1\2\3/\4\5 ", result)
    numbers = list(NUMBERS.finditer(text))
    if not numbers:
        return None
    i = len(numbers) - 1
    while (
        is_announced
        and i > 0
        and not RESULT_SEPARATOR.search(text, numbers[i - 1].end(), numbers[i].start())
    ):
        i -= 1
    if PLUS_MINUS.search(text, 0, numbers[i].start()) or any(
        _is_ambiguous(text, *numbers[n : n + 2]) for n in (i - 1, i) if 0 <= n < len(numbers) - 1
    ):
        return None
    return numbers[i].group().replace("−", "-").replace(" ", "").removeprefix("+")


def _is_ambiguous(text: str, first: re.Match[str], second: re.Match[str]) -> bool:
    """Return whether either of two adjacent numbers may be the result, as in `x = 2 or x = 3`."""
    between = text[first.end() : second.start()]
    names = ASSIGNMENT.search(text, 0, first.start()), ASSIGNMENT.search(between)
    if names[0] and names[1] and names[0][1] == names[1][1]:
        between = between[: names[1].start()]
    return not RESULT_SEPARATOR.search(between) and CONNECTIVE.fullmatch(between) is not None


def _expression(text: str) -> str | None:
    """Return an expression in the form that math-verify needs, or None for other texts."""
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


def _result(answer: str) -> tuple[str, bool]:
    """Return an answer's result, and whether a phrase such as `the answer is` announces it.

    The result is the content of the last \\boxed, or the text after the phrase, or all of the text.
    """
    _, boxed, rest = answer.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(rest if boxed else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:i].strip(), False
    *before, result = ANNOUNCEMENT.split(answer)
    result = result.strip(" \n*")
    if before and (first := FIRST_SENTENCE.match(result)) and NUMBERS.search(first.group()):
        result = first.group()  # ignore the text after an announced number
    return result.removesuffix("."), bool(before)


def _plain(text: str) -> str:
    return FORMATTING.sub("", text)
