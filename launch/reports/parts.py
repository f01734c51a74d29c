"""The blocks that a page is made of, and how figures are written. page.html.j2 has a macro for each `kind`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launch.reports.data import is_number

NONE = "–"


@dataclass(frozen=True)
class Cell:
    """`mark` is bad, warn, good or nothing; `share` (0 to 1) draws a bar behind the figure."""

    text: str
    number: bool = False
    mark: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its heading. `marks` (bad, warn, good, best) are those of whole rows."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    marks: Sequence[str] = ()
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Of each column: whether it holds numbers, and absent ones, only."""
        columns = [[row[n] for row in self.rows if n < len(row)] for n in range(max([len(self.columns), *map(len, self.rows)]))]
        found = [[cell for cell in column if cell.text not in ("", NONE)] for column in columns]
        return [bool(cells) and all(cell.number for cell in cells) for cells in found]


@dataclass(frozen=True)
class Facts:
    """Names and what stands for them; `code` of a value that is to be copied."""

    kind: ClassVar[str] = "facts"
    rows: Mapping[str, str]
    code: bool = False


@dataclass(frozen=True)
class Figure:
    """One number that is read first, with what it is to be compared with."""

    title: str
    value: str
    under: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Figures:
    kind: ClassVar[str] = "figures"
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Piece:
    label: str
    value: float
    idle: bool = False


@dataclass(frozen=True)
class Bar:
    """Pieces of one whole. `whole` is the length of the bar, `markers` are values along it."""

    title: str
    pieces: Sequence[Piece]
    whole: float
    unit: str
    markers: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(piece.value for piece in self.pieces) or 1.0

    @property
    def label(self) -> str:
        """What the bar shows, for who cannot see it."""
        pieces = ", ".join(f"{p.label} {number(p.value)} {self.unit}" for p in self.pieces)
        return f"{self.title}: {pieces}" + "".join(f"; {name} {number(value)} {self.unit}" for name, value in self.markers.items())


@dataclass(frozen=True)
class Bars:
    kind: ClassVar[str] = "bars"
    bars: Sequence[Bar]
    note: str = ""

    @property
    def names(self) -> list[str]:
        """Every piece's label once: its place is its colour."""
        return list(dict.fromkeys(piece.label for bar in self.bars for piece in bar.pieces if not piece.idle))


@dataclass(frozen=True)
class Note:
    """A sentence. `mark` bad or warn makes it stand out."""

    kind: ClassVar[str] = "note"
    text: str
    mark: str = ""


@dataclass(frozen=True)
class Notes:
    kind: ClassVar[str] = "notes"
    lines: Sequence[str]


@dataclass(frozen=True)
class Pre:
    """Text as it is. `folded`: opened by who wants it."""

    kind: ClassVar[str] = "pre"
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Folded:
    """Blocks behind a line that opens them."""

    kind: ClassVar[str] = "folded"
    title: str
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Inner:
    """A run within a page of several: its own sections, one level down."""

    title: str
    sections: Sequence[Section]
    is_open: bool = False
    status: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    status: str
    sections: Sequence[Section]
    inner: Sequence[Inner] = ()
    labels: Sequence[tuple[str, str, str]] = ()  # of runs on one axis: label, name, status
    about: str = ""  # what ran, in a line


def number(value: float, digits: int | None = None) -> str:
    """For a reader: 12,346; 1.573; 0.0021; 2.5e-05; 1e+15. `digits` fixes those behind the point."""
    if abs(value) >= 1e15:
        return f"{value:.4g}"
    if digits is not None:
        return f"{value:,.{digits}f}"
    if value == int(value):
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share:.2%}" if abs(share) < 0.01 else f"{share:.1%}"


def duration(seconds: float) -> str:
    """42.1 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def cell(value: Any, digits: int | None = None, mark: str = "") -> Cell:
    """Of a value of a JSON file."""
    if value is None:
        return Cell(NONE, mark=mark)
    if is_number(value):
        return Cell(number(value, digits), number=True, mark=mark)
    return Cell(text(value), mark=mark)


def text(value: Any) -> str:
    """A value of a configuration, as YAML writes it where it is plain."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value)) or "[]"
    return str(value)
