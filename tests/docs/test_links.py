"""Test that links between the pages of the repository lead to files and headings that exist.

`make docs` checks the same of the site, but not the README or headings outside docs/.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(
    r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)|^\[[^\]]+\]: (?!\w+:)(\S+)", re.MULTILINE
)


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    return {slug(text) for text in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    dead = []
    for path, anchor, reference in LINK.findall(CODE.sub("", page.read_text())):
        target = (page.parent / (path or reference)).resolve() if path or reference else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{path or reference}#{anchor}")
    assert not dead
