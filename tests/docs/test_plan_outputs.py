"""Test that docs/plan_outputs.py updates what a page shows, and leaves the rest alone."""

from __future__ import annotations

from docs.plan_outputs import BLOCK, ROOT, updated

README = (ROOT / "README.md").read_text()


def test_the_readme_shows_what_its_plan_prints():
    assert BLOCK.search(README)
    assert updated(README) == README


def test_an_output_edited_by_hand_is_replaced():
    block = BLOCK.search(README)
    edited = f"before\n{block[1]}  time  1 s\n{block[4]}\nafter\n"
    assert updated(edited) == f"before\n{block[0]}\nafter\n"
