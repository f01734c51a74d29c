"""Choose the prompts to sample, and select the best samples. Pure functions."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.data.data_select import quotas
from recipes.measure.statistics import ks, pass_at_k
from recipes.rank.files import json_sha256

Row = dict[str, Any]


def select(samples: Sequence[Row], rules: Any) -> list[Row]:
    """Return the selected samples, in the order of their prompts.

    A sample has `prompt_index`, `sample_index`, `text`, `finished` and `score`. `rules` are the
    arguments of method=sample, applied in this order:

    1. `threshold` excludes lower scores.
    2. `finished_only` excludes truncated samples. Truncated samples without text never pass.
    3. `deduplicate` excludes repeated texts for the same prompt.
    4. `per_prompt` is the maximum number of samples per prompt.
    5. `top_fraction` is the share of all remaining samples to select, rounded up.

    Samples are ranked by score. Ties within a prompt go to the earlier sample. Ties across prompts
    go to the sample ranked higher within its own prompt, then to a hash, so input order does not
    matter.
    """
    by_prompt: dict[int, list[Row]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (-s["score"], s["sample_index"])):
        usable = sample["finished"] or (sample["text"] and not rules.finished_only)
        if usable and sample["score"] >= rules.threshold:
            by_prompt[sample["prompt_index"]].append(sample)
    ranked = []
    for best in by_prompt.values():
        if rules.deduplicate:
            firsts: dict[str, Row] = {}
            for sample in best:
                firsts.setdefault(sample["text"].strip(), sample)
            best = list(firsts.values())
        for n, sample in enumerate(best[: rules.per_prompt]):
            indices = f"{sample['prompt_index']}/{sample['sample_index']}"
            order = hashlib.sha256(indices.encode()).hexdigest()
            ranked.append((-sample["score"], n, order, sample))
    ranked.sort(key=lambda entry: entry[:3])
    count = math.ceil(rules.top_fraction * len(ranked) - 1e-9)
    return sorted(
        (entry[3] for entry in ranked[:count]), key=lambda s: (s["prompt_index"], s["sample_index"])
    )


def completion(prompt: Any, text: str) -> Any:
    """Return a generated text as TRL's trainers do: after a prompt of messages, it is a message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def is_correct(sample: Row) -> bool:
    """Return whether the score is 1, regardless of `threshold`."""
    return bool(sample["score"] == 1.0)


def pass_curve(samples: Sequence[Row]) -> dict[str, float]:
    """Return pass@k over all prompts, for k = 1, 2, 4 ... up to the samples per prompt."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for sample in samples:
        counts[sample["prompt_index"]][0] += 1
        counts[sample["prompt_index"]][1] += is_correct(sample)
    largest = min(n for n, _ in counts.values())
    return {
        str(k): sum(pass_at_k(right, n, k) for n, right in counts.values()) / len(counts)
        for k in ks(largest)
    }


def by_level(samples: Sequence[Row], rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return level -> {pass_rate, num_prompts}. Rows without a level belong to level 0."""
    results: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        results[_level(rows[sample["prompt_index"]])].append(is_correct(sample))
    prompts = Counter(_level(row) for row in rows)
    return {
        level: {"pass_rate": sum(correct) / len(correct), "num_prompts": prompts[level]}
        for level, correct in sorted(results.items())
    }


def choose_prompts(
    rows: Sequence[Row], number: int | None, weights: Mapping[int, float] | None, seed: int
) -> list[Row]:
    """Return `number` rows (None: as many as the shares allow) in a random order.

    `weights` are the shares of levels (data_curriculum.cycle_shares). None ignores levels. If a
    level has too few rows, return all of them.
    """
    shuffled = sorted(rows, key=lambda row: json_sha256([seed, row]))
    if weights is None:
        return shuffled[:number]
    groups = {level: [row for row in shuffled if row["level"] == level] for level in weights}
    if number is None:
        number = math.floor(
            min(len(groups[level]) / weight for level, weight in weights.items() if weight) + 1e-9
        )
    counts = dict(zip(weights, quotas(number, list(weights.values())), strict=True))
    chosen = {id(row) for level in weights for row in groups[level][: counts[level]]}
    return [row for row in shuffled if id(row) in chosen]


def _level(row: Row) -> str:
    return str(row.get("level") or 0)
