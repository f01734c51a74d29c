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
FRACTION = re.compile(r"([-−]?)\s*\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
RESULT = re.compile(r":\s|[=≈→⇒>\n]|\\(?:approx|to|[Rr]ightarrow|implies)\b")  # behind it stands what comes of what is before it
JOINED = re.compile(r"(?:\b(?:or|and|to|plus|minus|times|by|over)\b|\\[A-Za-z]++|[^A-Za-z])*+", re.IGNORECASE)
EITHER = re.compile(r"(?:\\pm|±)\s*$")
ASSIGNED = re.compile(r"(?<![\w)}])([A-Za-z])\s*=\s*$")
FIRST_SENTENCE = re.compile(r"[^\n]*?(?=\.\s|\n|$)")
ANNOTATIONS = re.compile(r"<<[^<>]*>>|\\[!,;]|(?<=\d)\{(?=,\}\d)|(?<=\d\{,)\}(?=\d)")  # GSM8K's, and what LaTeX has within a number
UNSEEN = re.compile(r"\\text\w*|[\s${}]")  # what writes the same text otherwise


def equal(right: str, given: str) -> bool:
    """Whether `given`, a model's final answer, is `right`. `right` may be a solution that states it after `####` or in \\boxed."""
    right, given = (ANNOTATIONS.sub("", text.rpartition("####")[2].strip()) for text in (right, given))
    (right, _), (said, announced) = _said(right), _said(given)
    if _plain(right) in (_plain(given), _plain(said)):
        return True
    expression = _expression(right)
    if expression is None or (LIST.fullmatch(said) and not NUMBER.fullmatch(said)):  # it would take one of the list
        return False
    if NUMBER.fullmatch(right):
        number = _number(said, announced)
        if number is None or _unreduced(right, number) or not _verified(expression, number):
            return False
    return _verified(expression, _expression(said) or given)


def _verified(right: str, given: str) -> bool:
    from math_verify import parse, verify  # half a second

    # math-verify guards itself with SIGALRM, which only a main thread may set; answers are short enough to do without.
    parsed = [parse(text, parsing_timeout=None) for text in (right, given)]
    return bool(verify(*parsed, timeout_seconds=None))


def _number(said: str, announced: bool) -> str | None:
    """The number that a text states: its last one, or where it is announced the first of the result. None where that stands beside
    another, as in `4 or 5` and `12 * 12`: a completion that lists what may be right, or repeats the question, has not answered it."""
    text = FRACTION.sub(r" \1\2\3/\4\5 ", said)
    found = list(NUMBERS.finditer(text))
    if not found:
        return None
    at = len(found) - 1
    while announced and at > 0 and not RESULT.search(text, found[at - 1].end(), found[at].start()):
        at -= 1
    if EITHER.search(text, 0, found[at].start()) or any(_beside(text, *found[n : n + 2]) for n in (at - 1, at) if 0 <= n < len(found) - 1):
        return None
    return found[at].group().replace("−", "-").replace(" ", "").removeprefix("+")


def _beside(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """Whether nothing says that one of two numbers comes of the other: `x = 2 or x = 3` is no result either."""
    between = text[one.end() : other.start()]
    names = ASSIGNED.search(text, 0, one.start()), ASSIGNED.search(between)
    if names[0] and names[1] and names[0][1] == names[1][1]:
        between = between[: names[1].start()]
    return not RESULT.search(between) and JOINED.fullmatch(between) is not None


def _unreduced(right: str, number: str) -> bool:
    """10/2 where 5 is right: what was to be divided."""
    return "/" in number and "/" not in right and "." not in right


def _expression(text: str) -> str | None:
    """The text so that math-verify reads all of it; None where it is no mathematical expression as a whole."""
    text = text.replace("−", "-")
    if NUMBER.fullmatch(text):
        return text.removeprefix("+")
    inside = text.strip("$") if LATEX.fullmatch(text) else text
    if not NO_WORDS.fullmatch(inside) or "\\text" in inside or (inside == text and not OPERATOR.search(text)):
        return None
    return text if LATEX.fullmatch(text) else f"${text}$"


def _said(answer: str) -> tuple[str, bool]:
    """What an answer comes down to: what it boxes, or else announces, or else all of it; and whether it announces it."""
    _, found, rest = answer.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if found else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:at].strip(), False
    *before, said = ANNOUNCED.split(answer)
    said = said.strip(" \n*")
    if before and (first := FIRST_SENTENCE.match(said)) and NUMBERS.search(first.group()):
        said = first.group()  # what comes after a number that is announced says nothing of it
    return said.removesuffix("."), bool(before)


def _plain(text: str) -> str:
    return UNSEEN.sub("", text)
