"""A page that explains a run, or compares several: one HTML file that opens anywhere, and PNGs of its curves beside it.

    python launch/report.py RUN... [output=FILE.html]

  RUN              the directory of a run (runs/<name>/<timestamp>-<id>), of a pipeline, or of a sweep (runs/sweeps/<name>-<hash>).
                   A run that is still going or has crashed gives a page too. Pages beside the runs, which <name>/* names too, are
                   passed over
  output=FILE.html where the page is written. Of one directory: report.html in it; of several: report.html in the folder that
                   they have in common

Several runs: what differs in their configuration, their curves on one axis, a table of results; a pipeline among them stands for its
phases. Nothing is fetched by the page and nothing sent.

Exit codes: 0 written, 2 a wrong argument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch.command_line.stream import run_program
from launch.errors import EXIT_DONE, UserError, near
from launch.files import rundir
from launch.reports import many, one, page, sweeps
from launch.reports.curves import Chart, Charts, write_pngs
from launch.reports.data import Run, kind_of, phases_of, read, status_of
from launch.reports.parts import Inner, Page, Section

EXAMPLE = "python launch/report.py runs/<name>/<timestamp>-<id>"


@dataclass(frozen=True)
class Asked:
    """The command line, checked: directories with their kind (run, pipeline, sweep), and where the page goes."""

    folders: list[tuple[Path, str]]
    output: Path


def parse(arguments: list[str]) -> Asked:
    given: list[Path] = []
    output: Path | None = None
    given_output: str | None = None
    for argument in arguments:
        if not argument:
            raise UserError(f"An empty argument is no run. Use: {EXAMPLE}.")
        key, equals, value = argument.partition("=")
        if equals and not os.path.exists(argument):
            if key != "output":
                raise UserError(f"There is no key `{key}`. Keys: output.{near(key, ['output'])} A run that is meant is not there.")
            if given_output is not None:
                raise UserError(f"{given_output} and {argument}: there is one page. Leave one of them out.")
            output, given_output = _output(value), argument
        elif argument.startswith("-"):
            raise UserError(f"{argument}: no such option. Use: {EXAMPLE}, and output=FILE.html; --help says more.")
        else:
            given.append(Path(os.path.realpath(argument)))  # .. and links have no name of their own
    if not given:
        raise UserError(f"No run is given. Use: {EXAMPLE}.")
    pages = _pages(given, output or Path("report.html"))
    folders = [(path, kind_of(path)) for path in given if path not in pages]
    twice = next((folder for folder in given if given.count(folder) > 1), None)
    if twice:
        raise UserError(f"{twice}: given twice. Leave one out.")
    if len(folders) > 1 and (found := next((folder for folder, kind in folders if kind == "sweep"), None)):
        raise UserError(f"{found}: a sweep compares its own trials, so its page is of it alone. Give it alone, or runs without it.")
    return Asked(folders, output or Path(os.path.commonpath([folder for folder, _ in folders])) / "report.html")


def _pages(given: list[Path], output: Path) -> list[Path]:
    """Those of `given` that this program wrote beside a run that is given too, as <name>/* names them."""
    beside = {path.parent for path in given if os.path.isdir(path)}
    names = {"report.html", output.name}
    of_curves = ("report-", f"{output.stem}-")
    return [
        path
        for path in given
        if path.parent in beside and os.path.isfile(path)
        if path.name in names or (path.suffix == ".png" and path.name.startswith(of_curves))
    ]


def _output(value: str) -> Path:
    path = Path(value).expanduser().absolute()
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"output={value}: a page is a file that ends with .html. Use, for example, output={value or 'report'}.html.")
    if os.path.isdir(path):  # not Path's own, which raises for a name that is too long
        raise UserError(f"output={value}: a directory. Use a file in it: output={Path(value) / 'report.html'}.")
    return path


def made(asked: Asked) -> Page:
    """The page of what was asked for. Raises UserError for a sweep that cannot be read."""
    [(folder, kind), *others] = asked.folders
    if kind == "sweep":
        return sweeps.page(folder)
    if others:
        runs, names = compared(asked.folders)
        return many.compare(runs, names)
    if kind == "pipeline":
        held = rundir.is_locked(folder)
        record = rundir.read_json(folder / "record.json") or {}
        runs = [read(phase, phase.name) for phase in phases_of(folder)]
        return many.pipeline(folder, status_of(folder, record, held), record.get("exit_code"), runs, record.get("chosen"))
    run = read(folder)
    return Page(folder.parent.name, folder.name, run.status, one.sections(run), about=one.about(run))


def compared(folders: list[tuple[Path, str]]) -> tuple[list[Run], list[str]]:
    """(runs with short labels A, B, ...; their names)."""
    places = list(dict.fromkeys(p for folder, kind in folders for p in (phases_of(folder) if kind == "pipeline" else [folder])))
    if len(places) < 2:
        raise UserError(f"{len(places)} run(s) in what is given: nothing to compare. Give several runs, or pipelines with phases.")
    common = Path(os.path.commonpath(places))
    names = [str(p.relative_to(common)) for p in places]
    return [read(place, label(n)) for n, place in enumerate(places)], names


def label(n: int) -> str:
    """A to Z, then A2 to Z2."""
    return chr(ord("A") + n % 26) + (str(n // 26 + 1) if n >= 26 else "")


def charts_of(sections: list[Section]) -> Iterator[Chart]:
    """Those that are not folded: each becomes a PNG."""
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Charts):
                yield from block.charts


def write(found: Page, output: Path) -> str:
    """The page and its PNGs. Returns the line that says where they are. Raises UserError where they cannot be written."""
    inner: list[Inner] = list(found.inner)
    charts = list(charts_of([*found.sections, *(section for run in inner for section in run.sections)]))
    try:
        rundir.write_text(output, page.render(found))
        pngs = write_pngs(charts, output.parent, output.stem) if charts else []
    except OSError as error:
        reason = f"the page or a PNG beside it cannot be written ({error.strerror})"
        raise UserError(f"{output}: {reason}. Choose another place by output=FILE.html.") from error
    beside = f"; {len(pngs)} PNG(s) of its curves beside it" if pngs else "; it has no curves, so no PNG"
    return f"The report is in {output} ({output.stat().st_size / 1e6:.2f} MB{beside})"


def main(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(__doc__)
        return EXIT_DONE
    try:
        asked = parse(arguments)
        print(write(made(asked), asked.output))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    run_program(main)
