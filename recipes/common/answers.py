"""Whether an answer is the right one: as mathematics where the right one is an expression as a whole, else as text.

math-verify finds some expression in any text, so that of `blue 5` and `red 5` it compares 5 with 5: it is asked only about what is one.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"[-+−]?\s*[$€£¥]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\s*\\?%?|[-+−]?\d+\s*/\s*\d+")
LATEX = re.compile(r"\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)
# No words: letters stand alone, as variables, or are commands. And more than digits side by side, as dates, scores and units are.
NO_WORDS = re.compile(r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^A-Za-z])+")
OPERATOR = re.compile(r"[=^*√<>≤≥\\]|(?<!\d)[-+−](?=.)|[-+−](?!\d)")
LIST = re.compile(r"[\d.]+(?:[\s,;:]+[\d.]+)+")
ANNOUNCED = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*:)\s*", re.IGNORECASE)
# A number in a text: not part of a word, as in F5 or 1e5.
NUMBERS = re.compile(
    r"(?<![A-Za-z\d.])(?:[-+−]\s?)?[$€£¥]?(?:\d+\s?/\s?\d+|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)(?![\d/]|[eE][-+]?\d)(?:\s?\\?%)?"
)
FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
JOINED = re.compile(r"(?:\b(?:or|and|to|plus|minus|times|by|over)\b|\\[A-Za-z]+|[^A-Za-z=])*", re.IGNORECASE)  # and yet no `: `
FIRST_SENTENCE = re.compile(r"[^\n]*?(?=\.\s|\n|$)")
UNSEEN = re.compile(r"\\text\w*|[\s${}]")  # what writes the same text otherwise


def equal(right: str, given: str) -> bool:
    """Whether `given`, a model's final answer, is `right`. `right` may be a solution that states it after `####` or in \\boxed."""
    right, said = _said(right.rpartition("####")[2].strip()), _said(given)
    if _plain(right) in (_plain(given), _plain(said)):
        return True
    if NUMBER.fullmatch(right):
        number = _number(said)
        return number is not None and not _unreduced(right, number) and _verified(right.replace("−", "-"), number)
    expression = _expression(right)
    if expression is None or (LIST.fullmatch(said) and not NUMBER.fullmatch(said)):  # it would take one of the list
        return False
    return _verified(expression, _expression(said) or given)


def _verified(right: str, given: str) -> bool:
    from math_verify import parse, verify  # half a second

    # math-verify guards itself with SIGALRM, which only a main thread may set; answers are short enough to do without.
    parsed = [parse(text, parsing_timeout=None) for text in (right, given)]
    return bool(verify(*parsed, timeout_seconds=None))


def _number(said: str) -> str | None:
    """The last number of the text, as that of a sum's right side; None where it stands beside another, as in `4 or 5` and `12 * 12`: a
    completion that lists what may be right, or repeats the question, has not answered it."""
    text = FRACTION.sub(r" \1\2/\3\4 ", said)
    found = list(NUMBERS.finditer(text))
    if not found:
        return None
    between = text[found[-2].end() : found[-1].start()] if len(found) > 1 else "="
    if not re.search(r":\s", between) and JOINED.fullmatch(between):
        return None
    return found[-1].group().replace("−", "-").removeprefix("+")


def _unreduced(right: str, number: str) -> bool:
    """10/2 where 5 is right: what was to be divided."""
    return "/" in number and "/" not in right and "." not in right


def _expression(text: str) -> str | None:
    """The text so that math-verify reads all of it; None where it is no mathematical expression as a whole."""
    text = text.replace("−", "-")
    if NUMBER.fullmatch(text):
        return text
    inside = text.strip("$") if LATEX.fullmatch(text) else text
    if not NO_WORDS.fullmatch(inside) or "\\text" in inside or (inside == text and not OPERATOR.search(text)):
        return None
    return text if LATEX.fullmatch(text) else f"${text}$"


def _said(answer: str) -> str:
    """What an answer comes down to: what it boxes, or else announces, or else all of it."""
    _, found, rest = answer.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if found else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:at].strip()
    *before, announced = ANNOUNCED.split(answer)
    said = announced.strip(" \n*")
    if before and (first := FIRST_SENTENCE.match(said)) and NUMBERS.search(first.group()):
        said = first.group()  # what comes after a number that is announced says nothing of it
    return said.removesuffix(".")


def _plain(text: str) -> str:
    return UNSEEN.sub("", text)
