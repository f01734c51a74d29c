"""Which prompts a cycle samples, and which samples it keeps. Pure."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.common.errors import UserError
from recipes.common.files import json_sha256
from recipes.common.statistics import ks, pass_at_k

Row = dict[str, Any]
CURRICULA = ("none", "progressive", "mixed", "adaptive")
EARLIER_SHARE = 0.3  # of `mixed`: prompts of levels that an earlier cycle was about
LEAST_WEIGHT = 0.05  # of `adaptive`: a level that is solved, or hopeless, is still looked at now and then


@dataclass(frozen=True)
class Selection:
    """What is kept: a score of at least `threshold`; finished ones; no text twice for a prompt; the best `per_prompt` of a prompt;
    of all those the best `top_fraction`."""

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
        if sample["score"] >= rules.threshold and (sample["finished"] or not rules.finished_only):
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


def pass_curve(samples: Sequence[Row], threshold: float) -> dict[str, float]:
    """k -> pass@k over all prompts, for k of 1, 2, 4 ... up to the samples of a prompt. A sample passes at `threshold`."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for sample in samples:
        counts[sample["prompt_index"]][0] += 1
        counts[sample["prompt_index"]][1] += sample["score"] >= threshold
    most = min(n for n, _ in counts.values())
    return {str(k): sum(pass_at_k(right, n, k) for n, right in counts.values()) / len(counts) for k in ks(most)}


def by_level(samples: Sequence[Row], rows: Sequence[Row], threshold: float) -> dict[str, dict[str, float]]:
    """level -> {pass_rate, num_prompts}; rows without a level are of level 0. `rows` are the prompts."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        passed[_level(rows[sample["prompt_index"]])].append(sample["score"] >= threshold)
    prompts = Counter(_level(row) for row in rows)
    return {level: {"pass_rate": sum(found) / len(found), "num_prompts": prompts[level]} for level, found in sorted(passed.items())}


def level_weights(levels: Sequence[str], curriculum: str, progress: float, pass_rates: Mapping[str, float]) -> dict[str, float]:
    """The share of prompts of each level; shares sum to 1. `levels` are in their order; `progress` is this cycle's of all, up to 1.

    progressive: the levels one after another, in equal parts of the run. mixed: the same, and 30% of all levels before.
    adaptive: by p(1-p) of the pass rate p of the cycle before, most where half is solved; equal while nothing is known.
    """
    if curriculum == "adaptive":
        known = [pass_rates[level] for level in levels if level in pass_rates]
        usual = max([p * (1 - p) for p in known], default=0.25)  # a level not seen yet is worth a look
        weights = {v: max(LEAST_WEIGHT, pass_rates[v] * (1 - pass_rates[v])) if v in pass_rates else usual for v in levels}
        weights = {level: max(LEAST_WEIGHT, weight) for level, weight in weights.items()}
        return {level: weight / sum(weights.values()) for level, weight in weights.items()}
    now = min(len(levels), max(1, math.ceil(progress * len(levels) - 1e-9))) - 1
    earlier = EARLIER_SHARE if curriculum == "mixed" and now else 0.0
    return {level: 1.0 - earlier if n == now else earlier / now if n < now else 0.0 for n, level in enumerate(levels)}


def choose_prompts(
    rows: Sequence[Row], number: int | None, curriculum: str, progress: float, pass_rates: Mapping[str, float], seed: int
) -> list[Row]:
    """The prompts of a cycle: `number` of `rows` (None: all that the curriculum's levels have), in an order drawn from `seed`.

    A level that has too few gives all it has. Raises UserError for an unknown curriculum, and for one on rows of a single level.
    """
    if curriculum not in CURRICULA:
        raise UserError(f"method.args.curriculum={curriculum}: it takes {', '.join(CURRICULA)}.")
    drawn = sorted(rows, key=lambda row: json_sha256([seed, row]))
    if curriculum == "none":
        return drawn[:number]
    levels = sorted({_level(row) for row in rows}, key=lambda level: (len(level), level))  # numbers in their order
    if len(levels) < 2:
        raise UserError(f"method.args.curriculum={curriculum}: all rows are of one level. Use data of several, or curriculum=none.")
    weights = level_weights(levels, curriculum, progress, pass_rates)
    groups = {level: [row for row in drawn if _level(row) == level] for level in levels}
    if number is None:  # as many as leave the shares as they are
        number = math.floor(min(len(groups[v]) / w for v, w in weights.items() if w) + 1e-9)
    counts = _shares(number, weights)
    chosen = {id(row) for level in levels for row in groups[level][: counts[level]]}
    return [row for row in drawn if id(row) in chosen]


def _shares(number: int, weights: Mapping[str, float]) -> dict[str, int]:
    """`number` by weights, the largest remainders rounded up."""
    counts = {level: math.floor(number * weight + 1e-9) for level, weight in weights.items()}
    rest = sorted(weights, key=lambda level: counts[level] - number * weights[level])
    return {level: count + (level in rest[: number - sum(counts.values())]) for level, count in counts.items()}


def _level(row: Row) -> str:
    return str(row.get("level", 0))
