"""Define the blocks of a page and format values. page.html.j2 has a macro for each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.reports.data import is_number

NONE = "–"
# For the statuses of a run and of a trial; all others are bad.
STATUS_MARKS = {"done": "good", "interrupted": "warn", "unknown": "warn", "gone": "warn"}
STATUS_MARKS |= dict.fromkeys(("running", "waiting", "mixed"), "")


class Block:
    """Part of a section. Blocks that can be empty have a length; `filled` drops empty ones."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `mark` is bad, warn, good or empty; `share` (0 to 1) draws a bar below."""

    text: str
    number: bool = False
    mark: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells or plain values; the first cell of each row is its heading.

    `marks` (bad, best or empty) apply to whole rows.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    marks: Sequence[str] = ()
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [[cell(value) for value in row] for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def numeric(self) -> list[bool]:
        """Return for each column whether it holds only numbers and missing values."""
        columns = [
            [c for c in column if c.text not in ("", NONE)]
            for column in zip(*self.rows, strict=True)
        ]
        return [bool(column) and all(c.number for c in column) for column in columns]


@dataclass(frozen=True)
class Facts(Block):
    """Names and values; `code` if the values are to be copied."""

    rows: Mapping[str, str]
    code: bool = False

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Figure:
    """A headline number, and what to compare it with."""

    title: str
    value: str
    under: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Figures(Block):
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Piece:
    label: str
    value: float
    idle: bool = False


@dataclass(frozen=True)
class Bar:
    """The parts of one whole. `whole` is the length of the bar, `markers` are values along it."""

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
        """Return a description of the bar for a screen reader."""
        pieces = ", ".join(f"{p.label} {number(p.value)} {self.unit}" for p in self.pieces)
        markers = (f"; {name} {number(value)} {self.unit}" for name, value in self.markers.items())
        return f"{self.title}: {pieces}" + "".join(markers)


@dataclass(frozen=True)
class Bars(Block):
    bars: Sequence[Bar]
    note: str = ""

    def __len__(self) -> int:
        return len(self.bars)

    @property
    def names(self) -> list[str]:
        """List each label once; its position chooses the colour."""
        pieces = [piece for bar in self.bars for piece in bar.pieces]
        return list(dict.fromkeys(piece.label for piece in pieces if not piece.idle))


@dataclass(frozen=True)
class Note(Block):
    """A sentence. `mark` bad or warn makes it stand out."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Notes(Block):
    lines: Sequence[str]

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(frozen=True)
class Pre(Block):
    """Preformatted text; `folded` if the reader has to open it."""

    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Folded(Block):
    """Blocks that the reader has to open."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Inner:
    """A run on a page of several, with its own sections one level down."""

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
    labels: Sequence[tuple[str, str, str]] = ()  # label, name and status of runs that share axes
    about: str = ""  # what ran, in a line


def filled(contents: Mapping[str, Sequence[Block]]) -> list[Section]:
    """Return the sections that hold something, without their empty blocks."""
    kept = {title: [block for block in blocks if block] for title, blocks in contents.items()}
    return [Section(title, blocks) for title, blocks in kept.items() if blocks]


def mark_of(status: str) -> str:
    return STATUS_MARKS.get(status, "bad")


def status_figure(status: str, exit_code: Any) -> Figure:
    under = "" if exit_code is None else f"exit code {exit_code}"
    return Figure("status", status, under, mark_of(status))


def number(value: float, digits: int | None = None) -> str:
    """Format a number: 12,346; 1.573; 0.0021; 2.5e-05; 1e+15. `digits` fixes the decimals."""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.4g}"
    if digits is not None:
        return f"{value:,.{digits}f}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}" if value else "0"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share:.2%}" if abs(share) < 0.01 else f"{share:.1%}"


def ratio(part: Any, whole: Any) -> str:
    """Return part/whole in percent, or nothing if either is missing."""
    return percent(part / whole) if is_number(part) and is_number(whole) and whole else ""


def duration(seconds: float) -> str:
    """Format a time: 42.1 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = f"{minutes // 60} h {minutes % 60:02d} min"
    return hours if minutes >= 60 else f"{minutes} min {rest:02d} s"


def cell(value: Any, digits: int | None = None) -> Cell:
    """Return the cell of a value of a JSON file; a cell stays as it is."""
    if isinstance(value, Cell):
        return value
    if is_number(value):
        return Cell(number(value, digits), number=True)
    return Cell(NONE if value is None else text(value))


def number_cell(formatted: str, mark: str = "") -> Cell:
    return Cell(formatted, number=True, mark=mark)


def percent_cell(share: Any) -> Cell:
    return number_cell(percent(share)) if is_number(share) else cell(None)


def text(value: Any) -> str:
    """Format a value of a configuration as YAML would."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value)) or "[]"
    return str(value)
