"""Choose the prompts that a cycle samples and the samples that it keeps. Pure functions."""

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
    """Return the kept samples, in the order of their prompts.

    A sample has `prompt_index`, `sample_index`, `text`, `finished` and `score`. `rules` are the
    arguments of method=sample. Kept samples have a score of at least `threshold`, are finished
    (`finished_only`), and are distinct texts of a prompt (`deduplicate`). Of these, the best
    `per_prompt` of each prompt remain, and of all those the best `top_fraction`, rounded up. A
    sample truncated before its first character is never kept.

    With equal scores, the earlier sample of a prompt wins. Across prompts, each prompt's best comes
    before any second best; then a hash decides, so that a level's position does not favour it.
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
            place = f"{sample['prompt_index']}/{sample['sample_index']}"
            order = hashlib.sha256(place.encode()).hexdigest()
            ranked.append((-sample["score"], n, order, sample))
    ranked.sort(key=lambda entry: entry[:3])
    most = math.ceil(rules.top_fraction * len(ranked) - 1e-9)
    return sorted(
        (entry[3] for entry in ranked[:most]), key=lambda s: (s["prompt_index"], s["sample_index"])
    )


def is_correct(sample: Row) -> bool:
    """Return whether the score is 1, even if method=sample keeps lower scores."""
    return bool(sample["score"] == 1.0)


def pass_curve(samples: Sequence[Row]) -> dict[str, float]:
    """Return k -> pass@k over all prompts, for k = 1, 2, 4 ... up to the samples per prompt."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for sample in samples:
        counts[sample["prompt_index"]][0] += 1
        counts[sample["prompt_index"]][1] += is_correct(sample)
    most = min(n for n, _ in counts.values())
    return {
        str(k): sum(pass_at_k(right, n, k) for n, right in counts.values()) / len(counts)
        for k in ks(most)
    }


def by_level(samples: Sequence[Row], rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return level -> {pass_rate, num_prompts}; rows without a level count as level 0."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        passed[_level(rows[sample["prompt_index"]])].append(is_correct(sample))
    prompts = Counter(_level(row) for row in rows)
    return {
        level: {"pass_rate": sum(results) / len(results), "num_prompts": prompts[level]}
        for level, results in sorted(passed.items())
    }


def choose_prompts(
    rows: Sequence[Row], number: int | None, weights: Mapping[int, float] | None, seed: int
) -> list[Row]:
    """Return `number` of `rows` (None: as many as the shares allow), in an order drawn by `seed`.

    `weights` are the levels' shares (data_curriculum.cycle_shares); None ignores levels. A level
    with too few rows contributes all of them.
    """
    drawn = sorted(rows, key=lambda row: json_sha256([seed, row]))
    if weights is None:
        return drawn[:number]
    groups = {level: [row for row in drawn if row["level"] == level] for level in weights}
    if number is None:
        number = math.floor(
            min(len(groups[level]) / weight for level, weight in weights.items() if weight) + 1e-9
        )
    counts = dict(zip(weights, quotas(number, list(weights.values())), strict=True))
    chosen = {id(row) for level in weights for row in groups[level][: counts[level]]}
    return [row for row in drawn if id(row) in chosen]


def _level(row: Row) -> str:
    return str(row.get("level") or 0)
