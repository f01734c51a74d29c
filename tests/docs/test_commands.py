"""Plan every launch command of the README, CONTRIBUTING, docs/ and the headers of conf/.

Commands on an earlier run get a run that trained; reports and a repetition of it run. Also check
what CONTRIBUTING quotes of the code, and the targets and files that it names.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from containers import build
from launch import chat, report, reproduce
from launch.plan.planning import prepare
from tests.conftest import Done, command, composed, leave_model, leave_record

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


def commands(program: str = "launch/run.py", of_runs: bool = False) -> list[str]:
    """Return what follows `python <program>` and has no placeholder, without or with earlier runs.

    An earlier run is runs/<name>/latest. Words are sorted, so that commands with the same options
    of groups share what launch/config/compose.py caches.
    """
    texts = set()
    for file in FILES:
        joined = re.sub(r"\s*\\+\n[#\s]*", " ", file.read_text())  # lines that end with a backslash
        for line in joined.splitlines():
            match = re.search(rf"python {re.escape(program)} ?(.*)", line)
            if match and not line.strip().startswith("`"):
                text = re.split(r"`|\s{2,}[#(]|\s+[#|]\s", match.group(1))[0].strip()
                if of_runs:
                    text = text.replace("<name>/<evaluation>", "evaluation/latest")
                    text = text.replace("<name>", "mine").replace("/workspace/", "")
                is_of_runs = "/latest" in text
                if is_of_runs == of_runs and "<" not in text and not text.startswith("-"):
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
    assert_plans(launch(*words, "mode=plan"))


def assert_plans(done: Done) -> None:
    if done.code == 2 and re.search(r"the package \w+ is not installed", done.err):
        pytest.skip(done.err.strip())
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Train an adapter, evaluate it, and copy its run under every name that commands use."""
    folder = tmp_path_factory.mktemp("earlier")
    for words in (
        ["name=mine", "adapter=lora", "adapter.rank=16"],
        ["name=evaluation", "method=evaluate", "model.path=runs/mine/latest"],
    ):
        done = command("hardware=cpu", "smoke=true", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    programs = ("run", "chat", "report", "reproduce")
    texts = [text for name in programs for text in commands(f"launch/{name}.py", of_runs=True)]
    for name in {*re.findall(r"runs/([\w.-]+)/latest", " ".join(texts))} - {"mine", "evaluation"}:
        shutil.copytree(folder / "runs/mine", folder / "runs" / name, symlinks=True)
    return folder / "runs"


@pytest.mark.parametrize("text", commands(of_runs=True))
def test_command_on_a_run_plans(launch, earlier, tmp_path, text):
    words = shlex.split(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp/convert_hf_to_gguf.py").touch()
    if "resume=runs/mine/latest" in words:
        stopped = [word for word in words if not re.match("resume=|topology.num_gpus=", word)]
        leave_record(tmp_path / "runs/mine/latest", prepare(composed(*stopped))[0], "interrupted")
    else:
        (tmp_path / "runs").symlink_to(earlier)
    if "method=serve" in words and not any(word.startswith("hardware=") for word in words):
        words.append("hardware=mi300x")  # vLLM does not serve on a CPU
    assert_plans(launch(*words, "mode=plan"))


@pytest.mark.parametrize("text", commands("launch/chat.py", of_runs=True))
def test_chat_with_a_run_plans(earlier, monkeypatch, text):
    monkeypatch.chdir(earlier.parent)
    assert chat.main([*shlex.split(text), "mode=plan"]) == 0


@pytest.mark.parametrize("text", commands("launch/report.py", of_runs=True))
def test_report_of_runs_is_written(earlier, monkeypatch, tmp_path, text):
    monkeypatch.chdir(earlier.parent)
    page = tmp_path / "page.html"
    assert report.main([*shlex.split(text), f"output={page}"]) == 0
    assert page.exists()


@pytest.mark.parametrize("text", commands("launch/reproduce.py", of_runs=True))
def test_a_run_is_reproduced(earlier, monkeypatch, text):
    monkeypatch.chdir(earlier.parent)
    assert reproduce.main(shlex.split(text)) == 0


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
