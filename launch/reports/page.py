"""A Page as one HTML file: template, styles and program in it, nothing fetched, and every value of a run escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from launch.record import now
from launch.reports.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, dash
from launch.reports.parts import Page, number

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
PLOT = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
# What HTML may not hold: NUL and other control characters, halves of surrogate pairs.
NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def render(page: Page) -> str:
    """The HTML. Strings of a run are text in it, never markup: configurations and logs are other people's."""
    style, program = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    template = _environment().get_template("page.html.j2")
    html = template.render(page=page, style=style, program=program, allowed=_allowed(program), made=now(), plot=PLOT)
    return NOT_TEXT.sub("\ufffd", html)


def _allowed(program: str) -> str:
    """The page's own rule for the browser: nothing from a network, and no program but this one."""
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _environment() -> Environment:
    import jinja2  # for a page only

    loader = jinja2.FileSystemLoader(HERE)
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["number"] = number
    made.globals["dash"] = dash
    made.filters["slug"] = lambda text: re.sub(r"[^a-z0-9]+", "-", str(text).lower()).strip("-")
    return made
