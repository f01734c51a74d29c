"""Test what the first rows of local files decide: the reward, and what a plan rejects."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext

import pytest

from launch.config.compose import compose
from launch.config.request import Request
from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.plan import plan_page
from launch.plan.check_rows import check_rows, row_warnings, text_prompts
from tests.conftest import composed, host_with
from tests.helpers.data_rows import jsonl

GRPO = "hardware=cpu topology=single method=grpo data=jsonl data.path=rows.jsonl"
SFT = "hardware=cpu method=sft data=jsonl data.path=rows.jsonl"
DPO = "hardware=cpu method=dpo data=jsonl data.path=rows.jsonl"
GSM8K = [
    {"question": "What is 2 + 3?", "answer": "It is <<2+3=5>>5.\n#### 5"},
    {"question": "What is 9 - 2?", "answer": "It is 7.\n#### 7"},
]
ALPACA = {"instruction": "a", "input": "x", "output": "b"}
NO_INPUT = [{**ALPACA, "input": ""}, {**ALPACA, "input": None}, {"instruction": "a", "output": "b"}]
TO_SFT = "'data.columns={prompt: instruction, completion: output}'"
MASKED = "method.args.assistant_only_loss=true"
TO_GRPO = "data.columns.prompt=instruction data.columns.answer=output"
MAPPED = "'data.columns={prompt: question, answer: answer}'"
PATTERN = "'data.answer_pattern=\"#### (.+)\"'"
TESTS = {"prompt": "a", "answer": "b", "tests": ["assert f(1) == 1"]}
NESTED = json.loads("[" * 900 + "]" * 900)
TEXT, ANSWER = {"prompt": "a", "answer": "1"}, {"role": "assistant", "content": "b"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda rows, name="rows.jsonl": jsonl(tmp_path / name, rows)


@pytest.mark.parametrize(("rows", "overrides", "rewards"), [
    ([TEXT], GRPO, {"accuracy": 1.0}),
    ([TESTS], GRPO, {"code_tests": 1.0}),
    ([{"prompt": "a", "pattern": "b"}], GRPO, {"regex": 1.0}),
    ([{"prompt": "a", "gold": "1"}], f"{GRPO} data.columns.answer=gold", {"accuracy": 1.0}),
    ([TEXT], f"{GRPO} +method.rewards.format=0.2", {"accuracy": 1.0, "format": 0.2}),
    ([TEXT], f"{GRPO} '+method.rewards={{mine.brevity: 0.5}}'", {"mine.brevity": 0.5}),
    ([TESTS], f"{GRPO} +method.rewards.accuracy=0.5", {"accuracy": 0.5}),
    ([TEXT], f"{GRPO} '~method.rewards.reasoning_gym' +method.rewards.format=1.0", {"format": 1.0}),
    ([TEXT], f"{GRPO} method.rewards.reasoning_gym=2.0", {"reasoning_gym": 2.0}),
    ([TESTS], "method=sample data=mix 'data.sources=[{path: rows.jsonl, weight: 1}]'",
     {"code_tests": 1.0}),
    ([], "method=grpo", {"reasoning_gym": 1.0}),
    ([], "method=grpo +method.rewards.format=0.2", {"reasoning_gym": 1.0, "format": 0.2}),
    ([], "method=grpo data=code", {"code_tests": 1.0}),
    ([], "method=raft data=hub data.hub_id=a/b data.revision=c", {"accuracy": 1.0}),
    ([], "method=grpo data=hub data.hub_id=a/b data.revision=c data.columns.tests=unit_tests",
     {"code_tests": 1.0}),
    ([], "method=evaluate data=hub data.hub_id=a/b data.revision=c", {}),
])  # fmt: skip
def test_the_reward_follows_the_rows(write, rows, overrides, rewards):
    overrides = overrides.replace("rows.jsonl", write(rows))  # composed() keeps results
    assert composed(*shlex.split(overrides)).method.rewards == rewards


@pytest.mark.parametrize(("rows", "overrides", "line", "key"), [
    (GSM8K, GRPO, 1, "Use: data.columns.prompt=question."),
    (GSM8K, SFT, 1, "Use: data.columns.prompt=question data.columns.completion=answer."),
    (GSM8K, f"{GRPO} data.columns.prompt=qestion", 1, "data.columns.prompt=qestion"),
    (NO_INPUT, GRPO, 1, f"Use: {TO_GRPO}."),
    ([*NO_INPUT, ALPACA], f"{SFT} {TO_SFT}", 4, "data.columns.input=null"),
    ([*GSM8K, {"question": "a", "answer": "seven"}],
     f"{GRPO} {MAPPED} {PATTERN}", 3, "data.answer_pattern"),
    ([TEXT, {"prompt": [{"role": "user", "content": "a"}], "answer": "1"}], GRPO, 2, "prompt (text)"),
    ([TEXT, {**TEXT, "answer": [1]}], GRPO, 2, "answer is [1]"),
    ([{**TESTS, "tests": []}], GRPO, 1, "column 'tests'"),
    ([{"messages": [{"role": "bot", "content": "a"}, ANSWER]}], SFT, 1, "messages is"),
    ([{"prompt": "a", "completion": "b", "text": "c"}], SFT, 1, "data.columns.<field>=null"),
    ([{"prompt": "a", "chosen": "b", "rejected": "b"}], DPO, 1, "chosen and rejected are equal"),
    ([{"messages": [{**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}]}],
     SFT, 1, "train_detail"),
    ([{"messages": [{**ANSWER, "loss": 0.5}]}], SFT, 1, "weight of 0 or 1"),
    (NO_INPUT, f"{SFT} {TO_SFT} {MASKED}", 1, "Use: method.args.assistant_only_loss=false"),
    ([{"text": "a"}], f"{SFT} {MASKED}", 1, "Use: method.args.assistant_only_loss=false"),
    ([TEXT, {**TEXT, "answer": 2**63}], GRPO, 2, "answer contains the integer 9223372036854775808"),
    ([TEXT, {**TEXT, "tests": [{"n": -(2**64)}]}], GRPO, 2, "tests contains the integer -1844674407370955"),
    ([TEXT, {**TEXT, "tests": NESTED}], GRPO, 2, "tests contains more than 32 nested"),
    ([{"messages": [{**ANSWER, "n": 2**63}]}], SFT, 1, "messages contains the integer"),
    ([{"prompt": "a", "chosen": [{**ANSWER, "n": 2**63}], "rejected": [ANSWER]}], DPO, 1, "chosen contains"),
    ([{"system": "s", "messages": [ANSWER]}], SFT, 1, "data.columns.system=null"),
    ([TEXT], f"{GRPO} data.filter.equals.level=1", 1, "data.filter.equals.level"),
    ([TEXT], f"{GRPO} 'data.filter.levels=[1]'", 1, "data.filter.levels"),
    ([TEXT], f"{GRPO} data.balance=task", 1, "data.balance=task"),
    ([{"prompt": "a", "completion": "b", "score": "high"}],
     "method=dpo data=samples data.path=rows.jsonl", 1, "score is"),
])  # fmt: skip
def test_a_plan_rejects_rows_that_the_ranks_would_reject(launch, write, rows, overrides, line, key):
    path = write(rows)
    done = launch(*shlex.split(overrides), "mode=plan")
    assert done.code == 2, done.err
    assert f"{path}:{line}: " in done.err
    assert key in done.err


@pytest.mark.parametrize(("rows", "overrides"), [
    (GSM8K, f"{GRPO} {MAPPED} {PATTERN}"),
    ([{**TEXT, "answer": -(2**63)}], GRPO),
    ([{"messages": [{**ANSWER, "train_detail": [], "loss": True}], "id": 2**64}], SFT),
    (GSM8K, f"{SFT} 'data.columns={{prompt: question, completion: answer}}'"),
    (NO_INPUT, f"{SFT} {TO_SFT}"),
    ([{"messages": [ANSWER]}], f"{SFT} {MASKED}"),
    ([{"prompt": [{"role": "user", "content": "a"}], "completion": [ANSWER]}], f"{SFT} {MASKED}"),
    (NO_INPUT, f"{GRPO} {TO_GRPO}"),
    ([ALPACA], f"{SFT} {TO_SFT} +data.columns.input=null"),
    ([{"prompt": "a", "completion": "b", "text": "c"}], f"{SFT} data.columns.text=null"),
    ([{"prompt": "a", "reward_model": {"ground_truth": "1"}}],
     f"{GRPO} data.columns.answer=reward_model.ground_truth"),
    ([TEXT, {"prompt": [{"role": "user", "content": "a"}], "answer": "1"}],
     f"{GRPO} data.system_prompt=''"),
])  # fmt: skip
def test_a_plan_accepts_mapped_rows(launch, write, rows, overrides):
    write(rows)
    done = launch(*shlex.split(overrides), "mode=plan", "format=json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["name"]


PAIR = {"prompt": "a", "completion": "b"}
MESSAGES = {"prompt": [{"role": "user", "content": "a"}], "answer": "1"}
CHAT = "hardware=mi300x data=jsonl data.path=rows.jsonl model=qwen3_4b"


@pytest.mark.parametrize(("row", "overrides", "keys"), [
    (TEXT, f"{CHAT} method=grpo", ["data.path"]),
    (TEXT, f"{CHAT} method=sample", ["data.path"]),
    (TEXT, f"{CHAT} method=evaluate data.heldout_path=rows.jsonl", ["data.heldout_path"]),
    (TEXT, f"{CHAT} method=grpo data.system_prompt=b", []),
    (TEXT, f"{CHAT} method=grpo data.system_prompt=''", []),
    (TEXT, f"{CHAT} method=grpo data.system_prompt=null", []),
    (MESSAGES, f"{CHAT} method=grpo", []),
    (PAIR, f"{CHAT} method=sft", ["data.path"]),
    (PAIR, f"{CHAT} method=sft data.heldout_path=rows.jsonl", ["data.path"]),
    (PAIR, f"{CHAT} method=sft model=tiny", []),
    ({**PAIR, "completion": [ANSWER]}, f"{CHAT} method=sft", []),
    ({"text": "a"}, f"{CHAT} method=sft", []),
    ({"text": "a", "prompt": "b"}, f"{CHAT} method=sft", []),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, f"{CHAT} method=dpo", ["data.path"]),
    ({"chosen": "a b", "rejected": "a c"}, f"{CHAT} method=dpo", []),
    (TEXT, f"{CHAT} method=grpo model.hub_id=Qwen/Qwen3-4B-Base model.revision=null", []),
    (TEXT, f"{CHAT} method=grpo model.path=.", ["data.path"]),
    (TEXT, f"{GRPO} model=tiny", []),
])  # fmt: skip
def test_text_prompts_of_a_model_with_a_chat_template(tmp_path, write, row, overrides, keys):
    path = write([row])
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    words = Request(shlex.split(overrides.replace("rows.jsonl", path)))
    lines = [*row_warnings(compose(words), words.keys)]
    assert [line.partition(":")[0] for line in lines] == keys
    command = " ".join(plan_page.next_command(words, compose(words), host_with(8)))
    assert command.endswith(" data.system_prompt=") == bool(keys) or "system_prompt=" in overrides
    for line in lines:
        fixed = words.plus(*shlex.split(line.partition("Use: ")[2].partition(",")[0]))
        assert not [*row_warnings(compose(fixed), fixed.keys)]
        check_rows(compose(fixed), False)


def test_an_evaluation_has_the_prompts_of_training(tmp_path, write):
    """A model that was trained on text is evaluated on text, unless the user chooses the data."""
    path = write([TEXT])
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    data = f"data=jsonl data.path={path} data.heldout_path={path}".split()
    record = {"composition": plain(compose(["hardware=cpu", "method=grpo", *data]))}
    (tmp_path / "record.json").write_text(json.dumps(record, default=str))
    words = ["hardware=cpu", "method=evaluate", "model=tiny", f"model.path={tmp_path}/model"]
    assert text_prompts(compose(words), ()) is None
    assert text_prompts(compose([*words, *data]), ()) == "data.heldout_path"


@pytest.mark.parametrize(("rewards", "columns"), [
    ("{accuracy: 1.0}", "data.columns.prompt=problem data.columns.answer=solution"),
    ("{mine.score: 1.0}", "data.columns.prompt=problem"),  # which reads solution
    ("{mine.plain: 1.0}", "data.columns.prompt=problem"),
])  # fmt: skip
def test_columns_for_the_rewards(tmp_path, launch, write, rewards, columns):
    """The columns of the message are right for what the rewards read, and have a template."""
    path = write([{"problem": "a", "solution": "1"}])
    functions = "def score(completions, solution): ...\ndef plain(completions, **_): ..."
    (tmp_path / "mine.py").write_text(functions)
    words = [*CHAT.replace("rows.jsonl", path).split(), "method=grpo", f"method.rewards={rewards}"]
    done = launch(*words, "mode=plan")
    assert f"Use: {columns}. Add data.system_prompt=''" in done.err
    done = launch(*words, *columns.split(), "data.system_prompt=", "mode=plan")
    assert (done.code, "! data.path" in done.out) == (0, False), done.err


def test_a_column_that_a_reward_reads_and_another_key_renames(tmp_path, launch, write):
    write([{"problem": "a", "solution": "1"}])
    (tmp_path / "mine.py").write_text("def score(completions, solution): ...")
    words = f"{GRPO} data.columns.prompt=problem data.columns.answer=solution".split()
    done = launch(*words, "method.rewards={mine.score: 1.0}", "mode=plan")
    assert (done.code, "Remove data.columns.answer" in done.err) == (2, True), done.err


def test_reversed_columns(launch, write):
    write(GSM8K)
    reversed_columns = "data.columns={question: prompt, answer: completion}"
    done = launch(*SFT.split(), reversed_columns, "mode=plan")
    assert (done.code, "is reversed" in done.err) == (2, True), done.err
    pasted = shlex.split(done.err.partition("Use: ")[2].rstrip().removesuffix("."))
    assert launch(*SFT.split(), *pasted, "mode=plan").code == 0


@pytest.mark.parametrize(("rewards", "warns"), [
    ("{accuracy: 1.0}", True),
    ("{accuracy: 1.0, format: 0.2}", False),
])  # fmt: skip
def test_rows_that_no_reward_scores(write, rewards, warns):
    path = write([TEXT, {"prompt": "b"}])
    words = [*GRPO.replace("rows.jsonl", path).split(), f"method.rewards={rewards}"]
    assert any("1 of the first 2 rows" in line for line in row_warnings(compose(words))) == warns


@pytest.mark.parametrize(("rows", "overrides", "rejects"), [
    ([{"messages": [ANSWER]}], "method=sft", True),
    ([{"messages": [ANSWER]}], "method=sft model.chat_template=chat.jinja", False),
    ([{"text": "a"}], "method=sft", False),
    ([MESSAGES], "method=grpo", True),
])  # fmt: skip
def test_messages_need_a_chat_template(tmp_path, write, rows, overrides, rejects):
    path = write(rows)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    words = f"hardware=cpu topology=single data=jsonl data.path={path} model.path=. {overrides}"
    with pytest.raises(UserError, match="chat template") if rejects else nullcontext():
        check_rows(compose(words.split()), False)


@pytest.mark.parametrize(("turns", "warns"), [(1, False), (2, True), (3, False)])
def test_prompts_that_end_with_an_answer(write, turns, warns):
    roles = ("user", "assistant", "user")
    prompt = [{"role": role, "content": "a"} for role in roles[:turns]]
    path = write([{"prompt": prompt, "answer": "2"}])
    words = shlex.split(f"hardware=cpu method=grpo data=jsonl data.path={path}")
    lines = [line for line in row_warnings(compose(words)) if "a turn of the assistant" in line]
    assert len(lines) == warns


@pytest.mark.parametrize(("answer", "overrides", "warns"), [
    ("1 + 1 is 2.\n#### 2", "method=grpo", False),  # which the reward finds
    ("Adding\nthem, we get \\boxed{2}.", "method=grpo", False),
    ("Adding both of these numbers gives us the sum 2.", "method=grpo", True),
    ("Adding both of these numbers, we get that the answer is 2.", "method=grpo", False),
    (r"\begin{pmatrix} 1 & 2 & 3 & 4 \\ 5 & 6 & 7 & 8 \end{pmatrix}", "method=grpo", False),
    ("1 + 1\nis 2.", "method=evaluate data.heldout_fraction=0.5", True),
    ("2", "method=grpo", False),
    ("1 + 1 is 2.\n#### 2", "method=grpo 'data.answer_pattern=\"#### (.+)\"'", False),
    ("a\nb", "method=grpo 'method.rewards={regex: 1.0}' method.reward_pattern=a", False),
])  # fmt: skip
def test_answers_that_are_solutions(write, answer, overrides, warns):
    path = write([{"prompt": "1 + 1", "answer": answer}])
    words = shlex.split(f"hardware=cpu data=jsonl data.path={path} {overrides}")
    lines = [line for line in row_warnings(compose(words)) if "data.answer_pattern=" in line]
    assert len(lines) == warns
    for line in lines:
        pasted = shlex.split(line.partition("Use: ")[2].partition(", or")[0])
        assert not [*row_warnings(compose([*words, *pasted]))]


def test_rows_of_a_chat_cannot_be_evaluated(write):
    path = write([{"messages": [ANSWER]}])
    words = ["hardware=cpu", "method=evaluate", "data=jsonl", f"data.heldout_path={path}"]
    with pytest.raises(UserError, match=f"^{path}:1: .*method.selection.metric=eval_loss"):
        check_rows(compose(words), False)
