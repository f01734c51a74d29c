"""Make the table of tests/gpu/speed.py, and write sections of docs/results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.gpu.speed_rows import ROWS, Mark, Row

Result = dict[str, Any]
RESULTS = Path(__file__).parents[2] / "docs/results"
COLUMNS = ["work", "GPU", "ours, tokens/s", "compared with", "its", "ratio", "target"]
MAKERS = re.compile(r"\b(NVIDIA|AMD|Instinct|\d+GB|HBM\w+) ?")


def write(name: str, section: str, text: str) -> None:
    """Replace a section of docs/results/<name>.md."""
    page = RESULTS / f"{name}.md"
    page.write_text(replaced(page.read_text(), section, text))


def replaced(page: str, section: str, text: str) -> str:
    """Replace what stands between a section's markers. Raise ValueError if they are missing."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, began, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not began or not ended:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def table(results: list[Result]) -> str:
    """Compare the newest result of each row and kind of GPU with its marks."""
    newest = {(result["gpu"], result["row"], result["side"]): result for result in results}
    kinds = list(dict.fromkeys(result["gpu"] for result in results))
    lines = [cells_of(COLUMNS), "|" + "---|" * len(COLUMNS)]
    missing = []
    for name, row in ROWS.items():
        by_gpu = [
            {side: newest[gpu, name, side] for side in row.sides if (gpu, name, side) in newest}
            for gpu in kinds
        ]
        if not any(by_gpu):
            missing.append(row.work)
        for sides in filter(None, by_gpu):
            absent = [mark.ours for mark in row.marks if mark.ours not in sides]
            missing += [f"{name} {side} ({gpu_of(sides)})" for side in absent]
            marks = [mark for mark in row.marks if mark.ours in sides] or row.marks
            first, *others = [line(row, mark, sides) for mark in marks]
            # Further marks of the same runs leave the work and the GPU out.
            lines += [cells_of(first), *(cells_of(["", "", *cells[2:]]) for cells in others)]
    failed = [failure(result) for result in newest.values() if "error" in result]
    lines += ["", f"Failed: {'; '.join(failed)}."] if failed else []
    lines += ["", f"Not measured: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines)


def line(row: Row, mark: Mark, sides: dict[str, Result]) -> list[str]:
    figure = "first_step_s" if row.first_step else "tokens_per_second"
    ours, theirs = (sides.get(side, {}) for side in (mark.ours, mark.side))
    gpu = gpu_of(sides)
    cells = [row.work, f"{row.gpus}x {gpu}" if row.gpus > 1 else gpu, shown(ours, figure)]
    cells += [mark.name, shown(theirs, figure, mark.times)]
    target = f"+{mark.least:g} s" if row.first_step else f"{mark.least:.2f}x"
    if mark.mode and mark != fastest(row, sides):
        target = ""
    if any("error" in side or not side.get(figure) for side in (ours, theirs)):
        return [*cells, "not measured", target]
    if row.first_step:
        more = ours[figure] - theirs[figure]
        ratio, met = f"{more:+.1f} s", more <= mark.least
    else:
        times = ours[figure] / (mark.times * theirs[figure])
        ratio, met = f"{times:.3f}x", times >= mark.least
    return [*cells, ratio, target if met or not target else f"{target}, **missed**"]


def gpu_of(sides: dict[str, Result]) -> str:
    """Return the kind of GPU that all sides ran on, such as H200."""
    return MAKERS.sub("", next(iter(sides.values()))["gpu"]).strip()


def fastest(row: Row, sides: dict[str, Result]) -> Mark:
    """Return the mark of the mode with the most tokens/s, which its target is for."""
    modes = [mark for mark in row.marks if mark.mode]
    return max(modes, key=lambda mark: sides.get(mark.ours, {}).get("tokens_per_second", 0))


def cells_of(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def shown(result: Result, figure: str, times: int = 1) -> str:
    if "error" in result:
        return "failed"
    value = result.get(figure)
    if value is None:
        return ""
    return f"{value:.1f} s" if figure == "first_step_s" else f"{times * value:,}"


def failure(result: Result) -> str:
    why = result["error"].splitlines()[0]
    return f"{result['row']} {result['side']} ({why})"
