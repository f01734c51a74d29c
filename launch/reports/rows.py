"""The section of a page about the rows that a run trained on, from its data.json."""

from __future__ import annotations

from typing import Any

from launch.files import rundir
from launch.reports.data import Run, is_number, listed
from launch.reports.parts import Cell, Facts, Note, Table, cell, number, percent

LEFT_OUT = {
    "read": "rows read",
    "held_out": "held out by their hash",
    "duplicates": "duplicates left out",
    "prompts_without_pair": "prompts that gave no pair",
    "filtered": "left out by data.filter",
    "without_answer": "rows without an answer",
}


def section(run: Run) -> list[Any]:
    """How many rows there were and were left out, how long they are, what was cut, how full batches were. Empty without a data.json."""
    path = run.folder / "data.json"
    found = rundir.read_json(path)
    if found is None:
        return [Note("data.json cannot be read as a JSON object.", "warn")] if path.exists() else []
    facts = {"rows": _number(found.get("rows")), "tokens": _number(found.get("tokens"))}
    facts |= {title: _said(found[key]) for key, title in LEFT_OUT.items() if found.get(key)}
    if found.get("max_length"):
        facts["cut"] = f"{_number(found.get('truncated'))} rows, to {_number(found['max_length'])} tokens"
    if is_number(found.get("efficiency")):
        how = f"packed into {_number(found.get('packed_rows'))} rows" if found.get("packing") else "not packed"
        facts["places of a batch that hold a token"] = f"{percent(found['efficiency'])}, {how}"
    return [Facts(facts), *_histogram(found.get("histogram")), *_groups(found)]


def _histogram(bins: Any) -> list[Any]:
    rows = [row for row in listed(bins) if isinstance(row, list) and len(row) == 3 and all(map(is_number, row))]
    most = max((n for *_, n in rows), default=0)
    if not most:
        return []
    cells = [[Cell(f"{low:g} to {high:g}"), Cell(number(n), number=True, share=n / most)] for low, high, n in rows]
    return [Table("Lengths in tokens, before anything is cut", ["tokens", "rows"], cells)]


def _groups(found: dict[str, Any]) -> list[Any]:
    tables = []
    for name in ("task", "level"):
        counts = found.get(f"by_{name}")
        if isinstance(counts, dict) and len(counts) > 1:
            tables.append(Table(f"Rows by {name}", [name, "rows"], [[Cell(str(key)), cell(n)] for key, n in counts.items()]))
    return tables


def _number(value: Any) -> str:
    return number(value) if is_number(value) else "unknown"


def _said(value: Any) -> str:
    return ", ".join(f"{key} {_number(n)}" for key, n in value.items()) if isinstance(value, dict) else _number(value)
