"""Whether an answer is the right one: as mathematics where the right one is an expression as a whole, else as text.

math-verify finds some expression in any text, so that of `blue 5` and `red 5` it compares 5 with 5: it is asked only about what is one.
"""

from __future__ import annotations

import itertools
import re

NUMBER = r"(?:\d{1,3}(?:[ ,]\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
SIGNED = rf"[-+−]?\s*[$€£¥]?{NUMBER}\s*\\?%?"
SINGLE = re.compile(rf"{SIGNED}")
IN_PROSE = re.compile(rf"[-−]?[$€£¥]?{NUMBER}%?")
BETWEEN = re.compile(r"\s*(?:[,;]?\s*(?:and\b|or\b)?)\s*")
COMMAS = re.compile(r"\s*(?:[,;]\s*(?:and\b|or\b)?|\band\b|\bor\b)\s*")
# Times, dates, scores, versions: digits that are no number, and no difference to work out either.
JOINED = re.compile(r"\d+(?:\s*[-–:/.]\s*\d+)+")
FRACTION = re.compile(r"\d+\s*/\s*\d+")
COMMAND = r"\\(?:[A-Za-z]+|[{}%,;! ])"
# Atomic and possessive: there are many ways to read a row of digits, and a model writes long ones.
PLAIN = re.compile(
    rf"(?:{COMMAND}|(?<![\d.])[$€£¥]?(?>{NUMBER})|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[-+−*/^_=<>≤≥×÷·√π∞°%!|(){{}}\[\],\s])++"
)
BESIDE = re.compile(r"\d\s+[A-Za-z\d]|[A-Za-z]\s+[A-Za-z\d]")  # of a plain expression: `10 m`, `1 1/2`
OPERATOR = re.compile(r"[-+−*/^=<>≤≥×÷·√_]|\\[A-Za-z]")
ENVIRONMENT = r"(?:\$\$[^$]+\$\$|\$[^$]+\$|\\\((?:(?!\\\)).)+\\\)|\\\[(?:(?!\\\]).)+\\\])\s*\\?%?"
LATEX = re.compile(rf"{ENVIRONMENT}(?:\s*(?:,?\s*and|,?\s*or|,)\s*{ENVIRONMENT})*\.?", re.DOTALL)
NO_WORDS = re.compile(r"\\(?:text\w*|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]{3,}")
TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}")
ANNOUNCED = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*:)\s*", re.IGNORECASE)
SPELLED = {"−": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "°": r"^\circ "}


def equal(right: str, given: str) -> bool:
    """Whether `given`, a model's final answer, is `right`. `right` may be a solution that states it after `####` or in \\boxed."""
    if _spaced(right) == _spaced(given):
        return True
    right, said = right.rpartition("####")[2].strip(), _said(given)
    if _spaced(_bare(right)) in (_spaced(given), _spaced(_bare(said))):
        return True
    parts = _parts(right)
    if len(parts) > 1:  # of numbers that are listed in plain text the order counts
        others = _parts(_bare(said))
        return len(parts) == len(others) and all(equal(a, b) for a, b in zip(parts, others, strict=True))
    expression = _expression(right)
    if expression is None:
        return False
    answer = _expression(said)
    if answer is None:
        if JOINED.fullmatch(said) or (SINGLE.fullmatch(_bare(right)) and _only_lists(said)):
            return False  # math-verify would pick one of its numbers
        answer = given
    return _verified(expression, answer)


def _verified(right: str, given: str) -> bool:
    from math_verify import parse, verify  # half a second

    # math-verify guards itself with SIGALRM, which only a main thread may set; answers are short enough to do without.
    parsed = [parse(text, parsing_timeout=None) for text in (right, given)]
    return bool(verify(*parsed, timeout_seconds=None))


def _expression(text: str) -> str | None:
    """The text as math-verify reads all of it; None where it is no mathematical expression as a whole."""
    if _boxed(text) is not None or LATEX.fullmatch(text):
        return None if WORD.search(NO_WORDS.sub("", _inside(text))) or TEXT.fullmatch(_inside(text)) else text
    text = text.removesuffix(".")
    if SINGLE.fullmatch(text) and not re.search("[eE−]", text):
        return text
    if not PLAIN.fullmatch(text) or not re.search(r"\d|\\[A-Za-z]|[π∞]", text):
        return None
    if JOINED.fullmatch(text) and not SINGLE.fullmatch(text) and not FRACTION.fullmatch(text):
        return None
    without_commands = re.sub(COMMAND, "", text)
    listed = len(_parts(text)) > 1
    if not SINGLE.fullmatch(text) and not listed and BESIDE.search(without_commands):
        return None
    without_exponents = re.sub(r"(?<=\d)[eE][+-]?\d", "", without_commands)
    if re.search("[A-Za-z]", without_exponents) and not OPERATOR.search(text):
        return None
    text = re.sub(r"(?<=\d)[eE]([+-]?\d+)", r" \\cdot 10^{\1}", text)
    text = re.sub(r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}", text)
    if text.startswith("{") and text.endswith("}"):
        text = rf"\{{{text[1:-1]}\}}"
    return f"${''.join(SPELLED.get(c, c) for c in text)}$"


def _parts(text: str) -> list[str]:
    """The numbers of a list in plain text; else the text alone."""
    parts = COMMAS.split(text)
    return (
        parts
        if len(parts) > 1 and not SINGLE.fullmatch(text) and all(SINGLE.fullmatch(p) or FRACTION.fullmatch(p) for p in parts)
        else [text]
    )


def _only_lists(text: str) -> bool:
    """Whether all the numbers of a text, of which there are several, stand in one list."""
    found = list(IN_PROSE.finditer(text))
    return len(found) > 1 and all(BETWEEN.fullmatch(text[a.end() : b.start()]) for a, b in itertools.pairwise(found))


def _said(answer: str) -> str:
    """What an answer comes down to: what it boxes, or else announces, or else all of it."""
    boxed = _boxed(answer)
    if boxed is not None:
        return f"${boxed}$"
    return ANNOUNCED.split(answer)[-1].strip().strip("*").strip()


def _bare(text: str) -> str:
    """Without what marks it as LaTeX or as text within LaTeX, and without the end of a sentence."""
    return TEXT.sub(r"\1", _inside(text)).strip().removesuffix(".")


def _inside(text: str) -> str:
    boxed = _boxed(text)
    if boxed is not None:
        return boxed.strip()
    found = re.fullmatch(ENVIRONMENT, text.strip(), re.DOTALL)
    return re.sub(r"^(?:\$+|\\[(\[])|(?:\$+|\\[)\]])$", "", text.strip()).strip() if found else text.strip()


def _boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(rest if found else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:i]
    return None


def _spaced(text: str) -> str:
    return " ".join(text.split())
