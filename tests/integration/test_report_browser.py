"""Test the pages of launch/report.py in a real browser, on a phone and in dark mode."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launch import report
from tests.helpers.report_examples import (
    GRPO_STEP,
    HOSTILE,
    a_benchmark,
    a_pipeline,
    a_run,
    a_sweep,
    change,
    log,
    steps,
)
from tests.integration.conftest import skip_without

pytestmark = pytest.mark.integration

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), "")
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars
    --enable-logging=stderr --virtual-time-budget=5000 --dump-dom
""".split()
DARK = "--blink-settings=preferredColorScheme=0"
PHONE, DESKTOP = 390, 1280  # CSS pixels
# Shows a page in a frame of a given width, and stores the value of an expression with `page` and
# `view` (the frame's document and window), which look() reads.
FRAME = """<!doctype html><iframe style="width:{width}px;height:900px;border:0"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  document.body.dataset.value = JSON.stringify({expression});
}};
frame.srcdoc = {html};
</script>"""
# Elements that are wider than the page, except those that scroll.
TOO_WIDE = """[...page.querySelectorAll("body *")].filter((e) =>
  e.getBoundingClientRect().right > view.innerWidth + 1
  && !e.closest(".wide, pre, .skip")).map((e) => e.outerHTML.slice(0, 80))"""
# [text, color, background] of texts whose contrast is less than 4.5:1.
TOO_FAINT = """(() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const paper = (e) => { for (; e; e = e.parentElement) {
    const c = numbers(view.getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const faint = [];
  for (const e of page.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.closest("script")) continue;
    const style = view.getComputedStyle(e), under = paper(e);
    const ink = numbers(e instanceof view.SVGElement ? style.fill : style.color);
    const [high, low] = [light(ink), light(under)].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push([e.textContent.slice(0, 40), ink, under]);
  }
  return faint;
})()"""
LOOKS = f"""(page.querySelectorAll("details").forEach((d) => d.open = true), {{
  loads: view.performance.getEntriesByType("resource").map((entry) => entry.name),
  width: page.documentElement.scrollWidth, wide: {TOO_WIDE}, faint: {TOO_FAINT},
  paper: view.getComputedStyle(page.body).backgroundColor,
  images: page.images.length + page.querySelectorAll("main script").length}})"""
KEYBOARD = """(() => {
  const skip = page.querySelector("a, button, [tabindex]");
  skip.focus();
  const main = page.querySelector(skip.hash);
  return {first: skip.className, left: skip.getBoundingClientRect().left >= 0,
    outline: view.getComputedStyle(skip).outlineStyle, main: [main.tagName, main.tabIndex],
    sections: [...page.querySelectorAll("nav a")].every((a) => page.querySelector(a.hash)),
    scrolls: [...page.querySelectorAll(".wide, pre")].every((e) => e.tabIndex === 0)};
})()"""
POINTER = """(() => {
  const svg = page.querySelector(".chart > svg"), {x, y, width} = svg.getBoundingClientRect();
  const readout = page.querySelector(".chart .readout"), seen = [readout.hidden];
  const at = {clientX: x + 0.999 * width, clientY: y + 40, bubbles: true};
  svg.dispatchEvent(new view.PointerEvent("pointermove", at));
  seen.push(readout.textContent);
  svg.dispatchEvent(new view.PointerEvent("pointerleave"));
  return [...seen, readout.hidden];
})()"""


class Value(HTMLParser):
    """Read the value that FRAME stores."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.value = json.loads(dict(attrs)["data-value"])


@pytest.fixture
def look(tmp_path):
    """Return a function that evaluates an expression in a page, and checks for an empty console."""
    if not CHROMIUM:
        skip_without("no Chromium: apt-get install chromium")

    def value(file: Path, expression: str, width: int, *flags: str) -> Any:
        html = json.dumps(file.read_text()).replace("</", "<\\/")
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(width=width, expression=expression, html=html))
        argv = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}"]
        done = subprocess.run([*argv, frame.as_uri()], capture_output=True, text=True, timeout=60)
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        parser = Value()
        parser.feed(done.stdout)
        return parser.value

    return value


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Return a page of each kind, written by launch/report.py."""
    root = tmp_path_factory.mktemp("pages")
    grpo = log(
        a_run(root / "grpo", "method=grpo", reward=0.9), *steps(600, reward=0.5, **GRPO_STEP)
    )
    change(
        grpo / "plan.json",
        warnings=[HOSTILE, "x" * 500],
        targets={"reward": {"value": 1.0, "source": "y" * 300}},
    )
    log(grpo, '{"step": ')
    crashed = a_run(root / "crashed", exit_code=4, error=HOSTILE)
    (crashed / "logs/trainers.log").write_text(f"{'z' * 300}\n{HOSTILE}\n")
    grid = [
        {"varied": [f"seed={n}", f"method.args.learning_rate={n % 2 + 1}e-3"], "value": float(n)}
        for n in range(6)
    ]
    phases = ("base", "evaluate"), ("sft", "sft"), ("after", "evaluate")
    runs = {
        "grpo": [grpo],
        "crashed": [crashed],
        "bench": [a_benchmark(root / "bench")],
        "several": [root / "bench", log(a_run(root / "b", "seed=3"), *steps(5)), grpo],
        "pipeline": [a_pipeline(root / "p", *phases)],
        "sweep": [a_sweep(root, grid)],
    }
    files = {name: root / f"{name}.html" for name in runs}
    for name, folders in runs.items():
        assert report.main([*map(str, folders), f"output={files[name]}"]) == 0
    return files


@pytest.mark.parametrize("name", ["grpo", "crashed", "bench", "several", "pipeline", "sweep"])
def test_page_is_readable_and_loads_nothing(look, pages, name):
    for width, flags in ((PHONE, []), (DESKTOP, [DARK])):
        seen = look(pages[name], LOOKS, width, *flags)
        assert (seen.pop("paper") != "rgb(255, 255, 255)") is bool(flags)
        assert seen == {"loads": [], "width": width, "wide": [], "faint": [], "images": 0}


def test_keyboard(look, pages):
    """Check that the first focus is the visible skip link, and that a wide table scrolls."""
    skip = {"first": "skip", "left": True, "outline": "solid", "main": ["MAIN", -1]}
    assert look(pages["grpo"], KEYBOARD, PHONE) == {**skip, "sections": True, "scrolls": True}


def test_tooltips(look, pages):
    before, text, after = look(pages["several"], POINTER, DESKTOP)
    assert text.startswith("step 600: B 1.6; C 0.01333")
    assert before is after is True
