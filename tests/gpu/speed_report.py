"""Make the table of docs/results/speed.md from the results of tests/gpu/speed.py."""

from __future__ import annotations

from typing import Any

from tests.gpu.speed_rows import ROWS, Mark, Row

Result = dict[str, Any]
COLUMNS = ["work", "GPU", "ours", "mark", "its", "ratio", "at least", "met"]
DETAILS = [
    *("row", "side", "GPU", "tokens/s", "s a step", "timed tokens", "first step, s", "peak GB"),
    *("command", "chosen"),
]


def page(text: str, name: str, section: str) -> str:
    """Replace the text between the markers of that name. Raise ValueError if they are missing."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, began, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not began or not ended:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{section.strip()}\n{end}{after}"


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
        lines += [line(row, mark, sides) for sides in by_gpu if sides for mark in row.marks]
    lines += ["", *details(newest.values())]
    lines += ["", f"Not measured: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines)


def line(row: Row, mark: Mark, sides: dict[str, Result]) -> str:
    gpu = next(iter(sides.values()))["gpu"]
    figure, unit = ("first_step_s", "s") if row.first_step else ("tokens_per_second", "tokens/s")
    ours, theirs = (sides.get(side, {}) for side in (mark.ours, mark.side))
    cells = [
        row.work,
        f"{row.gpus} x {gpu}" if row.gpus > 1 else gpu,
        shown(ours, figure, unit),
        mark.name,
        shown(theirs, figure, unit, mark.times),
    ]
    least = f"+{mark.least:g} s at most" if row.first_step else f"{mark.least:.2f}x"
    if any("error" in side or not side.get(figure) for side in (ours, theirs)):
        cells += ["", least, "not measured"]
    elif row.first_step:
        more = ours[figure] - theirs[figure]
        cells += [f"{more:+.1f} s", least, "yes" if more <= mark.least else "**no**"]
    else:
        ratio = ours[figure] / (mark.times * theirs[figure])
        cells += [f"{ratio:.3f}x", least, "yes" if ratio >= mark.least else "**no**"]
    return cells_of(cells)


def cells_of(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def shown(result: Result, figure: str, unit: str, times: int = 1) -> str:
    if "error" in result:
        return "failed"
    value = result.get(figure)
    if value is None:
        return ""
    return f"{value:.1f} {unit}" if unit == "s" else f"{times * value:,} {unit}"


def details(results: Any) -> list[str]:
    """List each side with its command, and the settings that the planner chose for ours."""
    lines = ["Every side:", "", cells_of(DETAILS), "|" + "---|" * len(DETAILS)]
    for result in results:
        command, chosen = result["settings"]["command"], result["settings"].get("chosen", {})
        choices = ", ".join(f"{key}={value}" for key, value in chosen.items())
        if not choices and "micro_batch" in result:
            choices = f"micro-batch {result['micro_batch']}"
        rate = result.get("tokens_per_second")
        speed = f"{rate:,}" if rate else ""
        if "error" in result:
            speed = "failed: " + result["error"].splitlines()[0]
        figures = [result.get(key) or "" for key in ("step_s", "timed_tokens", "first_step_s")]
        names = [result[key] for key in ("row", "side", "gpu")]
        peak = result.get("peak_gb", "")
        lines.append(cells_of([*names, speed, *figures, peak, f"`{command}`", choices]))
    return lines
