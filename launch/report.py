"""Explain a run, or compare several, on one self-contained HTML page.

    python launch/report.py RUN... [output=FILE.html]

  RUN               directory of a run (runs/<name>/<timestamp>-<id>), of a pipeline, or of a sweep
                    (runs/sweeps/<name>-<hash>). Unfinished and crashed runs work too. Earlier
                    reports that match a pattern such as runs/<name>/* are skipped.
  output=FILE.html  file to write; default: report.html in the run's directory or, for several, in
                    their common parent directory

For several runs, the page shows the differences in their configuration, their curves on shared
axes, and a table of results. A pipeline is compared phase by phase. The page loads nothing from the
network.

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
from launch.reports import hardware_report, html_page, many, run_page, sweeps
from launch.reports.parts import Page
from launch.reports.run_files import EXAMPLE, Run, kind_of, phases_of, read


@dataclass(frozen=True)
class Request:
    """The parsed command line. `folders` pairs each directory with run, pipeline or sweep."""

    folders: list[tuple[Path, str]]
    output: Path


def parse(arguments: list[str]) -> Request:
    """Return the checked command line. Raises UserError."""
    paths, outputs = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or os.path.exists(argument):
            paths.append(Path(os.path.realpath(argument)))  # the page shows the directory's name
        elif key == "output":
            outputs.append(value)
        else:
            hint = near(key, ["output"])
            raise UserError(
                f"{argument}: no such directory. Use a run directory or output=FILE.html.{hint}"
            )
    output = Path(outputs[0]).expanduser().absolute() if outputs else Path("report.html")
    if len(outputs) > 1 or output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"output={', '.join(outputs)}: give one file whose name ends in .html.")
    page_names = {"report.html", output.name}
    folders = [path for path in paths if path.name not in page_names or not os.path.isfile(path)]
    kinds = {folder: kind_of(folder) for folder in folders}
    if not kinds or (len(kinds) > 1 and "sweep" in kinds.values()):
        raise UserError(
            f"Name one sweep, or one or more runs and pipelines: python launch/report.py {EXAMPLE}"
        )
    default = Path(os.path.commonpath(folders)) / "report.html"
    return Request(list(kinds.items()), output if outputs else default)


def build(request: Request) -> Page:
    """Return the requested page. Raises UserError for a sweep that cannot be read."""
    [(folder, kind), *others] = request.folders
    if kind == "sweep":
        return sweeps.page(folder)
    if others:
        return many.compare(*labelled_runs(request.folders))
    if kind == "pipeline":
        return hardware_report.page(folder)
    run = read(folder)
    name, timestamp = folder.parent.name, folder.name
    return Page(name, timestamp, run.status, run_page.sections(run), about=run_page.about(run))


def labelled_runs(folders: list[tuple[Path, str]]) -> tuple[list[Run], list[str]]:
    """Return the runs, labelled A, B, ..., and their paths below the common directory.

    Raises UserError for fewer than two runs.
    """
    phases = [phases_of(path) if kind == "pipeline" else [path] for path, kind in folders]
    run_dirs = list(dict.fromkeys(run_dir for group in phases for run_dir in group))
    if len(run_dirs) < 2:
        raise UserError(
            f"{len(run_dirs)} run(s) found, but a comparison needs two. Name another run, or only "
            "one directory for a report of one run."
        )
    common = Path(os.path.commonpath(run_dirs))
    # A to Z, then A2 to Z2
    labels = (chr(ord("A") + n % 26) + str(n // 26 + 1) * (n >= 26) for n in range(len(run_dirs)))
    runs = [read(run_dir, label) for run_dir, label in zip(run_dirs, labels, strict=True)]
    return runs, [str(run_dir.relative_to(common)) for run_dir in run_dirs]


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
            raise UserError(
                f"output={request.output}: cannot be written ({error.strerror}). Use another file."
            ) from error
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"Report: {request.output} ({len(html) / 1e6:.2f} MB)")
    return EXIT_DONE


if __name__ == "__main__":
    run_program(main)
