"""Find published figures in reference/<benchmark>.yaml, and compare ours with them.

A row of ours matches a published one if every key of the published row's `match` has the same
value in ours. If several match, a measurement is preferred to a published minimum, and then the row
with more keys. Each file begins with a description of its contents; its `keys` are the columns that
published rows may match, with their types.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.core.errors import UserError

FOLDER = Path(__file__).parent / "reference"
# measured; the minimum that the source accepts; a data sheet's peak; a rough or predicted figure;
# the unit of the source's other figures. Ours are compared with the first two kinds.
KINDS = ("measured", "least", "peak", "estimate", "base")
COMPARED = KINDS[:2]


@dataclass(frozen=True)
class Reference:
    """Hold a published row. `match` includes the keys of the whole file, `label` only the row's."""

    hardware: list[str]
    match: Mapping[str, str | int]
    label: str
    figure: str  # the key in our rows for the same quantity
    value: float
    unit: str
    source: Mapping[str, str]  # title, date (as published, or when it was read), url
    where: str  # in the source
    also: Mapping[str, float] = field(default_factory=dict)  # more figures, by our rows' keys
    kind: str = "measured"

    def of(self, figure: str) -> float | None:
        return self.value if figure == self.figure else self.also.get(figure)

    @property
    def cited(self) -> str:
        at_least = "at least: " if self.kind == "least" else ""
        return f"{at_least}{self.source['title']}, {self.source['date']}, {self.where}"


@functools.cache
def load(benchmark: str) -> tuple[list[Reference], list[Mapping[str, Any]]]:
    """Return the rows of a benchmark's file, and its notes on omissions and errors in sources."""
    path = FOLDER / f"{benchmark}.yaml"
    if not path.is_file():
        return [], []
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = []
    for row in content["rows"]:
        own = {
            "hardware": _names(row["hardware"]),
            "match": {**content.get("match", {}), **row["match"]},
            "label": " ".join(map(str, row["match"].values())) or row["where"],
            "source": content["sources"][row["source"]],
            "value": float(row["value"]),
        }
        same = {key: content[key] for key in ("figure", "unit")}
        rows.append(Reference(**{**same, **row, **own}))
    return rows, content.get("notes", [])


def _names(hardware: str | list[str]) -> list[str]:
    return [hardware] if isinstance(hardware, str) else hardware


def comparable(benchmark: str, hardware: str, figure: str) -> list[Reference]:
    """Return the rows of a GPU with this figure that ours are compared with."""
    return [
        row
        for row in load(benchmark)[0]
        if hardware in row.hardware and row.kind in COMPARED and row.of(figure) is not None
    ]


def published(
    benchmark: str, hardware: str, row: Mapping[str, Any], figure: str
) -> Reference | None:
    """Return the published row for our `row` on this hardware of conf/hardware, or None."""
    matches = [
        reference
        for reference in comparable(benchmark, hardware, figure)
        if reference.match.items() <= row.items()
    ]
    return min(matches, key=lambda r: (COMPARED.index(r.kind), -len(r.match)), default=None)


def require(
    benchmark: str,
    hardware: str,
    figure: str,
    fail_below: float | None,
    cases: Sequence[Mapping[str, Any]],
) -> None:
    """Raise UserError, before anything is measured, if the gate applies to none of the cases.

    A key that is missing from a case may still come with its figures.
    """
    if fail_below is not None and not any(
        all(case.get(key, value) == value for key, value in reference.match.items())
        for reference in comparable(benchmark, hardware, figure)
        for case in cases
    ):
        raise UserError(
            f"method.args.fail_below={fail_below:g}: no row has a published figure. "
            f"{_unmatched(benchmark, hardware, figure)} Leave fail_below out, or add your own "
            f"figures to recipes/bench/reference/{benchmark}.yaml."
        )


def compare(
    rows: Sequence[Mapping[str, Any]],
    benchmark: str,
    hardware: str,
    figure: str,
    higher_is_better: bool = True,
    fail_below: float | None = None,
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return our rows next to published figures, notes, and messages on rows below the gate.

    A `ratio` above 1 means ours is better. A row is below the gate if its ratio is, or if it has no
    figure although one was published.
    Raise UserError if there is a gate and nothing was published for any of these rows.
    """
    compared: list[dict[str, Any]] = []
    below: list[str] = []
    for row in rows:
        reference = published(benchmark, hardware, row, figure)
        theirs = reference.of(figure) if reference else None
        ours, ratio = row.get(figure), None
        if theirs and ours:
            ratio = ours / theirs if higher_is_better else theirs / ours
        source = reference.cited if reference else None
        compared.append({**row, "published": theirs, "published_source": source, "ratio": ratio})
        if fail_below is not None and reference and (ratio or 0) < fail_below:
            reached = f"{ratio:.2f}" if ratio else f"{row.get('error') or 'no figure'}, instead"
            unit = reference.unit if figure == reference.figure else figure
            below.append(f"{reference.label}: {reached} of {theirs:g} {unit}")
    if all(row["published"] is None for row in compared):
        require(benchmark, hardware, figure, fail_below, [])
        return compared, [_unmatched(benchmark, hardware, figure)], below
    notes = [
        " ".join(note["text"].split())
        for note in load(benchmark)[1]
        if hardware in _names(note.get("hardware", hardware))
    ]
    return compared, notes, below


def _unmatched(benchmark: str, hardware: str, figure: str) -> str:
    """Return why none of our rows has a published figure."""
    # A measurement and an accepted minimum may have the same label.
    labels = list(dict.fromkeys(row.label for row in comparable(benchmark, hardware, figure)))
    if not labels:
        return f"No {figure} of {benchmark} was published for {hardware}."
    more = f" and {len(labels) - 6} more" if len(labels) > 6 else ""
    return (
        f"No published row matches for {hardware}. Published rows: {', '.join(labels[:6])}{more}."
    )
