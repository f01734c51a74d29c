"""Figures that others published, beside those that we measure: reference/<benchmark>.yaml, and what finds a row in it.

A row of a benchmark and a published one meet where every key of the published row's `match` has the same value in ours. Of several that
meet, the one measured comes before the least that somebody accepts, then the one that names more keys. Each file says first what it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.common.errors import UserError, near

FOLDER = Path(__file__).parent / "reference"
# What a benchmark's own rows carry, by which a published one is found. A key that is not here is a mistake in a file.
KEYS: dict[str, dict[str, type]] = {
    "attention": {"backend": str},
    "checkpointing": {"checkpointing": bool},
    "collectives": {"op": str, "bytes": int, "ranks": int, "dtype": str},
    "finetune": {
        "model": str, "method": str, "precision": str, "adapter": str, "sequence": int, "batch": int, "accumulation": int, "num_gpus": int,
        "setup": str, "samples": int, "step": int,
    },
    "gemm": {"shape": str, "dtype": str, "op": str, "values": str, "padding": int},
    "matmul": {"size": int, "dtype": str},
    "mlp_loop": {"batch": int},
    "precision": {"precision": str},
    "rl": {"model": str, "method": str, "phase": str, "mode": str, "num_gpus": int},
    "scaling": {"model": str, "num_gpus": int, "batch": int, "strategy": str},
    "transformer": {"model": str, "num_gpus": int, "batch": int, "sequence": int},
    "vllm": {
        "kind": str, "model": str, "quantization": str, "tensor_parallel": int, "input": int, "output": int, "concurrency": int,
    },
}  # fmt: skip
# measured; the least that the source accepts; a data sheet's peak; a rough or foretold figure;
# what the others of its source are given in. Ours are compared with the first two.
KINDS = ("measured", "least", "peak", "estimate", "base")
COMPARED = KINDS[:2]


class PublishedError(Exception):
    """A file of published figures is wrong, which is a mistake in this repository. Says the file, the row and the rule."""


@dataclass(frozen=True)
class Source:
    title: str
    date: str  # as published; of a page without a date, when it was read
    url: str | None  # where the document states one


@dataclass(frozen=True)
class Reference:
    """A published row. `match` has the file's own keys in it; `named` are those of the row itself."""

    hardware: tuple[str, ...]
    match: Mapping[str, str | int]
    named: tuple[str, ...]
    figure: str  # key of our row that is the same quantity
    value: float
    unit: str
    also: Mapping[str, float]  # further figures of the row, by our keys where we have them
    source: Source
    where: str  # in the source
    kind: str

    def of(self, figure: str) -> float | None:
        return self.value if figure == self.figure else self.also.get(figure)


@dataclass(frozen=True)
class Note:
    hardware: tuple[str, ...]  # empty: every one
    text: str


@dataclass(frozen=True)
class Benchmark:
    name: str
    rows: tuple[Reference, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class Published:
    value: float
    unit: str
    source: str  # title, date and place, for a reader
    reference: Reference


@dataclass(frozen=True)
class Comparison:
    """`rows` are ours with `published`, `published_source` and `ratio`; `below` names those that do not pass the gate."""

    rows: list[dict[str, Any]]
    notes: list[str]
    below: list[str] = field(default_factory=list)


@functools.cache
def load(benchmark: str, folder: Path = FOLDER) -> Benchmark:
    """Raises PublishedError for a file with an unknown key, a missing one, or two rows that say the same. Without a file: no rows."""
    path = folder / f"{benchmark}.yaml"
    if not path.is_file():
        return Benchmark(benchmark, (), ())
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    _known(path.name, content, ("figure", "unit", "match", "notes", "sources", "rows"), ("figure", "unit", "sources", "rows"))
    sources = {}
    for name, source in content["sources"].items():
        _known(f"{path.name}, source {name}", source, ("title", "date", "url"), ("title", "date", "url"))
        sources[name] = Source(source["title"], str(source["date"]), source["url"])
    rows = tuple(_reference(f"{path.name}, row {i + 1}", row, content, sources, KEYS[benchmark]) for i, row in enumerate(content["rows"]))
    for i, row in enumerate(rows):
        for other in rows[:i]:
            same = row.match == other.match and row.figure == other.figure and row.kind == other.kind
            if same and set(row.hardware) & set(other.hardware):
                raise PublishedError(f"{path.name}: two rows say the same of {dict(row.match)}: {other.where}; {row.where}")
    notes = []
    for note in content.get("notes", []):
        _known(f"{path.name}, notes", note, ("hardware", "text"), ("text",))
        notes.append(Note(_names(note.get("hardware", [])), " ".join(note["text"].split())))
    return Benchmark(benchmark, rows, tuple(notes))


def _reference(where: str, row: Any, content: Any, sources: Mapping[str, Source], keys: Mapping[str, type]) -> Reference:
    known = ("hardware", "match", "figure", "value", "unit", "also", "source", "where", "kind")
    _known(where, row, known, ("hardware", "match", "value", "source", "where"))
    match = {**content.get("match", {}), **row["match"]}
    for key, value in match.items():
        if key not in keys:
            raise PublishedError(f"{where}: match.{key}: no such key in the benchmark's rows. {near(key, keys)}")
        if type(value) is not keys[key]:
            raise PublishedError(f"{where}: match.{key}={value!r}: the benchmark's rows carry {keys[key].__name__} there.")
    if row["source"] not in sources:
        raise PublishedError(f"{where}: source={row['source']}: not in sources. {near(row['source'], sources)}")
    if not isinstance(row["value"], int | float):
        raise PublishedError(f"{where}: value={row['value']!r}: a number is expected.")
    kind = row.get("kind", "measured")
    if kind not in KINDS:
        raise PublishedError(f"{where}: kind={kind}: unknown. {near(kind, KINDS)}")
    return Reference(
        _names(row["hardware"]), match, tuple(row["match"]), row.get("figure", content["figure"]), float(row["value"]),
        row.get("unit", content["unit"]), row.get("also", {}), sources[row["source"]], row["where"], kind,
    )  # fmt: skip


def _names(hardware: str | Sequence[str]) -> tuple[str, ...]:
    return (hardware,) if isinstance(hardware, str) else tuple(hardware)


def _known(where: str, given: Any, known: Sequence[str], needed: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise PublishedError(f"{where}: keys and values are expected, not {given!r}.")
    for key in given:
        if key not in known:
            raise PublishedError(f"{where}: {key}: unknown key. {near(str(key), known)}")
    for key in needed:
        if key not in given:
            raise PublishedError(f"{where}: {key} is missing.")


def published(benchmark: str, hardware: str, row: Mapping[str, Any], figure: str, folder: Path = FOLDER) -> Published | None:
    """What was published for this row on this hardware (a name in conf/hardware), or None.

    Raises PublishedError where two rows match equally well.
    """
    matching = [
        reference
        for reference in load(benchmark, folder).rows
        if hardware in reference.hardware
        and reference.kind in COMPARED
        and reference.of(figure) is not None
        and all(key in row and row[key] == value for key, value in reference.match.items())
    ]
    if not matching:
        return None
    best = min(matching, key=_rank)
    equal = [reference for reference in matching if _rank(reference) == _rank(best)]
    if len(equal) > 1:
        places = "; ".join(one.where for one in equal)
        raise PublishedError(f"{benchmark}.yaml: {len(equal)} rows of {hardware} match {dict(row)}: {places}")
    value = best.of(figure)
    assert value is not None
    at_least = "at least: " if best.kind == "least" else ""
    source = f"{at_least}{best.source.title}, {best.source.date}, {best.where}"
    return Published(value, best.unit if figure == best.figure else figure, source, best)


def _rank(reference: Reference) -> tuple[int, int]:
    return COMPARED.index(reference.kind), -len(reference.match)


def require(benchmark: str, hardware: str, figure: str, fail_below: float | None, folder: Path = FOLDER) -> None:
    """Refuse a gate that nothing can be held against. Call it before measuring. Raises UserError."""
    if fail_below is not None and hardware not in _having(benchmark, figure, folder):
        raise UserError(
            f"method.args.fail_below={fail_below:g}: {_nothing(benchmark, hardware, figure, folder)}, so nothing could fall below. "
            f"Leave fail_below out, or add your own figures to recipes/bench/reference/{benchmark}.yaml."
        )


def require_rows(
    benchmark: str, hardware: str, figure: str, fail_below: float, cases: Sequence[Mapping[str, Any]], folder: Path = FOLDER
) -> None:
    """Refuse one that holds for none of these cases. What a case does not say yet may come with its figures. Raises UserError."""
    references = [
        one for one in load(benchmark, folder).rows if hardware in one.hardware and one.kind in COMPARED and one.of(figure) is not None
    ]
    may_match = (all(case.get(key, value) == value for key, value in one.match.items()) for one in references for case in cases)
    if cases and not any(may_match):
        raise _of_other_rows(benchmark, hardware, figure, fail_below, folder)


def _of_other_rows(benchmark: str, hardware: str, figure: str, fail_below: float, folder: Path) -> UserError:
    return UserError(
        f"method.args.fail_below={fail_below:g}: figures were published for {hardware}, but of no row measured here, so nothing could "
        f"fall below. Published rows: {_rows_of(benchmark, hardware, figure, folder)}."
    )


def compare(
    rows: Sequence[Mapping[str, Any]],
    benchmark: str,
    hardware: str,
    figure: str,
    higher_is_better: bool = True,
    fail_below: float | None = None,
    folder: Path = FOLDER,
) -> Comparison:
    """Our rows beside what was published. `ratio` is 1 where equal and more where ours is better, whatever `figure` counts.

    Below the gate is a row whose ratio is less than `fail_below`, and one that has no figure where somebody else has one. Raises UserError
    for a gate when nothing was published for any of these rows.
    """
    require(benchmark, hardware, figure, fail_below, folder)
    compared: list[dict[str, Any]] = []
    below: list[str] = []
    for row in rows:
        found = published(benchmark, hardware, row, figure, folder)
        ours, ratio = row.get(figure), None
        if found and ours:
            ratio = ours / found.value if higher_is_better else found.value / ours
        extra = {"published": found.value if found else None, "published_source": found.source if found else None, "ratio": ratio}
        compared.append({**row, **extra})
        if fail_below is not None and found and (ratio is None or ratio < fail_below):
            reached = f"{ratio:.2f}" if ratio is not None else f"{row.get('error') or 'no figure'}, instead"
            below.append(f"{_label(found.reference)}: {reached} of {found.value:g} {found.unit}")
    matched = [row for row in compared if row["published"] is not None]
    if fail_below is not None and rows and not matched:
        raise _of_other_rows(benchmark, hardware, figure, fail_below, folder)
    if hardware not in _having(benchmark, figure, folder):
        return Comparison(compared, [f"{_nothing(benchmark, hardware, figure, folder)}."], below)
    if not matched:
        notes = [f"Nothing here was published for {hardware}. Published rows: {_rows_of(benchmark, hardware, figure, folder)}."]
        return Comparison(compared, notes, below)
    return Comparison(compared, notes_of(benchmark, hardware, folder), below)


def notes_of(benchmark: str, hardware: str, folder: Path = FOLDER) -> list[str]:
    """What the published tables of this hardware leave unstated or have wrong."""
    return [note.text for note in load(benchmark, folder).notes if not note.hardware or hardware in note.hardware]


def _label(reference: Reference) -> str:
    return " ".join(str(reference.match[key]) for key in reference.named) or reference.where


def _having(benchmark: str, figure: str, folder: Path) -> dict[str, int]:
    """How many rows each hardware has that could be compared, most first."""
    count: dict[str, int] = {}
    for reference in load(benchmark, folder).rows:
        if reference.kind in COMPARED and reference.of(figure) is not None:
            for name in reference.hardware:
                count[name] = count.get(name, 0) + 1
    return dict(sorted(count.items(), key=lambda item: -item[1]))


def _nothing(benchmark: str, hardware: str, figure: str, folder: Path) -> str:
    having = _having(benchmark, figure, folder)
    others = f"; there are of {', '.join(f'{name} ({count})' for name, count in having.items())}" if having else ""
    return f"no published {figure} of {benchmark} for {hardware}{others}"


def _rows_of(benchmark: str, hardware: str, figure: str, folder: Path) -> str:
    references = [one for one in load(benchmark, folder).rows if hardware in one.hardware and one.kind in COMPARED and one.of(figure)]
    labels = list(dict.fromkeys(map(_label, references)))  # a measurement and the least that is accepted may be of the same case
    return ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
