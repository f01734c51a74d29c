"""Define the blocks of a page and format values. page.html.j2 has a macro for each block."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.core.json_files import yaml_file
from launch.reports.run_files import is_number

TITLES: dict[str, Any] = yaml_file(Path(__file__).with_name("titles.yaml"))
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
    """Rows of cells; the first cell of each row is its heading. `table` makes one.

    `marks` (bad, best or empty) apply to whole rows.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    marks: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def numeric(self) -> list[bool]:
        """Return for each column whether it holds numbers."""
        return [any(c.number for c in column) for column in zip(*self.rows, strict=True)]


def table(
    caption: str, rows: Iterable[Mapping[str, Any]], note: str = "", marks: Sequence[str] = ()
) -> Table:
    """Return a table of values by column, without columns that have no value in any row."""
    content = list(rows)
    columns = dict.fromkeys(name for row in content for name in row)
    shown = [name for name in columns if any(row.get(name) is not None for row in content)]
    cells = [[cell(row.get(name)) for name in shown] for row in content]
    return Table(caption, shown, cells, note, marks)


@dataclass(frozen=True)
class Facts(Block):
    """Names and values."""

    rows: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Note(Block):
    """A sentence. `mark` bad or warn makes it stand out."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Pre(Block):
    """Preformatted text; `folded` if the reader has to open it."""

    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Folded(Block):
    """Blocks that the reader has to open, unless `is_open`."""

    title: str
    blocks: Sequence[Block]
    is_open: bool = False


@dataclass(frozen=True)
class Section(Block):
    """Blocks under a heading; `status` is the status of a run with its own section."""

    title: str
    blocks: Sequence[Block]
    status: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    status: str
    sections: Sequence[Section]
    labels: Sequence[tuple[str, str, str]] = ()  # label, name and status of runs that share axes
    about: str = ""  # one line on what ran


def filled(contents: Mapping[str, Callable[[], Iterable[Block]]]) -> list[Section]:
    """Return the sections that hold something, without their empty blocks.

    A file that was edited by hand may hold values of any type. Its section says so.
    """
    sections = []
    for title, build in contents.items():
        try:
            blocks = [block for block in build() if block]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"Cannot be shown: a file of the run holds an unexpected value ({error!r})."
            blocks = [Note(why, "warn")]
        if blocks:
            sections.append(Section(title, blocks))
    return sections


def mark_of(status: str) -> str:
    return STATUS_MARKS.get(status, "bad")


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


def ratio(part: Any, whole: Any, form: str = "") -> str:
    """Return part/whole in percent or as `form`, or nothing if either is missing."""
    if not (is_number(part) and is_number(whole) and whole):
        return ""
    return form.format(part / whole) if form else percent(part / whole)


def duration(seconds: float) -> str:
    """Format a time: 42.1 s, 2:10:05."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def cell(value: Any, digits: int | None = None) -> Cell:
    """Return the cell of a value of a JSON file; a cell stays as it is."""
    if isinstance(value, Cell):
        return value
    if is_number(value):
        return Cell(number(value, digits), number=True)
    return Cell(NONE if value is None else text(value))


def percent_cell(share: Any, bar: bool = False) -> Cell:
    """Return the cell of a share, with a bar below it on request."""
    if not is_number(share):
        return cell(None)
    return Cell(percent(share), number=True, share=min(1.0, max(0.0, share)) if bar else None)


def text(value: Any) -> str:
    """Format a value of a configuration as YAML would."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value)) or "[]"
    return str(value)
