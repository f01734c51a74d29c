"""Write a page that explains a run, or compares several, as one HTML file that opens anywhere.

    python launch/report.py RUN... [output=FILE.html]

  RUN               directory of a run (runs/<name>/<timestamp>-<id>), of a pipeline, or of a sweep
                    (runs/sweeps/<name>-<hash>). Runs that are still running or have crashed work
                    too. Earlier pages among the runs, as in runs/<name>/*, are skipped.
  output=FILE.html  where to write the page; default: report.html in the directory, or in the
                    folder that several have in common.

The page of several runs shows what differs in their configuration, their curves on shared axes,
and a table of results; a pipeline among them stands for its phases. The page loads nothing from
a network.

Exit codes: 0 written, 2 wrong argument.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch.core.installed  # noqa: F401

# isort: split
from launch.core import json_files
from launch.core.console import run_program
from launch.core.errors import EXIT_DONE, UserError, near
from launch.reports import html_page, many, run_page, sweeps
from launch.reports.parts import Page
from launch.reports.run_files import EXAMPLE, Run, kind_of, phases_of, read


@dataclass(frozen=True)
class Request:
    """The parsed command line: output, and directories with their kind (run, pipeline, sweep)."""

    folders: list[tuple[Path, str]]
    output: Path


def parse(arguments: list[str]) -> Request:
    paths, outputs = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or os.path.exists(argument):
            paths.append(Path(os.path.realpath(argument)))  # `..` and links are not names of a run
        elif key == "output":
            outputs.append(value)
        else:
            hint = near(key, ["output"])
            raise UserError(f"{argument}: no such directory or key.{hint} Use output=FILE.html.")
    output = Path(outputs[0]).expanduser().absolute() if outputs else Path("report.html")
    if len(outputs) > 1 or output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"output={', '.join(outputs)}: expected one file that ends with .html.")
    page_names = {"report.html", output.name}
    folders = [path for path in paths if path.name not in page_names or not os.path.isfile(path)]
    kinds = {folder: kind_of(folder) for folder in folders}
    if not kinds or (len(kinds) > 1 and "sweep" in kinds.values()):
        raise UserError(f"Give one sweep, or one or more runs and pipelines, such as {EXAMPLE}.")
    default = Path(os.path.commonpath(folders)) / "report.html"
    return Request(list(kinds.items()), output if outputs else default)


def build(request: Request) -> Page:
    """Return the requested page. Raises UserError for a sweep that cannot be read."""
    [(folder, kind), *others] = request.folders
    if kind == "sweep":
        return sweeps.page(folder)
    if others:
        return many.compare(*compared(request.folders))
    if kind == "pipeline":
        return many.pipeline(folder)
    run = read(folder)
    name, timestamp = folder.parent.name, folder.name
    return Page(name, timestamp, run.status, run_page.sections(run), about=run_page.about(run))


def compared(folders: list[tuple[Path, str]]) -> tuple[list[Run], list[str]]:
    """Return the runs, with short labels A, B, ..., and their full names."""
    phases = [phases_of(path) if kind == "pipeline" else [path] for path, kind in folders]
    places = list(dict.fromkeys(place for group in phases for place in group))
    if len(places) < 2:
        raise UserError(f"{len(places)} run(s) to compare. Use two or more, or one directory.")
    common = Path(os.path.commonpath(places))
    # A to Z, then A2 to Z2
    labels = (chr(ord("A") + n % 26) + str(n // 26 + 1) * (n >= 26) for n in range(len(places)))
    runs = [read(place, label) for place, label in zip(places, labels, strict=True)]
    return runs, [str(place.relative_to(common)) for place in places]


def main(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(__doc__)
        return EXIT_DONE
    try:
        request = parse(arguments)
        html = html_page.render(build(request))
        try:
            json_files.write_text(request.output, html)
        except OSError as error:
            why = f"{request.output} cannot be written ({error.strerror})"
            raise UserError(f"{why}. Use another output=FILE.html.") from error
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"The report is in {request.output} ({len(html) / 1e6:.2f} MB)")
    return EXIT_DONE


if __name__ == "__main__":
    run_program(main)
