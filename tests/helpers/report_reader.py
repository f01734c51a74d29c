"""Extract the visible text of a page, and check that it is valid HTML."""

from __future__ import annotations

from html.parser import HTMLParser

from launch import report
from launch.reports import html_page

VOID = {"meta", "link", "br", "rect", "line", "circle", "polyline"}


class Outline(HTMLParser):
    """The text, headings, ids and open elements of a page, and the files that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.names: list[str] = []
        self.loads: list[str] = []
        self.unnamed: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.said).split())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.names.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        loading = ("src", "href", "srcset", "data", "action")
        self.loads += [
            key
            for key, value in attrs
            if key.startswith("on")
            or (key in loading and value and not value.startswith(("#", "data:,")))
        ]
        is_named = given.get("aria-hidden") == "true" or given.get("aria-label")
        if (tag == "svg" and not is_named) or (tag == "th" and "scope" not in given):
            self.unnamed.append(self.get_starttag_text())
        if tag[0] == "h" and tag[1:].isdigit():
            self.headings.append(int(tag[1:]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        # The title of a drawing is only a tooltip.
        if self.open and self.open[-1] not in ("style", "script", "title"):
            self.said.append(data)


def made(*arguments: object) -> Outline:
    """Return the page of these arguments, checked as HTML."""
    request = report.parse([str(a) for a in arguments])
    seen = Outline(html_page.render(report.build(request)))
    assert seen.open == []
    assert seen.loads == []
    assert seen.unnamed == []
    assert seen.names.count("h1") == 1
    assert len(seen.ids) == len(set(seen.ids))
    assert seen.names.count("script") == 1
    steps = zip(seen.headings, seen.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps), seen.headings
    assert seen.names.count("table") == seen.names.count("caption")
    return seen
