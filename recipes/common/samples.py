"""Which prompts a cycle samples, which samples it keeps, and where finished batches lie. Pure, but for `Store`.

Finished batches lie in `samples/<hash>/<batch>.jsonl`: the hash is of all that decides what is sampled (model, prompts, sampling,
versions), so that a batch is taken again where it is the same work and never where it is not. Their verdicts lie in
`verdicts/<hash>/`, by the samples' hash and the verifier: a change of the verifier alone costs no sampling.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.data_select import quotas
from recipes.common.errors import UserError
from recipes.common.files import json_sha256, sync
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


class Store:
    """Files of finished batches of one hash, and those that another run has left under the same one."""

    def __init__(self, folder: Path, other: Path | None = None) -> None:
        """The folder's name is the hash."""
        self.folder, self.other = folder, other

    def seed_of(self, batch: int) -> int:
        """From 0 to 2**31 - 1, of this work's hash: batches can be made in any order, on any rank."""
        return int.from_bytes(hashlib.sha256(f"{self.folder.name}/{batch}".encode()).digest()[:4], "big") >> 1

    def get(self, batch: int) -> list[Row] | None:
        """The rows of a finished batch, or None. What another run has left becomes this run's own."""
        for folder in filter(None, (self.folder, self.other)):
            path = _file(folder, batch)
            if path.is_file():
                rows = [
                    json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line
                ]  # a text may hold other line ends
                if folder == self.other:
                    self.put(batch, rows)
                return rows
        return None

    def finished(self, batch: int) -> list[Row]:
        """A batch that some rank has finished. Raises UserError where this one does not see it."""
        rows = self.get(batch)
        if rows is None:
            raise UserError(
                f"batch {batch} is done, and not in {self.folder}: all ranks need one file system. Use: run_root=<shared directory>."
            )
        return rows

    def put(self, batch: int, rows: Iterable[Row]) -> None:
        write_rows(_file(self.folder, batch), rows)


def _file(folder: Path, batch: int) -> Path:
    return folder / f"{batch:06d}.jsonl"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """A line a row, whole or not there, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
