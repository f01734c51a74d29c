"""Test that tables of docs/results show what the planner predicts today."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.gpu import published


def test_the_memory_page_holds_the_tables_of_today():
    # Written by `python tests/gpu/published.py`.
    assert published.memory_report() in (ROOT / "docs/results/memory.md").read_text()


def test_every_row_that_is_far_off_names_a_reason_and_every_reason_is_a_rows():
    rows = [row for section in published.MEMORY.values() for row in section]
    assert [
        row.name
        for row in rows
        if not row.reasons and row.error != "within" and abs(float(row.error.rstrip("%"))) > 5
    ] == []
    assert {reason for row in rows for reason in row.reasons} == set(published.MEMORY_REASONS)
    timed = [row for section in published.SPEED.values() for row in section]
    assert {reason for row in timed for reason in row.reasons} == set(published.REASONS)


def test_a_published_range_is_below_above_or_met():
    def row(stated: str) -> published.PublishedMemory:
        return published.PublishedMemory("Qwen3-0.6B", stated, ["experiment=mi50_baseline"])

    within = row("8 to 12").predicted_gb
    assert [
        row(stated).error for stated in ("8 to 12", "20 to 30", "1 to 2", f"{within}")
    ] == "within below above +0%".split()
