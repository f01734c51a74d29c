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
UNSEEN = re.compile(r"\\text\w*|[\s${}]")  # what writes the same text otherwise


def equal(right: str, given: str) -> bool:
    """Whether `given`, a model's final answer, is `right`. `right` may be a solution that states it after `####` or in \\boxed."""
    right, said = _said(right.rpartition("####")[2].strip()), _said(given)
    if _plain(right) in (_plain(given), _plain(said)):
        return True
    expression = _expression(right)
    if expression is None or (LIST.fullmatch(said) and not NUMBER.fullmatch(said)):  # it would take one of the list
        return False
    return _verified(expression, _expression(said) or given)


def _verified(right: str, given: str) -> bool:
    from math_verify import parse, verify  # half a second

    # math-verify guards itself with SIGALRM, which only a main thread may set; answers are short enough to do without.
    parsed = [parse(text, parsing_timeout=None) for text in (right, given)]
    return bool(verify(*parsed, timeout_seconds=None))


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
    return ANNOUNCED.split(answer)[-1].strip(" \n*").removesuffix(".")


def _plain(text: str) -> str:
    return UNSEEN.sub("", text)
