"""Plan every launch command of the README, CONTRIBUTING, docs/ and the headers of conf/.

Also check what CONTRIBUTING quotes of the code, and the targets and files that it names.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from containers import build
from tests.conftest import leave_model

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
FILES = [*PAGES, *sorted(ROOT.glob("conf/**/*.yaml")), *sorted(ROOT.glob("recipes/*.py"))]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# [file](path):, a blank line, and a fenced block of its lines.
QUOTED = re.findall(r"\]\(([^)\s]+)\):\n\n```\w+\n(.*?)```", CONTRIBUTING, re.DOTALL)
SFT_ROW = (
    '{"prompt": [{"role": "user", "content": "1+1"}], '
    '"completion": [{"role": "assistant", "content": "2"}], "answer": "2", "score": 1}\n'
)


# Options of groups that conf/config.yaml composes anyhow.
DEFAULTS = {
    f"{group}={option}"
    for entry in yaml.safe_load((ROOT / "conf/config.yaml").read_text())["defaults"]
    if isinstance(entry, dict)
    for group, option in entry.items()
}
# Any positive number plans as well as another.
NUMBERS = re.compile(r"^(seed|method\.args\.(?:max_steps|cycles))=[1-9]\d*$")


def commands(program: str = "launch/run.py") -> list[str]:
    """Return what follows `python <program>`, if it needs no placeholder in <> and no earlier run.

    Words are sorted, so that commands with the same options of groups share what
    launch/config/compose.py caches.
    """
    texts = set()
    for file in FILES:
        joined = re.sub(r"\s*\\+\n[#\s]*", " ", file.read_text())  # lines that end with a backslash
        for line in joined.splitlines():
            match = re.search(rf"python {re.escape(program)} ?(.*)", line)
            if match and not line.strip().startswith("`"):
                text = re.split(r"`|\s{2,}[#(]|\s+[#|]\s", match.group(1))[0].strip()
                if not re.search("<|/latest", text) and not text.startswith("-"):
                    texts.add(shlex.join(sorted(shlex.split(text))))
    return sorted(texts)


def plans() -> list[str]:
    """Return commands that hold every pair of overrides, apart from numbers and defaults."""
    kinds: dict[frozenset[str], str] = {}
    for text in commands():
        words = {NUMBERS.sub(r"\1=N", word) for word in shlex.split(text)} - {"mode=plan"}
        if not any(word.startswith("experiment=") for word in words):
            words -= DEFAULTS
        kinds.setdefault(frozenset(words), text)
    chosen, pairs = [], set()
    for words in sorted(kinds, key=lambda words: (-len(words), sorted(words))):
        new = {*itertools.combinations_with_replacement(sorted(words), 2)} - pairs
        if new or not words:
            chosen.append(kinds[words])
            pairs |= new
    return sorted(chosen)


def test_there_are_many():
    assert len(commands()) > 80


@pytest.mark.parametrize("text", plans())
def test_command_plans(launch, tmp_path, monkeypatch, text):
    monkeypatch.setenv("WANDB_MODE", "offline")  # no key is needed to plan
    for name in (
        "train.jsonl",
        "test.jsonl",
        "my/train.jsonl",
        "my/test.jsonl",
        "samples.jsonl",
        "tests/data/sft.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SFT_ROW)
    (tmp_path / "my/math.jsonl").write_text(r'{"question": "1 + 1?", "answer": "2\n#### 2"}')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for path in re.findall(r"model\.path=(models/\S+)", text):
        leave_model(tmp_path / path)
    for module in ("mine.py", "my_package/rewards.py"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text("def brevity(completions, **_):\n    return []\n")
    words = [word for word in shlex.split(text) if word != "mode=plan"]
    done = launch(*words, "mode=plan")
    if done.code == 2 and re.search(r"the package \w+ is not installed", done.err):
        pytest.skip(done.err.strip())
    assert done.code == 0, done.err


ONE_CARD = (ROOT / "docs/start/one_card.md").read_text()


@pytest.mark.parametrize("overrides", re.findall(r"^\| `(\S+=[^`]*)` ", ONE_CARD, re.MULTILINE))
def test_keys_of_other_trainers_have_ours(launch, tmp_path, overrides):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model = [] if overrides.startswith("model.") else ["model=qwen3_1_7b"]
    data = [] if "data=" in overrides else ["data=jsonl", "data.path=examples/chat.jsonl"]
    words = [*model, *data, *overrides.split()]
    gpu = [] if "hardware=" in overrides else ["hardware=rx7900xtx"]
    done = launch(*gpu, *words, "preflight=warn", "mode=plan")
    assert done.code == 0, done.err


@pytest.mark.parametrize("text", [text for text in commands("containers/build.py") if text])
def test_build_command_is_understood(text):
    assert build.parse(shlex.split(text))[0].name in text


@pytest.mark.parametrize(("path", "block"), QUOTED, ids=[path for path, _ in QUOTED])
def test_contributing_quotes_the_code_as_it_is(path, block):
    quoted = [line for line in block.splitlines() if line.strip() not in ("", "...")]
    lines = (ROOT / path).read_text().splitlines()
    assert quoted
    assert [line for line in quoted if line not in lines] == []


def test_contributing_names_what_exists():
    paths = re.findall(
        r"(?<![\w/])(?:conf|containers|docs|launch|recipes|tests)/[\w./]*\w", CONTRIBUTING
    )
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = {
        word
        for line in re.findall(r"^    make ([a-z -]+?)(?:  | TESTS|$)", CONTRIBUTING, re.MULTILINE)
        for word in line.split()
    }
    assert (
        {"setup", "lint", "test"}
        <= targets
        <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    )
    assert len(QUOTED) == CONTRIBUTING.count("```") // 2
