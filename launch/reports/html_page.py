"""Render a Page as one HTML file that loads no other files and escapes every value of a run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from launch.execution.record import now
from launch.reports import curves
from launch.reports.formats import mark_of, number
from launch.reports.parts import Page

HERE = Path(__file__).parent
# Control characters and halves of surrogate pairs, which are not valid in HTML.
INVALID = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def render(page: Page) -> str:
    """Return the HTML. All values are escaped, because other people can write configs and logs."""
    import jinja2  # imported here because only this function needs it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "mark": mark_of,
        "slug": lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-"),
    }
    environment.globals["dash"] = curves.dash
    style, program = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    html = environment.get_template("page.html.j2").render(
        page=page, style=style, program=program, digest=digest, made=now(), plot=curves
    )
    return INVALID.sub("\ufffd", html)
