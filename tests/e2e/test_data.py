"""Test data.preview, tools and a curriculum as a user runs them.

A preview leaves no run, a plan knows prepared rows, and an adaptive curriculum survives a stop.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import types
from pathlib import Path

import pytest

from launch.execution import row_preview
from recipes import preview
from recipes.rank import program
from tests.conftest import ROOT
from tests.e2e.test_resume import run

LEVELS = "data.tasks=[{name: chain_sum, level: 0}, {name: chain_sum, level: 1}]"
SMALL = ["hardware=cpu", "data.num_train=40", "data.num_heldout=0", "tracking=none"]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_preview_shows_tokens_and_masks_and_the_plan_uses_its_cache(launch, tmp_path):
    """The preview runs in its own process and leaves no run."""
    row = {
        "prompt": [{"role": "user", "content": "1+1"}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    overrides = ["hardware=cpu", "data=jsonl", "data.path=a.jsonl", "data.deduplicate=exact"]
    assert "data.preview=1 counts" in launch(*overrides, "mode=plan").out
    shown = launch(*overrides, "data.preview=2")
    assert shown.code == 0, shown.err
    mask = re.findall(r"^ +\d+ +\d+ (loss|-) +'(.*)'$", shown.out, re.MULTILINE)
    assert "".join(text for _, text in mask) == "<|user|>1+1<|assistant|>2<|end|>"
    assert "".join(text for counts, text in mask if counts == "loss") == "2<|end|>"
    assert "duplicates: 2" in shown.out
    assert os.listdir(tmp_path / "runs") == [".cache"]
    plan = json.loads(launch(*overrides, "mode=plan", "format=json").out)
    assert (plan["data"]["rows"], plan["data"]["duplicates"], plan["data"]["efficiency"]) == (
        1,
        2,
        1.0,
    )
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(
            json.dumps(row | {"completion": [{"role": "assistant", "content": "two"}]}) + "\n"
        )
    assert "data.preview=1 counts" in launch(*overrides, "mode=plan").out


@pytest.fixture
def preview_here(monkeypatch):
    """Run the program of data.preview in this process."""

    def start(argv, **_):
        code = program.run(preview.preview, argv[-2:])
        return types.SimpleNamespace(returncode=code)

    monkeypatch.setattr(row_preview, "subprocess", types.SimpleNamespace(run=start))


@pytest.mark.parametrize("reaches", [True, False])
def test_a_preview_without_a_network_does_not_retry(launch, monkeypatch, reaches):
    environments = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def start(argv, env, **_):
        environments.append(env)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(row_preview, "subprocess", types.SimpleNamespace(run=start))
    monkeypatch.setattr(row_preview, "_reaches_hub", lambda: reaches)
    launch("hardware=cpu", "data=gsm8k", "data.preview=1")
    assert [env.get("HF_HUB_OFFLINE") for env in environments] == [None if reaches else "1"]


TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{%- endif %}{{ mark }}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}"
    "{%- for call in (m.tool_calls or []) %}{{ call.name + (call.arguments | tojson) }}"
    "{%- endfor %}"
    "{%- if m.role == 'assistant' %}{{ eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)


@pytest.mark.usefixtures("preview_here")
def test_a_model_sees_the_tools_that_it_may_call(launch, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    rejected = [{"role": "assistant", "content": "no"}]
    rows = []
    for arguments in ({"a": 1}, {"b": 2}):
        calls = [{"name": "f", "arguments": arguments}]
        rows.append(
            {
                "prompt": [{"role": "user", "content": "go"}],
                "chosen": [{"role": "assistant", "content": "", "tool_calls": calls}],
                "rejected": rejected,
                "tools": [{"name": "f"}],
                "chat_template_kwargs": {"mark": "~"},
            }
        )
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = """
        hardware=cpu method=dpo data=jsonl data.path=a.jsonl data.chat_template=t.jinja
    """.split()
    shown = launch(*overrides, "data.preview=2", "method.args.max_length=128")
    assert shown.code == 0, shown.err
    text = "".join(re.findall(r"^ +\d+ +\d+ (?:loss|-) +'(.*)'$", shown.out, re.MULTILINE))
    for arguments in ('{"a": 1}', '{"b": 2}'):
        assert f'[{{"name": "f"}}]~<|user|>go<|assistant|>f{arguments}<|end|>' in text, text


OWN_REWARDS = """
def signed(completions, answer, **columns):
    return [1 if c[-1]["content"] == a else -1 for c, a in zip(completions, answer)]

def inapplicable(completions, **columns):
    return [None for _ in completions]

def broken(completions, **columns):
    return [c.text for c in completions]
"""


@pytest.mark.usefixtures("preview_here")
def test_a_preview_shows_what_rewards_give(launch, tmp_path, monkeypatch):
    """A reward that fails for every completion ends the preview, after the rows."""
    (tmp_path / "mine.py").write_text(OWN_REWARDS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "a?", "answer": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "data=jsonl data.path=a.jsonl data.columns.prompt=question data.system_prompt=Add."
    overrides = ["hardware=cpu", "method=grpo", *data.split(), "data.preview=2"]
    weights = "{mine.signed: 1, accuracy: 1, mine.inapplicable: 1}"
    shown = launch(*overrides, f"method.rewards={weights}")
    assert shown.code == 0, shown.err
    assert "reward accuracy, row 1: 1 for the row's answer, 0 for an empty" in shown.out
    assert "reward accuracy, row 2: none for an empty" in shown.out
    assert "reward mine.inapplicable, row 2: none for an empty" in shown.out
    assert "reward mine.signed, row 1: 1 for the row's answer, 0 for an empty" in shown.out
    assert shown.out.count("score -1 is outside 0 to 1") == 2
    chain = "method.reward_chain=[accuracy,mine.signed]"
    shown = launch(*overrides, "method.rewards={mine.signed: 1, accuracy: 1}", chain)
    assert "reward accuracy, row 1: 1 for the row's answer, 0 for an empty" in shown.out
    assert "reward mine.signed, row 1: 1 for the row's answer, - for an empty" in shown.out
    assert "score -1" not in shown.out
    failed = launch(*overrides, "method.rewards={mine.broken: 1}")
    assert failed.code == 2
    assert "row 2: the prompt" in failed.out
    assert "mine.broken fails for every completion: AttributeError" in failed.err
    assert "mine.py:9)" in failed.err


def test_an_adaptive_curriculum_of_grpo_resumes_exactly(tmp_path):
    args = {"max_steps": 6, "save_steps": 3, "num_generations": 2, "gradient_accumulation_steps": 1}
    overrides = [
        *SMALL,
        LEVELS,
        "data.curriculum=adaptive",
        *(f"method.args.{name}={value}" for name, value in args.items()),
    ]
    assert run(tmp_path, "grpo", *overrides)[0] == 0
    state = json.loads((tmp_path / "checkpoints/checkpoint-3/trainer_state.json").read_text())
    assert len(state["stateful_callbacks"]["ScheduleState"]["attributes"]["rates"]) == 1 + 3
    first = {
        key: [row.get(key) for row in metrics(tmp_path)]
        for key in ("level_share/0", "loss", "reward")
    }
    # Remove everything after the checkpoint of step 3, as if the run had been killed there.
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints/checkpoint-6")
    assert run(tmp_path, "grpo", *overrides)[0] == 0
    assert {key: [row.get(key) for row in metrics(tmp_path)] for key in first} == first


def test_random_weights_answer_questions_without_completions(tmp_path):
    """Their tokenizer is trained on the questions."""
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, result = run(
        tmp_path / "run",
        "evaluate",
        "hardware=cpu",
        "data=jsonl",
        "data.num_train=null",
        "data.num_heldout=0",
        f"data.path={tmp_path}/a.jsonl",
        "data.columns.prompt=question",
        "data.heldout_fraction=0.5",
        "model.init=random",
        "method.args.max_new_tokens=2",
    )
    assert code == 0, result
    assert 0 < result["num_samples"] < len(rows)
