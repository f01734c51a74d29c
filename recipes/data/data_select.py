"""Choose rows: filters, duplicates, the held-out split, mixing, balance, preference pairs.

All functions depend only on the rows and on `data`; random choices follow from `data.seed`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError, near_or_all
from launch.core.json_lines import json_rows

Row = dict[str, Any]

TEXT_FIELDS = ("prompt", "completion", "chosen", "rejected", "messages", "text")
TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")  # inputs of a chat template besides messages


def require(
    rows: Collection[Any],
    source: str,
    left_out: Mapping[str, Any] | None = None,
    remedy: str = "Relax data.filter, or use more rows.",
) -> None:
    """Raise UserError, with the counts of omitted rows, if no row of `source` is left."""
    if not rows:
        reasons = f"; left out: {dict(left_out)}" if left_out else ""
        raise UserError(f"{source}: no rows{reasons}. {remedy}")


def spelled(value: Any) -> list[str]:
    """Return [value] for a string, or else the text of each message."""
    if isinstance(value, str):
        return [value]
    return [str(message.get("content") or "") for message in value]


def fields(rows: Iterable[Row]) -> list[str]:
    """Return the fields that any row has, in the order in which they first occur."""
    return list(dict.fromkeys(field for row in rows for field in row))


def content(row: Row) -> str:
    """Return everything that a trainer reads from a row, as one string."""
    parts = []
    for field in TEXT_FIELDS:
        if row.get(field):
            parts += [field, *_with_roles(row[field])]
    for field in TEMPLATE_FIELDS:
        if row.get(field):
            parts.append(f"{field} {json.dumps(row[field], sort_keys=True, default=str)}")
    return "\0".join(parts)


def _with_roles(value: Any) -> list[str]:
    """Return the texts, and for messages also the other fields of a template, such as roles."""
    if isinstance(value, str):
        return [value]
    parts = []
    for message, text in zip(value, spelled(value), strict=True):
        rest = {key: item for key, item in message.items() if key != "content"}
        parts += [json.dumps(rest, sort_keys=True, default=str), text]
    return parts


def is_blank(value: Any) -> bool:
    """Return whether a text, or the last message, has only whitespace and no tool call."""
    if isinstance(value, str):
        return not value.strip()
    last = value[-1]
    calls = any(last.get(name) for name in last if name not in ("role", "content"))
    return not calls and not spelled([last])[0].strip()


def question(row: Row) -> str:
    """Return a row's question as one string: the prompt, or its equivalent.

    That is the common beginning of a pair without a prompt, the messages before the first answer,
    or else the whole row.
    """
    if row.get("prompt"):
        return "\0".join(spelled(row["prompt"]))
    if messages := row.get("messages"):
        roles = [message["role"] for message in messages]
        before = messages[: roles.index("assistant")] if "assistant" in roles else messages
        return "\0".join(spelled(before or messages))
    if row.get("chosen") and row.get("rejected"):
        # Unlike here, TRL's extract_prompt drops a shared message if one side continues the other.
        pairs = enumerate(zip(row["chosen"], row["rejected"], strict=False))
        shortest = min(len(row["chosen"]), len(row["rejected"]))
        shared = row["chosen"][: next((n for n, (a, b) in pairs if a != b), shortest)]
        if shared:
            return "\0".join(spelled(shared))
    return content(row)


def normalized(text: str) -> str:
    """Return a text with case, spaces and Unicode forms folded; signs stay, so 1-2 is not 1+2."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def row_filter(filters: DictConfig, questions: bool = False) -> Callable[[Row], str | None]:
    """Return a function that returns the first filter of `data.filter` that rejects a row, or None.

    It raises UserError for a missing field. With `questions`, a row needs no text field but the
    prompt, and passes the filters of missing text fields. recipes/data/data_prepare.py applies
    filters by length in tokens later.
    """
    optional = {name for name in TEXT_FIELDS if name != "prompt"} if questions else set()
    # Convert once, since access to OmegaConf would dominate the time.
    names = {"task": list(filters.tasks), "level": list(filters.levels)}
    equals = OmegaConf.to_container(filters.equals)
    regex = {name: re.compile(pattern) for name, pattern in filters.regex.items()}

    def rejecting_filter(row: Row) -> str | None:
        for name, allowed in names.items():
            if allowed and _field(row, name, f"data.filter.{name}s") not in allowed:
                return f"{name}s"
        for name, expected in equals.items():
            if name in optional and name not in row:
                continue
            if _field(row, name, f"data.filter.equals.{name}") != expected:
                return f"equals.{name}"
        for name, pattern in regex.items():
            if name in optional and name not in row:
                continue
            value = _field(row, name, f"data.filter.regex.{name}")
            text = "\n".join(spelled(value)) if isinstance(value, (str, list)) else str(value)
            if not pattern.search(text):
                return f"regex.{name}"
        return None

    return rejecting_filter


def _field(row: Row, name: str, key: str) -> Any:
    """Return a field that may be null. Raises UserError if it is missing."""
    if name not in row:
        raise UserError(f"{key}: a row has no field {name!r}.{near_or_all(name, row)}")
    return row[name]


def without_duplicates(rows: Iterable[Row], how: str, counts: dict[str, Any]) -> Iterator[Row]:
    """Yield the first of rows with equal content, and count the rest in counts["duplicates"].

    `how` is none, exact or normalized.
    """
    if how == "none":
        yield from rows
        return
    seen: set[bytes] = set()
    counts["duplicates"] = 0
    for row in rows:
        text = content(row) if how == "exact" else normalized(content(row))
        key = hashlib.sha256(text.encode()).digest()
        if key in seen:
            counts["duplicates"] += 1
        else:
            seen.add(key)
            yield row


def is_heldout(row: Row, fraction: float) -> bool:
    """Return whether a row is held out of training, by a hash of its normalized question.

    So adding rows does not move other rows, and near copies are always in the same split.
    """
    number = int.from_bytes(hashlib.sha256(normalized(question(row)).encode()).digest()[:8], "big")
    return number < fraction * 2**64


def num_known_questions(rows: Iterable[Row], path: str) -> int:
    """Count the `rows` whose question is also in the file, ignoring case and spaces."""
    questions = set()
    with contextlib.suppress(UserError):  # training on the file reports its faults
        for _, row in json_rows(Path(path)):
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                questions.add(normalized(question(row)))
    return sum(normalized(question(row)) in questions for row in rows)


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """Return `total` split by weight into integers, by largest remainder; ties go to the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def mixed(groups: Sequence[Sequence[Row]], weights: Sequence[float], seed: int) -> list[Row]:
    """Mix the groups by weight, in random order, into as many rows as they have together.

    A group smaller than its share is repeated, and the remainder sampled; a larger one is sampled.
    """
    rng, rows = random.Random(seed), []
    for group, number in zip(groups, quotas(sum(map(len, groups)), weights), strict=True):
        repeats, rest = divmod(number, len(group))
        rows += [*(list(group) * repeats), *rng.sample(list(group), rest)]
    rng.shuffle(rows)
    return rows


def balanced(rows: Sequence[Row], by: str, seed: int) -> list[Row]:
    """Resample the rows so that all values of the field `by` are equally frequent.

    The number of rows stays the same. Raises UserError if the field is missing from a row, or null.
    """
    for row in rows:
        _field({name: row[name] for name in row if row[name] is not None}, by, f"data.balance={by}")
    groups = list(grouped(rows, by).values())
    return mixed(groups, [1.0] * len(groups), seed)


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Return rows grouped by the values of `keys` as text, sorted, with numbers first.

    A missing or null value counts as "all".
    """
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    places: dict[tuple[str, ...], Any] = {}
    for row in rows:
        values = ["all" if row.get(key) is None else row[key] for key in keys]
        name = tuple(map(str, values))
        groups[name].append(row)
        if name not in places:
            places[name] = [
                (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
                for value in values
            ]
    return {name: groups[name] for name in sorted(groups, key=places.__getitem__)}


def has_equal_sides(row: Row) -> bool:
    """Return whether chosen and rejected differ only in outer spaces, which templates strip."""
    values = [row[name] for name in ("chosen", "rejected") if row.get(name) is not None]
    sides = [[text.strip() for text in _with_roles(value)] for value in values]
    return len(sides) == 2 and sides[0] == sides[1]


def pairs_of_samples(
    samples: Iterable[Row], most: int, of_any: bool = False
) -> tuple[list[Row], Counter[str]]:
    """Return pairs of verified samples {prompt, completion, score}, and counts of skipped prompts.

    For each prompt, the best sample is paired with the worst, the second best with the second
    worst, up to `most` pairs. The sides differ in score and, apart from outer spaces, in text.
    Truncated samples (`finished` is False) are left out, since they would teach wrong endings. With
    `of_any` (smoke=true) only texts must differ. The counts are of prompts without a pair, by
    reason.
    """
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in samples:
        by_prompt["\0".join(_with_roles(row["prompt"]))].append(row)
    pairs, skipped = [], Counter[str]()
    for group in by_prompt.values():
        distinct: dict[str, Row] = {}
        for row in group:
            if of_any or row.get("finished") is not False:
                distinct.setdefault("\0".join(spelled(row["completion"])).strip(), row)
        # The sort is stable, so samples with equal scores stay in order of sampling.
        ordered = sorted(distinct.values(), key=lambda row: -row["score"])
        matched = list(zip(ordered, reversed(ordered), strict=True))[: min(most, len(ordered) // 2)]
        new = []
        for best, worst in matched:
            if not of_any and best["score"] <= worst["score"]:
                continue
            pair = {"chosen": best["completion"], "rejected": worst["completion"]}
            for name, side in pair.items():  # TRL requires a row to be all messages or all text
                if isinstance(best["prompt"], str):
                    pair[name] = "".join(spelled(side))
                elif isinstance(side, str):
                    pair[name] = [{"role": "assistant", "content": side}]
            labels = {key: best[key] for key in ("task", "level") if key in best}
            new.append({"prompt": best["prompt"], **pair, **labels})
        pairs += new
        if not new:
            reason = "one answer" if distinct else "all cut off"
            skipped["equal scores" if len(distinct) > 1 else reason] += 1
    return pairs, skipped
