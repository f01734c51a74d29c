"""Define the blocks of a page. page.html.j2 has a macro for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.core.json_files import is_number
from launch.reports.formats import NONE, number, percent, text


class Block:
    """Part of a section. A block that can be empty has a length; length 0 leaves it out."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Cell:
    text: str
    number: bool = False  # aligned to the right
    mark: str = ""  # bad, warn, good or empty
    share: float | None = None  # from 0 to 1; drawn as a bar below the text


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells; the first cell is the row's heading. The function `table` builds one."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    marks: Sequence[str] = ()  # bad, best or empty for each row

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def numeric(self) -> list[bool]:
        """Return for each column whether it contains numbers."""
        return [any(c.number for c in column) for column in zip(*self.rows, strict=True)]


def table(
    caption: str, rows: Iterable[Mapping[str, Any]], note: str = "", marks: Sequence[str] = ()
) -> Table:
    """Return a table of rows, which are values by column. Columns without values are left out."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) is not None for row in rows)]
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    return Table(caption, columns, cells, note, marks)


@dataclass(frozen=True)
class Facts(Block):
    rows: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Note(Block):
    text: str
    mark: str = ""  # bad or warn highlights it


@dataclass(frozen=True)
class Pre(Block):
    """Preformatted text under a title that opens and closes it."""

    title: str
    text: str
    folded: bool = False  # closed at first


@dataclass(frozen=True)
class Folded(Block):
    """Blocks under a title that opens and closes them."""

    title: str
    blocks: Sequence[Block]
    is_open: bool = False


@dataclass(frozen=True)
class Section(Block):
    title: str
    blocks: Sequence[Block]
    status: str = ""  # of the run that the section is about, if any


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    status: str
    sections: Sequence[Section]
    labels: Sequence[tuple[str, str, str]] = ()  # label, name and status of runs that share axes
    about: str = ""  # one line about the run


def build_sections(builders: Mapping[str, Callable[[], Iterable[Block]]]) -> list[Section]:
    """Return the sections by title, without empty blocks and sections.

    If a builder fails because a file was edited by hand, its section contains the error.
    """
    sections = []
    for title, build in builders.items():
        try:
            blocks = [block for block in build() if block]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"Cannot be shown: a file of the run has an unexpected value ({error!r})."
            blocks = [Note(problem, "warn")]
        if blocks:
            sections.append(Section(title, blocks))
    return sections


def cell(value: Any, digits: int | None = None) -> Cell:
    """Return a cell with a value of a JSON file; return a Cell unchanged."""
    if isinstance(value, Cell):
        return value
    if is_number(value):
        return Cell(number(value, digits), number=True)
    return Cell(NONE if value is None else text(value))


def percent_cell(share: Any, bar: bool = False) -> Cell:
    """Return a cell with a share in percent and, if `bar`, a bar below it."""
    if not is_number(share):
        return cell(None)
    return Cell(percent(share), number=True, share=min(1.0, max(0.0, share)) if bar else None)
