"""Data as a person meets it: a preview that leaves no run, a plan that knows prepared rows, curricula on ranks and after a stop."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import command
from tests.e2e.test_resume import run

LEVELS = "data.tasks=[{name: chain_sum, level: 0}, {name: chain_sum, level: 1}]"
SMALL = ["hardware=cpu", "data.num_train=40", "data.num_heldout=0", "tracking=none"]


def run_dir(done) -> Path:
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(json.loads(done.stdout[done.stdout.index("{\n") :])["run_dir"])


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_preview_shows_tokens_with_their_mask_leaves_no_run_and_the_plan_then_knows(tmp_path):
    row = {"prompt": [{"role": "user", "content": "1+1"}], "completion": [{"role": "assistant", "content": "2"}]}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    given = ["hardware=cpu", "data=jsonl", "data.path=a.jsonl", "data.deduplicate=exact"]
    before = command(*given, "mode=plan", cwd=tmp_path).stdout
    assert "not prepared yet" in before
    shown = command(*given, "data.preview=2", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    mask = re.findall(r"^ +\d+ +\d+ (loss|-) +'(.*)'$", shown.stdout, re.MULTILINE)
    assert "".join(text for _, text in mask) == "<|user|>1+1<|assistant|>2<|end|>"
    assert "".join(text for counts, text in mask if counts == "loss") == "2<|end|>"
    assert "duplicates: 2" in shown.stdout
    assert os.listdir(tmp_path / "runs") == [".cache"]
    plan = json.loads(command(*given, "mode=plan", "format=json", cwd=tmp_path).stdout)
    assert (plan["data"]["rows"], plan["data"]["duplicates"], plan["data"]["efficiency"]) == (1, 2, 1.0)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps(row | {"completion": [{"role": "assistant", "content": "two"}]}) + "\n")
    assert "not prepared yet" in command(*given, "mode=plan", cwd=tmp_path).stdout


TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{%- endif %}{{ mark }}{%- for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}"
    "{%- for call in (m.tool_calls or []) %}{{ call.name + (call.arguments | tojson) }}{%- endfor %}"
    "{%- if m.role == 'assistant' %}{{ eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_model_sees_the_tools_it_is_to_call(tmp_path, method):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    rows = []
    for arguments in ({"a": 1}, {"b": 2}):
        call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}
        prompt, refused = [{"role": "user", "content": "go"}], [{"role": "assistant", "content": "no"}]
        given = {"prompt": prompt, "completion": [call]} if method == "sft" else {"prompt": prompt, "chosen": [call], "rejected": refused}
        rows.append(given | {"tools": [{"name": "f"}], "chat_template_kwargs": {"mark": "~"}})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["hardware=cpu", f"method={method}", "data=jsonl", "data.path=a.jsonl", "data.chat_template=t.jinja"]
    shown = command(*given, "data.preview=2", "method.args.max_length=128", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    text = "".join(re.findall(r"^ +\d+ +\d+ (?:loss|-) +'(.*)'$", shown.stdout, re.MULTILINE))
    for arguments in ('{"a": 1}', '{"b": 2}'):
        assert f'[{{"name": "f"}}]~<|user|>go<|assistant|>f{arguments}<|end|>' in text, text


def test_a_curriculum_on_two_ranks_draws_its_levels(tmp_path):
    given = [*SMALL, LEVELS, "data.curriculum=mixed", "smoke=true", "topology=ddp", "topology.num_gpus=2", "method.args.max_steps=4"]
    folder = run_dir(command(*given, "format=json", cwd=tmp_path))
    rows = metrics(folder)
    found = [(row["level_share/0"], row["level_share/1"]) for row in rows]
    assert found == [(1.0, 0.0)] * (len(rows) // 2) + [(pytest.approx(0.3), pytest.approx(0.7))] * (len(rows) // 2)
    assert json.loads((folder / "data.json").read_text())["by_level"] == {"0": 20, "1": 20}


def test_an_adaptive_curriculum_of_grpo_goes_on_after_a_stop_as_if_there_was_none(tmp_path):
    args = {"max_steps": 6, "save_steps": 3, "num_generations": 2, "gradient_accumulation_steps": 1}
    given = [*SMALL, LEVELS, "data.curriculum=adaptive", *(f"method.args.{name}={value}" for name, value in args.items())]
    assert run(tmp_path, "grpo", *given)[0] == 0
    state = json.loads((tmp_path / "checkpoints/checkpoint-3/trainer_state.json").read_text())
    assert len(state["stateful_callbacks"]["ScheduleState"]["attributes"]["rates"]) == 1 + 3
    first = {key: [row.get(key) for row in metrics(tmp_path)] for key in ("level_share/0", "loss", "reward")}
    # As if it had been killed after the checkpoint of step 3: what came later is gone.
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints/checkpoint-6")
    assert run(tmp_path, "grpo", *given)[0] == 0
    assert {key: [row.get(key) for row in metrics(tmp_path)] for key in first} == first
