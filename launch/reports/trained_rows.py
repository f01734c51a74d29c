"""Build the section about the rows that a run trained on, from its data.json."""

from __future__ import annotations

from typing import Any

from launch.core import json_files
from launch.reports.parts import Block, Cell, Facts, Table, number, percent
from launch.reports.run_files import Run, is_number

LEFT_OUT = {
    "read": "rows read",
    "held_out": "held out by their hash",
    "duplicates": "duplicates left out",
    "prompts_without_pair": "prompts that gave no pair",
    "filtered": "left out by data.filter",
    "without_answer": "rows without an answer",
}


def section(run: Run) -> list[Block]:
    """Show how many rows there were, their lengths, what was cut, how full batches were."""
    data = json_files.read_json(run.folder / "data.json")
    if data is None:
        return []
    facts = {"rows": _number(data.get("rows")), "tokens": _number(data.get("tokens"))}
    facts |= {title: _number(data[key]) for key, title in LEFT_OUT.items() if data.get(key)}
    if data.get("max_length"):
        rows, tokens = _number(data.get("truncated")), _number(data["max_length"])
        facts["cut"] = f"{rows} rows, to {tokens} tokens"
    if is_number(data.get("efficiency")):
        packed = f"packed into {_number(data.get('packed_rows'))} rows"
        how = packed if data.get("packing") else "not packed"
        facts["places of a batch that hold a token"] = f"{percent(data['efficiency'])}, {how}"
    bins = data.get("histogram") or []
    most = max((count for *_, count in bins), default=0) or 1
    lengths = [
        [f"{low:g} to {high:g}", Cell(number(count), number=True, share=count / most)]
        for low, high, count in bins
    ]
    blocks = [Table("Lengths in tokens, before anything is cut", ["tokens", "rows"], lengths)]
    for name in ("task", "level"):
        counts = data.get(f"by_{name}") or {}
        if len(counts) > 1:
            blocks.append(Table(f"Rows by {name}", [name, "rows"], list(counts.items())))
    return [Facts(facts), *blocks]


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_number(n)}" for key, n in value.items())
    return number(value) if is_number(value) else "unknown"
