"""Filter, deduplicate, split, mix and balance rows, and make preference pairs.

Results depend only on the rows and on `data`; random choices depend on `data.seed`.
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
from launch.core.row_columns import mapped
from launch.core.row_formats import TEMPLATE_FIELDS
from launch.core.row_messages import Row, message_texts, texts_with_roles

TEXT_FIELDS = ("prompt", "completion", "chosen", "rejected", "messages", "text")


def require(
    rows: Collection[Any],
    source: str,
    omitted: Mapping[str, Any] | None = None,
    remedy: str = "Relax data.filter, or use more rows.",
) -> None:
    """Raise UserError if `rows` is empty. The message shows the counts `omitted`, by reason."""
    if not rows:
        reasons = f" (omitted: {dict(omitted)})" if omitted else ""
        raise UserError(f"{source}: no rows{reasons}. {remedy}")


def fields(rows: Iterable[Row]) -> list[str]:
    """Return the fields of all rows, in order of first occurrence."""
    return list(dict.fromkeys(field for row in rows for field in row))


def content(row: Row) -> str:
    """Return everything that a trainer reads from a row, as one string."""
    parts = []
    for field in TEXT_FIELDS:
        if row.get(field):
            parts += [field, *texts_with_roles(row[field])]
    for field in TEMPLATE_FIELDS:
        if row.get(field):
            parts.append(f"{field} {json.dumps(row[field], sort_keys=True, default=str)}")
    return "\0".join(parts)


def is_blank(value: Any) -> bool:
    """Return whether a text, or the last message, is only whitespace and has no tool call."""
    if isinstance(value, str):
        return not value.strip()
    last = value[-1]
    calls = any(last.get(name) for name in last if name not in ("role", "content"))
    return not calls and not message_texts([last])[0].strip()


def question(row: Row) -> str:
    """Return a row's question as one string: its messages before the first answer to a user.

    So a conversation of several turns has the same question as messages of SFT, as a prompt of GRPO
    and as a preference pair. A pair without a prompt has its common beginning, and other rows have
    their entire content.
    """
    messages = row.get("prompt") or row.get("messages")
    if not messages and row.get("chosen") and row.get("rejected"):
        # TRL's extract_prompt would drop the last shared message if one side extends the other.
        pairs = enumerate(zip(row["chosen"], row["rejected"], strict=False))
        shortest = min(len(row["chosen"]), len(row["rejected"]))
        messages = row["chosen"][: next((n for n, (a, b) in pairs if a != b), shortest)]
    if not messages:
        return content(row)
    roles = [] if isinstance(messages, str) else [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else 0  # an assistant may have greeted the user
    end = roles.index("assistant", first) if "assistant" in roles[first:] else len(messages)
    return "\0".join(message_texts(messages[:end] or messages))


def normalize(text: str) -> str:
    """Fold case, whitespace and Unicode forms. Punctuation stays, since 1-2 is not 1+2."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def row_filter(filters: DictConfig, questions: bool = False) -> Callable[[Row], str | None]:
    """Return a function that returns the first filter that rejects a row, or None.

    The function raises UserError for a missing field. If `questions`, rows need only the prompt, so
    filters of other missing text fields do not apply. recipes/data/data_prepare.py applies the
    filters by length in tokens.
    """
    optional = {name for name in TEXT_FIELDS if name != "prompt"} if questions else set()
    # Convert once, since OmegaConf access would dominate the time.
    allowed_values = {"task": list(filters.tasks), "level": list(filters.levels)}
    equals = OmegaConf.to_container(filters.equals)
    regex = {name: re.compile(pattern) for name, pattern in filters.regex.items()}

    def rejecting_filter(row: Row) -> str | None:
        for name, allowed in allowed_values.items():
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
            text = "\n".join(message_texts(value)) if isinstance(value, (str, list)) else str(value)
            if not pattern.search(text):
                return f"regex.{name}"
        return None

    return rejecting_filter


def _field(row: Row, name: str, key: str) -> Any:
    """Return a field's value, which may be null. Raises UserError if the field is missing."""
    if name not in row:
        raise UserError(f"{key}: a row has no field {name!r}.{near_or_all(name, row)}")
    return row[name]


def without_duplicates(rows: Iterable[Row], how: str, counts: dict[str, Any]) -> Iterator[Row]:
    """Yield the first of rows with equal content, and count the others in counts["duplicates"].

    `how` is none, exact or normalized.
    """
    if how == "none":
        yield from rows
        return
    seen: set[bytes] = set()
    counts["duplicates"] = 0
    for row in rows:
        text = content(row) if how == "exact" else normalize(content(row))
        key = hashlib.sha256(text.encode()).digest()
        if key in seen:
            counts["duplicates"] += 1
        else:
            seen.add(key)
            yield row


def is_heldout(row: Row, fraction: float) -> bool:
    """Return whether the hash of a row's normalized question puts it in the held-out split.

    New rows therefore do not change the split of existing rows, and near copies share a split.
    """
    digest = hashlib.sha256(normalize(question(row)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def num_shared(rows: Iterable[Row], data: DictConfig, method: str) -> int:
    """Count the `rows` whose normalized question is also in data.path."""
    questions = set()
    with contextlib.suppress(UserError):  # training reports errors in this file
        for _, row in mapped(json_rows(Path(data.path)), data, method):
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                questions.add(normalize(question(row)))
    return sum(normalize(question(row)) in questions for row in rows)


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` into integers by weight. Round up the largest remainders, the first on ties."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def mix(groups: Sequence[Sequence[Row]], weights: Sequence[float], seed: int) -> list[Row]:
    """Mix the groups by weight, in random order, without changing the total number of rows.

    Groups above their share are sampled. Groups below it are repeated, and the remainder sampled.
    """
    rng, rows = random.Random(seed), []
    for group, number in zip(groups, quotas(sum(map(len, groups)), weights), strict=True):
        repeats, rest = divmod(number, len(group))
        rows += [*(list(group) * repeats), *rng.sample(list(group), rest)]
    rng.shuffle(rows)
    return rows


def balance(rows: Sequence[Row], by: str, seed: int) -> list[Row]:
    """Resample the same number of rows so that all values of the field `by` are equally frequent.

    Raises UserError if the field is missing from a row, or null.
    """
    for row in rows:
        _field({name: row[name] for name in row if row[name] is not None}, by, f"data.balance={by}")
    groups = list(grouped(rows, by).values())
    return mix(groups, [1.0] * len(groups), seed)


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Group rows by the values of `keys` as text, in sorted order, numbers first.

    Missing and null values become "all".
    """
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    sort_keys: dict[tuple[str, ...], Any] = {}
    for row in rows:
        values = ["all" if row.get(key) is None else row[key] for key in keys]
        name = tuple(map(str, values))
        groups[name].append(row)
        if name not in sort_keys:
            sort_keys[name] = [
                (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
                for value in values
            ]
    return {name: groups[name] for name in sorted(groups, key=sort_keys.__getitem__)}


def pairs_of_samples(
    samples: Iterable[Row], max_pairs: int, any_scores: bool = False
) -> tuple[list[Row], Counter[str]]:
    """Return preference pairs of samples, and the number of prompts without a pair by reason.

    A sample is {prompt, completion, score}. For each prompt, the best sample is paired with the
    worst, the second best with the second worst, up to `max_pairs` pairs. Texts in a pair differ by
    more than leading and trailing whitespace. Unless `any_scores` (smoke=true), scores differ too,
    and truncated samples (`finished` is False) are omitted, since they end in the wrong place.
    """
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in samples:
        by_prompt["\0".join(texts_with_roles(row["prompt"]))].append(row)
    pairs, skipped = [], Counter[str]()
    for group in by_prompt.values():
        distinct: dict[str, Row] = {}
        for row in group:
            if any_scores or row.get("finished") is not False:
                distinct.setdefault("\0".join(message_texts(row["completion"])).strip(), row)
        # The sort is stable, so samples with equal scores stay in sampling order.
        ordered = sorted(distinct.values(), key=lambda row: -row["score"])
        matches = list(zip(ordered, reversed(ordered), strict=True))
        prompt_pairs = []
        for best, worst in matches[: min(max_pairs, len(ordered) // 2)]:
            if not any_scores and best["score"] <= worst["score"]:
                continue
            pair = {"chosen": best["completion"], "rejected": worst["completion"]}
            for name, side in pair.items():  # TRL requires a row to be all messages or all text
                if isinstance(best["prompt"], str):
                    pair[name] = "".join(message_texts(side))
                elif isinstance(side, str):
                    pair[name] = [{"role": "assistant", "content": side}]
            labels = {key: best[key] for key in ("task", "level") if key in best}
            prompt_pairs.append({"prompt": best["prompt"], **pair, **labels})
        pairs += prompt_pairs
        if not prompt_pairs:
            reason = "one answer" if distinct else "all cut off"
            skipped["equal scores" if len(distinct) > 1 else reason] += 1
    return pairs, skipped


def pairs_of_problems(problems: list[Row], seed: int) -> list[Row]:
    """Pair each right answer with a wrong answer. Both follow the same worked solution, if any."""
    from recipes.data import tasks  # takes two seconds to import

    rng, by_task = random.Random(seed), defaultdict(list)
    for problem in problems:
        by_task[problem["task"]].append(problem)
    pairs = []
    for problem in problems:
        wrong = tasks.wrong_answer(problem, by_task[problem["task"]], rng)
        beginning = problem["completion"][0]["content"].removesuffix(problem["answer"])
        rejected = [{"role": "assistant", "content": beginning + wrong}]
        pairs.append({**problem, "chosen": problem["completion"], "rejected": rejected})
    return pairs
