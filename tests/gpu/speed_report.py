"""The table of docs/results/speed.md from the results of tests/gpu/speed.py."""

from __future__ import annotations

from typing import Any

from tests.gpu.speed_rows import ROWS, Mark, Row

Result = dict[str, Any]
COLUMNS = ["work", "GPU", "ours", "mark", "its", "ratio", "at least", "met"]


def page(text: str, name: str, section: str) -> str:
    """Put `section` between the markers of that name; raise ValueError for a page that lacks them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, began, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not began or not ended:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{section.strip()}\n{end}{after}"


def table(results: list[Result]) -> str:
    """Compare each row of each kind of GPU with its marks; the newest result of a side counts."""
    newest = {(found["gpu"], found["row"], found["side"]): found for found in results}
    kinds = list(dict.fromkeys(found["gpu"] for found in results))
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    missing = []
    for name, row in ROWS.items():
        sides = [{side: newest[gpu, name, side] for side in row.sides if (gpu, name, side) in newest} for gpu in kinds]
        sides = [found for found in sides if found]
        if not sides:
            missing.append(row.work)
        lines += [line(row, mark, found) for found in sides for mark in row.marks]
    lines += ["", *details(newest.values())]
    lines += ["", f"Not measured: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines)


def line(row: Row, mark: Mark, sides: dict[str, Result]) -> str:
    gpu = next(iter(sides.values()))["gpu"]
    figure, unit = ("first_step_s", "s") if row.first_step else ("tokens_per_second", "tokens/s")
    ours, its = (sides.get(side, {}) for side in (mark.ours, mark.side))
    least = f"+{mark.least:g} s at most" if row.first_step else f"{mark.least:.2f}x"
    cells = [row.work, f"{row.gpus} x {gpu}" if row.gpus > 1 else gpu, shown(ours, figure, unit), mark.name]
    cells.append(shown(its, figure, unit, mark.times))
    if any("error" in found or not found.get(figure) for found in (ours, its)):
        return "| " + " | ".join([*cells, "", least, "not measured"]) + " |"
    if row.first_step:
        more = ours[figure] - its[figure]
        cells += [f"{more:+.1f} s", least, "yes" if more <= mark.least else "**no**"]
    else:
        ratio = ours[figure] / (mark.times * its[figure])
        cells += [f"{ratio:.3f}x", least, "yes" if ratio >= mark.least else "**no**"]
    return "| " + " | ".join(cells) + " |"


def shown(result: Result, figure: str, unit: str, times: int = 1) -> str:
    if "error" in result:
        return "failed"
    value = result.get(figure)
    return "" if value is None else f"{value:.1f} {unit}" if unit == "s" else f"{times * value:,} {unit}"


def details(results: Any) -> list[str]:
    """List each side with what it ran: its command, and what the planner chose of ours."""
    columns = ["row", "side", "GPU", "tokens/s", "s a step", "timed tokens", "first step, s", "peak GB", "command", "chosen"]
    lines = ["Every side:", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for found in results:
        rate, step_s, tokens, peak = (found.get(key, "") for key in ("tokens_per_second", "step_s", "timed_tokens", "peak_gb"))
        chosen = ", ".join(f"{key}={value}" for key, value in found["settings"].get("chosen", {}).items())
        chosen = chosen or (f"micro-batch {found['micro_batch']}" if "micro_batch" in found else "")
        cells = [found["row"], found["side"], found["gpu"], f"{rate:,}" if rate else "", step_s, tokens, found["first_step_s"] or "", peak]
        cells += [f"`{found['settings']['command']}`", chosen]
        if "error" in found:
            cells[3] = "failed: " + found["error"].splitlines()[0]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines
