"""Find published figures in reference/<benchmark>.yaml, and compare our rows with them.

A published row matches our row if ours has the same value for every key of its `match`. If several
match, a measurement is preferred to a minimum, and then the row with more keys. Each file begins
with a description of its contents. `keys` in the file lists the keys that `match` may use, with
their types.
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
# `minimum` is the lowest that a source accepts, `peak` is from a data sheet, `estimate` is rough or
# predicted, and `base` is the 1 that a source divides its other figures by.
KINDS = ("measured", "minimum", "peak", "estimate", "base")
COMPARED = KINDS[:2]  # our rows are compared with these kinds only


@dataclass(frozen=True)
class Reference:
    """A published row. `match` includes the keys that apply to the complete file."""

    hardware: list[str]
    match: Mapping[str, str | int]
    label: str
    figure: str  # key of the same quantity in our rows
    value: float
    unit: str
    source: Mapping[str, str]  # title, date (as published, or when it was read), url
    where: str  # section or table of the source
    also: Mapping[str, float] = field(default_factory=dict)  # other figures, by key of our rows
    kind: str = "measured"

    def value_of(self, figure: str) -> float | None:
        return self.value if figure == self.figure else self.also.get(figure)

    @property
    def citation(self) -> str:
        at_least = "at least: " if self.kind == "minimum" else ""
        return f"{at_least}{self.source['title']}, {self.source['date']}, {self.where}"


@functools.cache
def load(benchmark: str) -> tuple[list[Reference], list[Mapping[str, Any]]]:
    """Return a benchmark's published rows, and notes on omissions and errors in their sources."""
    path = FOLDER / f"{benchmark}.yaml"
    if not path.is_file():
        return [], []
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = []
    for row in content["rows"]:
        resolved = {
            "hardware": _names(row["hardware"]),
            "match": {**content.get("match", {}), **row["match"]},
            "label": " ".join(map(str, row["match"].values())) or row["where"],
            "source": content["sources"][row["source"]],
            "value": float(row["value"]),
        }
        defaults = {key: content[key] for key in ("figure", "unit")}
        rows.append(Reference(**{**defaults, **row, **resolved}))
    return rows, content.get("notes", [])


def _names(hardware: str | list[str]) -> list[str]:
    return [hardware] if isinstance(hardware, str) else hardware


def comparable(benchmark: str, hardware: str, figure: str) -> list[Reference]:
    """Return a GPU's published rows that have this figure and may be compared with ours."""
    return [
        row
        for row in load(benchmark)[0]
        if hardware in row.hardware and row.kind in COMPARED and row.value_of(figure) is not None
    ]


def find_reference(
    benchmark: str, hardware: str, row: Mapping[str, Any], figure: str
) -> Reference | None:
    """Return the published row that matches our `row` on this hardware (conf/hardware), or None."""
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
    """Raise UserError if there is a gate but none of the cases has a published figure.

    This runs before the measurement. A key that is missing from a case does not rule out a match,
    because the measurement may add it.
    """
    if fail_below is not None and not any(
        all(case.get(key, value) == value for key, value in reference.match.items())
        for reference in comparable(benchmark, hardware, figure)
        for case in cases
    ):
        raise UserError(
            f"method.args.fail_below={fail_below:g}: no row has a published figure to compare "
            f"with. {_unmatched(benchmark, hardware, figure)} Use method.args.fail_below=null, or "
            f"add figures to recipes/bench/reference/{benchmark}.yaml."
        )


def compare(
    rows: Sequence[Mapping[str, Any]],
    benchmark: str,
    hardware: str,
    figure: str,
    higher_is_better: bool = True,
    fail_below: float | None = None,
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return our rows with published figures, the notes, and a message for each row below the gate.

    A `ratio` above 1 means that our figure is better. A row is below the gate if its ratio is below
    `fail_below`, or if it failed although a figure was published. Raise UserError if there is a
    gate but no row has a published figure.
    """
    compared: list[dict[str, Any]] = []
    below: list[str] = []
    for row in rows:
        reference = find_reference(benchmark, hardware, row, figure)
        expected = reference.value_of(figure) if reference else None
        actual, ratio = row.get(figure), None
        if expected and actual:
            ratio = actual / expected if higher_is_better else expected / actual
        source = reference.citation if reference else None
        compared.append({**row, "published": expected, "published_source": source, "ratio": ratio})
        if fail_below is not None and reference and (ratio or 0) < fail_below:
            reached = f"{ratio:.2f}" if ratio else f"{row.get('error') or 'no figure'}, instead"
            unit = reference.unit if figure == reference.figure else figure
            below.append(f"{reference.label}: {reached} of {expected:g} {unit}")
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
    """Return a sentence that explains why none of our rows has a published figure."""
    # Distinct, because a measurement and a minimum may have the same label.
    labels = list(dict.fromkeys(row.label for row in comparable(benchmark, hardware, figure)))
    if not labels:
        return f"No {figure} of {benchmark} was published for {hardware}."
    more = f" and {len(labels) - 6} more" if len(labels) > 6 else ""
    return (
        f"No published row for {hardware} matches. Published rows: {', '.join(labels[:6])}{more}."
    )
