"""Talk to a small model through standard input, with transformers on a CPU."""

from __future__ import annotations

import io
import os
import signal
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.core import json_files
from launch.core.json_files import plain
from launch.plan.planning import prepare
from launch.schema.trainer_args import complete
from recipes import chat
from recipes.rank import program
from recipes.sampling.generation import SampleGenerator, build_generator
from tests.helpers.exports import write_model

HI, MORE = {"role": "user", "content": "1 + 2 ="}, {"role": "user", "content": "3 + 1 ="}
SYSTEM = {"role": "system", "content": "2 + 3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat") / "model", max_position_embeddings=128)


@pytest.fixture
def talk(model, tmp_path, capfd, monkeypatch):
    """Return a function that sends lines to a chat, and returns its output lines and result."""
    asked = [f"model.path={model}", "method.args.max_new_tokens=8", "method.args.temperature=3"]

    def configured(*overrides: str):
        config, _ = prepare(compose(["hardware=cpu", "method=chat", *asked, *overrides]))
        content = {"run_dir": str(tmp_path), "trainer_args": complete(config, tmp_path, (1, 2))}
        return OmegaConf.create({**plain(config), **content})

    def call(text: str, *overrides: str):
        OmegaConf.save(configured(*overrides), tmp_path / "config.yaml")
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        before = signal.getsignal(signal.SIGTERM)
        assert program.run(chat.chat, ["--config", str(tmp_path / "config.yaml")]) == 0
        assert signal.getsignal(signal.SIGTERM) == before
        return capfd.readouterr().out, json_files.read_json(tmp_path / "result.json")

    def expected(number: int, *messages: dict) -> str:
        """Return what the model answers as the answer `number`, all at once."""
        config = configured()
        args = chat.ChatConfig(**config.trainer_args)
        (sample,) = build_generator(config, args)([list(messages)], number)
        return sample.text

    return SimpleNamespace(call=call, expected=expected)


@pytest.fixture
def prompts(monkeypatch):
    """Collect the prompts that the model reads."""
    collected, encode = [], SampleGenerator.encode

    def collecting(self, prompt):
        collected.append([*prompt])
        return encode(self, prompt)

    monkeypatch.setattr(SampleGenerator, "encode", collecting)
    return collected


def test_each_answer_continues_the_conversation(talk, prompts):
    first, third = talk.expected(1, HI), talk.expected(4, MORE)
    history = [HI, {"role": "assistant", "content": first}, MORE]
    second = talk.expected(2, *history)
    prompts.clear()
    text = "\n".join([HI["content"], "", MORE["content"], "/clear", MORE["content"], "/exit", "no"])
    out, result = talk.call(text)
    cut = "\n[cut off after 8 tokens; see max_new_tokens]\n"
    assert out.partition("stops an answer.\n")[2] == chat.visible(
        f"{first}{cut}{second}{cut}{third}{cut}"
    )
    assert prompts == [[HI], history, [MORE]]
    assert (result["status"], result["messages"]) == ("done", 4)


def test_a_system_message_begins_each_conversation(talk, prompts):
    line = f"{HI['content']}\n"
    talk.call(f"{line}/clear\n{line}", "method.args.system=2 + 3")
    assert prompts == [[SYSTEM, HI]] * 2


def test_ctrl_c_stops_an_answer_and_the_next_line_is_answered(talk, monkeypatch):
    put, count = chat.Answer.put, 0

    def interrupted(self, value):
        nonlocal count
        count += 1
        if count == 4:  # the prompt and two tokens have come
            os.kill(os.getpid(), signal.SIGINT)
        put(self, value)

    monkeypatch.setattr(chat.Answer, "put", interrupted)
    out, result = talk.call(f"{HI['content']}\n{MORE['content']}\n")
    assert (out.count("[stopped]"), out.count("[cut off"), result["messages"]) == (1, 1, 2)


def test_a_message_that_fills_the_context_is_dropped(talk):
    out, _ = talk.call(f"{'1 + 2 = ' * 200}\n{HI['content']}\n")
    assert "fills the model's 128 tokens" in out
    assert chat.visible(talk.expected(2, HI)) in out


def test_without_a_chat_template_lines_are_continued_as_text(talk, model, tmp_path, monkeypatch):
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    try:
        out, result = talk.call(f"{HI['content']}\n")
    finally:
        (model / "chat_template.jinja").write_text(template)
    assert "no chat template" in out
    assert result["messages"] == 1


def test_a_model_cannot_send_commands_to_the_terminal():
    assert chat.visible("a\x1b[2J\x07b\tc\n\u00e9") == "a\ufffd[2J\ufffdb\tc\n\u00e9"
