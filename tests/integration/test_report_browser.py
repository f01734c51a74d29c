"""Test the page of launch/report.py in a real browser, opened from its file.

It fetches nothing, logs nothing, and is readable on a phone and in the dark.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import report
from launch.plan import rundir
from tests.conftest import ROOT
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
from tests.integration.browser import Browser, program, started
from tests.integration.conftest import lacking

pytestmark = pytest.mark.integration

PHONE, DESKTOP = 390, 1280  # CSS pixels
# Elements that reach out of the page, but for those that scroll by themselves.
TOO_WIDE = """[...document.querySelectorAll("body *")].filter((e) =>
  e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest(".wide, pre, .skip")).map((e) => e.outerHTML.slice(0, 80))"""
# [text, its colour, what it stands on] of texts with less than 4.5:1.
TOO_FAINT = """(() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const paper = (e) => { for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.closest("script")) continue;
    const style = getComputedStyle(e), under = paper(e);
    const ink = numbers(e instanceof SVGElement ? style.fill : style.color);
    const [high, low] = [light(ink), light(under)].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) found.push([e.textContent.slice(0, 40), ink, under]);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = program()
    if chromium is None:
        return lacking("no Chromium: apt-get install chromium")
    with started(chromium) as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Return a page of each kind, written by the program."""
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
    runs = {
        "grpo": [grpo],
        "crashed": [crashed],
        "bench": [a_benchmark(root / "bench")],
        "several": [root / "bench", log(a_run(root / "b", "seed=3"), *steps(5)), grpo],
        "pipeline": [
            a_pipeline(root / "p", ("base", "evaluate"), ("sft", "sft"), ("after", "evaluate"))
        ],
        "sweep": [a_sweep(root, grid)],
    }
    files = {name: root / f"{name}.html" for name in runs}
    for name, folders in runs.items():
        assert report.main([*map(str, folders), f"output={files[name]}"]) == 0
    return files


@pytest.mark.parametrize("name", ["grpo", "crashed", "bench", "several", "pipeline", "sweep"])
def test_opened_from_its_file(browser, pages, tmp_path, name):
    for width, dark in ((PHONE, False), (DESKTOP, True)):
        browser.open(pages[name], width, dark=dark)
        browser.value("document.querySelectorAll('details').forEach((d) => d.open = true)")
        assert browser.messages == []
        assert browser.addresses == [pages[name].as_uri()]
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.value(TOO_WIDE) == []
        assert browser.value(TOO_FAINT) == []
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (paper != "rgb(255, 255, 255)") is dark
        count = "document.images.length + document.querySelectorAll('main script').length"
        assert browser.value(count) == 0
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_keyboard(browser, pages):
    """Use the page by keyboard alone.

    Tab shows the link past the header and Enter follows it. The focus is seen, and a wide table
    scrolls.
    """
    browser.open(pages["grpo"], PHONE)
    browser.press("Tab", 9)
    assert browser.value("document.activeElement.className") == "skip"
    assert browser.value("document.activeElement.getBoundingClientRect().left") >= 0
    assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert browser.value("document.activeElement.hash") == "#main"
    assert browser.value("document.querySelector(document.activeElement.hash).tabIndex") == -1
    assert browser.value(
        "[...document.querySelectorAll('nav a')].every((a) => "
        "document.getElementById(a.hash.slice(1)))"
    )
    assert browser.value(
        "[...document.querySelectorAll('.wide, pre')].every((e) => e.tabIndex === 0)"
    )


def test_a_screen_reader_hears_every_part(browser, pages):
    browser.open(pages["grpo"], DESKTOP)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            by_role.setdefault(node["role"]["value"], []).append(
                node.get("name", {}).get("value", "")
            )
    assert browser.value("document.documentElement.lang") == "en"
    assert len(by_role["main"]) == 1
    assert "Sections" in by_role["navigation"]
    images = [name for role in ("image", "img") for name in by_role.get(role, [])]
    assert any(
        name.startswith("Loss over step: 8 → 0.0133") or "Loss over step: mean of" in name
        for name in images
    ), images
    assert all(images)
    assert "predicted" in by_role["columnheader"]
    assert {"seconds a step", "generation server"} <= set(by_role["rowheader"])
    assert all(by_role["table"])


def test_values_under_the_pointer(browser, pages):
    browser.open(pages["several"], DESKTOP)
    browser.value("document.querySelector('.chart > svg').scrollIntoView({block: 'center'})")
    x, y, width = browser.value(
        "(({x, y, width}) => [x, y, width])"
        "(document.querySelector('.chart > svg').getBoundingClientRect())"
    )
    assert browser.value("document.querySelector('.chart .readout').hidden")
    browser.point_at(x + 0.999 * width, y + 40)
    text = browser.value("document.querySelector('.chart .readout').textContent")
    assert text.startswith("step 600: B 1.6; C 0.01333"), text
    browser.point_at(2, 2)
    assert browser.value("document.querySelector('.chart .readout').hidden")
    assert browser.messages == []


def test_a_page_of_a_run_that_still_trains(browser, tmp_path):
    folder = log(a_run(tmp_path / "r", exit_code=None), *steps(3))
    with rundir.locked(folder):
        made = subprocess.run(
            [sys.executable, str(ROOT / "launch/report.py"), str(folder)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert made.returncode == 0, made.stderr
    browser.open(folder / "report.html", PHONE)
    assert "Still running" in browser.value("document.body.innerText")
    assert browser.messages == []
