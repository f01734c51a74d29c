"""Which rows of those that were read are used: filters, duplicates, the held-out split, mixing, balance, preference pairs.

Everything here is a function of the rows and of `data`; random choices follow from `data.seed`.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.common.errors import UserError, near

Row = dict[str, Any]

TEXT_FIELDS = ("prompt", "completion", "chosen", "rejected", "messages", "text")
TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")  # what a chat template is given of a row beside its messages


def spelled(value: Any) -> list[str]:
    """The texts of a plain string, or of messages."""
    return [value] if isinstance(value, str) else [str(message.get("content") or "") for message in value]


def fields(rows: Iterable[Row]) -> list[str]:
    """Those that any row has, in the order of their first one."""
    return list(dict.fromkeys(field for row in rows for field in row))


def content(row: Row) -> str:
    """All that a trainer reads of a row, as one string."""
    of_templates = [f"{field} {json.dumps(row[field], sort_keys=True, default=str)}" for field in TEMPLATE_FIELDS if row.get(field)]
    return "\0".join([text for field in TEXT_FIELDS if row.get(field) for text in [field, *_with_roles(row[field])]] + of_templates)


def _with_roles(value: Any) -> list[str]:
    """As `spelled`, and of messages all else that a template may write: who says it, and calls of tools."""
    if isinstance(value, str):
        return [value]
    rest = [json.dumps({k: v for k, v in message.items() if k != "content"}, sort_keys=True, default=str) for message in value]
    return [text for pair in zip(rest, spelled(value), strict=True) for text in pair]


def is_blank(value: Any) -> bool:
    """Whether a text, or the last of messages, holds nothing but spaces, and calls no tool."""
    if isinstance(value, str):
        return not value.strip()
    return not spelled(value[-1:])[0].strip() and not any(value[-1].get(name) for name in value[-1] if name not in ("role", "content"))


def question(row: Row) -> str:
    """What is asked: the prompt, of a pair without one what both sides begin with; of messages those before the first answer; of a text all
    of it."""
    if row.get("prompt"):
        return "\0".join(spelled(row["prompt"]))
    if row.get("messages"):
        roles = [message["role"] for message in row["messages"]]
        asked = row["messages"][: roles.index("assistant")] if "assistant" in roles else row["messages"]
        return "\0".join(spelled(asked or row["messages"]))
    if row.get("chosen") and row.get("rejected"):
        shared = _shared(row["chosen"], row["rejected"])
        if shared:
            return "\0".join(spelled(shared))
    return content(row)


def _shared(chosen: Any, rejected: Any) -> Any:
    """The messages, or characters, that both begin with: TRL's implicit prompt. Its trl.data_utils.extract_prompt takes one off where one
    side goes on from the other."""
    number = next((n for n, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    return chosen[: min(len(chosen), len(rejected)) if number is None else number]


def normalized(text: str) -> str:
    """Without differences of case, of spaces and of how Unicode writes a character. Signs stay: 1-2 and 1+2 are two questions."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def row_filter(filters: DictConfig, questions: bool = False) -> Callable[[Row], str | None]:
    """A function of a row: the first filter of `data.filter` that leaves it out, or None. It raises UserError for a field the row lacks.

    `questions`: rows that a model is asked, which need not have the fields of TRL's answers; a filter by one of these leaves such a row in.
    Lengths in tokens are looked at later, by recipes/common/data_prepare.py.
    """
    unasked = {name for name in TEXT_FIELDS if name != "prompt"} if questions else set()
    tasks, levels, equals = list(filters.tasks), list(filters.levels), OmegaConf.to_container(filters.equals)
    regex = {name: re.compile(pattern) for name, pattern in filters.regex.items()}  # read once: OmegaConf takes longer than all else here

    def refused_by(row: Row) -> str | None:
        if tasks and _field(row, "task", "data.filter.tasks") not in tasks:
            return "tasks"
        if levels and _field(row, "level", "data.filter.levels") not in levels:
            return "levels"
        for name, wanted in equals.items():
            if name in unasked and name not in row:
                continue
            if _field(row, name, f"data.filter.equals.{name}") != wanted:
                return f"equals.{name}"
        for name, pattern in regex.items():
            if name in unasked and name not in row:
                continue
            value = _field(row, name, f"data.filter.regex.{name}")
            if not pattern.search("\n".join(spelled(value)) if isinstance(value, (str, list)) else str(value)):
                return f"regex.{name}"
        return None

    return refused_by


def _field(row: Row, name: str, key: str) -> Any:
    if name not in row:
        raise UserError(f"{key}: a row has no field {name!r}. {near(name, row)}")
    return row[name]


def without_duplicates(rows: Iterable[Row], how: str, counts: dict[str, Any]) -> Iterator[Row]:
    """The first of rows with equal content; `how` is none, exact or normalized. Others are added to `counts`."""
    if how == "none":
        yield from rows
        return
    seen: set[bytes] = set()
    counts["duplicates"] = 0
    for row in rows:
        key = hashlib.sha256((content(row) if how == "exact" else normalized(content(row))).encode()).digest()
        if key in seen:
            counts["duplicates"] += 1
        else:
            seen.add(key)
            yield row


def is_heldout(row: Row, fraction: float) -> bool:
    """Whether a row is never trained on: by a hash of its question alone, so that it stays where it is when rows are added.

    Rows with one question are on one side. The hash is of the normalized question, so near copies are on one side too.
    """
    number = int.from_bytes(hashlib.sha256(normalized(question(row)).encode()).digest()[:8], "big")
    return number < fraction * 2**64


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """`total` shared out by `weights`, each within one of its exact share (largest remainders; the earlier one of equals)."""
    exact = [total * weight / sum(weights) for weight in weights]
    given = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (given[i] - exact[i], i))
    for i in by_remainder[: total - sum(given)]:
        given[i] += 1
    return given


def mixed(groups: Sequence[Sequence[Row]], weights: Sequence[float], seed: int) -> list[Row]:
    """As many rows as all groups hold together, each group with its share of them, in random order.

    A group with fewer rows than its share is repeated whole, then by a sample; of one with more a sample is taken.
    """
    rng, chosen = random.Random(seed), []
    for group, number in zip(groups, quotas(sum(map(len, groups)), weights), strict=True):
        whole, rest = divmod(number, len(group))
        chosen += [*(list(group) * whole), *rng.sample(list(group), rest)]
    rng.shuffle(chosen)
    return chosen


def balanced(rows: Sequence[Row], by: str, seed: int) -> list[Row]:
    """As many rows, every task (or level) as often as every other. Raises UserError for rows without that field, or with null in it."""
    for row in rows:
        if _field(row, by, f"data.balance={by}") is None:
            raise UserError(
                f"data.balance={by}: a row has {by} null, so it counts for none. Give every row one, or leave data.balance out."
            )
    groups = grouped(rows, by)
    return mixed(list(groups.values()), [1.0] * len(groups), seed)


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by their values of `keys` as text, numbers first and in their order; a row without such a value, or with null, is of "all"."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    places: dict[tuple[str, ...], Any] = {}
    for row in rows:
        values = ["all" if row.get(key) is None else row[key] for key in keys]
        name = tuple(map(str, values))
        groups[name].append(row)
        if name not in places:
            places[name] = [(0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value)) for value in values]
    return {name: groups[name] for name in sorted(groups, key=places.__getitem__)}


def check_pair(row: Row, where: str) -> None:
    """Raises UserError for a preference pair whose sides are equal but for spaces at their ends, which many templates take off: there is
    nothing to prefer, and its gradient is zero."""
    sides = [[text.strip() for text in _with_roles(row[name])] for name in ("chosen", "rejected") if row.get(name) is not None]
    if len(sides) == 2 and sides[0] == sides[1]:
        raise UserError(f"{where}: chosen and rejected are equal, so nothing is preferred. Remove the row, or give two different answers.")


def check_sample(row: Row, where: str) -> None:
    """Raises UserError for a sample whose score is no number."""
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise UserError(f"{where}: score is {score!r}, and samples are compared by it. Give a number, as method=sample does.")


def pairs_of_samples(samples: Iterable[Row], most: int, of_any: bool = False) -> tuple[list[Row], Counter[str]]:
    """Preference pairs of verified samples ({prompt, completion, score}), and how many prompts gave none, by reason.

    Of each prompt's samples the best with the worst, then the second best with the second worst, at most `most` pairs; the sides of
    a pair differ in score and, but for spaces at their ends, in text. Samples that were cut off (`finished` is False) are left out: one
    would teach to stop in the middle, or not to. `of_any`: neither holds, only texts differ (smoke=true).
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
        ordered = sorted(distinct.values(), key=lambda row: -row["score"])  # stable: of equal scores the first sampled
        half = list(zip(ordered, reversed(ordered), strict=True))[: min(most, len(ordered) // 2)]
        found = [(best, worst) for best, worst in half if of_any or best["score"] > worst["score"]]
        pairs += [_pair(best, worst) for best, worst in found]
        if not found:
            skipped["equal scores" if len(distinct) > 1 else "one answer" if distinct else "all cut off"] += 1
    return pairs, skipped


def _pair(best: Row, worst: Row) -> Row:
    sides = {"chosen": best["completion"], "rejected": worst["completion"]}
    if isinstance(best["prompt"], str):  # TRL wants all of a row conversational, or none of it
        sides = {name: "".join(spelled(c)) for name, c in sides.items()}
    else:
        sides = {name: [{"role": "assistant", "content": c}] if isinstance(c, str) else c for name, c in sides.items()}
    kept = {key: best[key] for key in ("task", "level") if key in best}
    return {"prompt": best["prompt"], **sides, **kept}
