"""Which prompts a cycle samples, and which samples it keeps. Pure."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.common.data_select import quotas
from recipes.common.files import json_sha256
from recipes.common.statistics import ks, pass_at_k

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """What is kept: a score of at least `threshold`; finished ones; no text twice for a prompt; the best `per_prompt` of a prompt;
    of all those the best `top_fraction`, rounded up. Of what was cut off before its first character nothing could be learned."""

    threshold: float
    finished_only: bool
    deduplicate: bool
    per_prompt: int | None
    top_fraction: float


def select(samples: Sequence[Row], rules: Selection) -> list[Row]:
    """The samples that are kept, in the order of their prompts.

    A sample has `prompt_index`, `sample_index`, `text`, `finished` and `score`. Of equal scores the earlier sample of a prompt wins;
    across prompts, a prompt's best comes before any prompt's second, then a hash decides, so that no level is favoured by its place.
    """
    of_prompt: dict[int, list[Row]] = defaultdict(list)
    for sample in samples:
        if sample["score"] >= rules.threshold and (sample["finished"] or (sample["text"] and not rules.finished_only)):
            of_prompt[sample["prompt_index"]].append(sample)
    ranked = []
    for kept in of_prompt.values():
        best = sorted(kept, key=lambda s: (-s["score"], s["sample_index"]))
        if rules.deduplicate:
            firsts: dict[str, Row] = {}
            for sample in best:
                firsts.setdefault(sample["text"].strip(), sample)
            best = list(firsts.values())
        ranked += [(-s["score"], place, _order(s), s) for place, s in enumerate(best[: rules.per_prompt])]
    ranked.sort(key=lambda entry: entry[:3])
    chosen = [entry[3] for entry in ranked[: math.ceil(rules.top_fraction * len(ranked) - 1e-9)]]
    return sorted(chosen, key=lambda s: (s["prompt_index"], s["sample_index"]))


def _order(sample: Row) -> str:
    return hashlib.sha256(f"{sample['prompt_index']}/{sample['sample_index']}".encode()).hexdigest()


def is_correct(sample: Row) -> bool:
    """Of a sample with its verdict: only a full score is, whatever lower one method=sample keeps."""
    return bool(sample["score"] == 1.0)


def pass_curve(samples: Sequence[Row]) -> dict[str, float]:
    """k -> pass@k over all prompts, for k of 1, 2, 4 ... up to the samples of a prompt."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for sample in samples:
        counts[sample["prompt_index"]][0] += 1
        counts[sample["prompt_index"]][1] += is_correct(sample)
    most = min(n for n, _ in counts.values())
    return {str(k): sum(pass_at_k(right, n, k) for n, right in counts.values()) / len(counts) for k in ks(most)}


def by_level(samples: Sequence[Row], rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """level -> {pass_rate, num_prompts}; rows without a level are of level 0. `rows` are the prompts."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        passed[_level(rows[sample["prompt_index"]])].append(is_correct(sample))
    prompts = Counter(_level(row) for row in rows)
    return {level: {"pass_rate": sum(found) / len(found), "num_prompts": prompts[level]} for level, found in sorted(passed.items())}


def choose_prompts(rows: Sequence[Row], number: int | None, weights: Mapping[int, float] | None, seed: int) -> list[Row]:
    """The prompts of a cycle: `number` of `rows` (None: as many as keep the shares), in an order drawn from `seed`.

    `weights` are the shares of the levels, of data_curriculum.cycle_shares; None takes rows of any. A level that has too few gives all.
    """
    drawn = sorted(rows, key=lambda row: json_sha256([seed, row]))
    if weights is None:
        return drawn[:number]
    groups = {level: [row for row in drawn if row["level"] == level] for level in weights}
    if number is None:
        number = math.floor(min(len(groups[level]) / weight for level, weight in weights.items() if weight) + 1e-9)
    counts = dict(zip(weights, quotas(number, list(weights.values())), strict=True))
    chosen = {id(row) for level in weights for row in groups[level][: counts[level]]}
    return [row for row in drawn if id(row) in chosen]


def _level(row: Row) -> str:
    return str(row.get("level") or 0)
