"""Compare docs/reference/ with what the code says. UPDATE_GOLDEN=1 writes the pages."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from launch.config.wording import CONF, groups, summary
from launch.schema import Config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate_reference.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)


@pytest.fixture(scope="module")
def pages():
    pages = generate.pages()
    if os.environ.get("UPDATE_GOLDEN"):
        for name, text in pages.items():
            (FOLDER / name).write_text(text)
    return pages


def test_pages_are_what_the_code_says(pages):
    committed = {file.name: file.read_text() for file in FOLDER.iterdir()}
    stale = [name for name in pages if committed.get(name) != pages[name]]
    assert not stale, "run: .venv/bin/python docs/generate_reference.py"
    assert committed.keys() == pages.keys()


def test_every_option_and_key_has_a_line(pages):
    for page, group in {
        "experiments.md": "experiment",
        "hardware.md": "hardware",
        "models.md": "model",
        "methods.md": "method",
    }.items():
        names = set(groups()[group]) - {"auto"}
        assert [name for name in sorted(names) if name not in pages[page]] == []
    parts = {line.split("`")[1].split(".")[0].split("[")[0] for line in rows(pages["keys.md"])}
    assert parts == set(Config.__dataclass_fields__)


def test_every_option_has_a_summary():
    options = [CONF / group / f"{name}.yaml" for group, names in groups().items() for name in names]
    assert len(options) > 100
    assert [file for file in options if not summary(file).endswith(".")] == []


def rows(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("| `")]
