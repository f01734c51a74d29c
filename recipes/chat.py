"""Talk to a model in a terminal: each line is a message, and the answer is printed as it comes.

The launcher starts this program, one process with the terminal's input and output:

    1 GPU:   python launch/chat.py <run>                       (with the settings of that run)
             python launch/run.py method=chat model=qwen3_4b   (any model)
    8 GPUs:  method=serve, whose server several clients can use (docs/methods/serve.md)

The conversation is the input of each answer. Without a chat template, each line is continued as
text instead. Input may also be a pipe.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends imports without a traceback

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase, TextStreamer

from recipes.rank.program import main, say
from recipes.sampling.generation import (
    TOO_LONG,
    Prompt,
    SampleGenerator,
    SamplingConfig,
    build_generator,
)

PROMPT = "> "
CLEAR, EXIT = "/clear", "/exit"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


@dataclass
class ChatConfig(SamplingConfig):
    """Arguments of method=chat. `system` is the first message of each conversation."""

    max_new_tokens: int = 1024
    temperature: float = 0.7
    top_p: float = 0.95
    system: str | None = None


class Stopped(Exception):
    """Report that Ctrl-C stopped an answer."""


class Answer(TextStreamer):
    """Print an answer's tokens as they come, and collect its text.

    Raises Stopped after Ctrl-C. Here, between two tokens, no engine is in the middle of its work.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self.is_stopped = "", False

    def put(self, value: torch.Tensor) -> None:
        if self.is_stopped:
            raise Stopped
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        print(visible(text), end="\n" if stream_end else "", flush=True)

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        self.is_stopped = True


def visible(text: str) -> str:
    """Replace control characters, with which a model could change the terminal."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def chat(config: DictConfig) -> dict[str, Any]:
    args = ChatConfig(**config.trainer_args)
    for number in (signal.SIGTERM, signal.SIGINT):  # there is nothing to save
        signal.signal(number, signal.SIG_DFL)
    generator = build_generator(config, args)
    has_template = bool(generator.tokenizer.chat_template)
    say(f"{CLEAR} starts another conversation, {EXIT} or Ctrl-D ends, Ctrl-C stops an answer.")
    if not has_template:
        say("This model has no chat template, so each line is continued as text.")
    start = [{"role": "system", "content": args.system}] * (args.system is not None)
    messages, count = list(start), 0
    for count, line in enumerate(lines(), start=1):
        if line == CLEAR:
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        text = answer(generator, messages if has_template else line, args.seed + count)
        messages.append({"role": "assistant", "content": text})
        if text is None:
            messages = messages[:-2]
    return {"messages": count}


def lines() -> Iterator[str]:
    """Yield each line of the input that is not empty, until it ends or is EXIT."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets input() edit the line and recall earlier ones
    while True:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = input(PROMPT if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == EXIT:
            return
        if line:
            yield line


def answer(generator: SampleGenerator, prompt: Prompt, seed: int) -> str | None:
    """Print the answer to a prompt and return it; None if the prompt fills the model's context."""
    streamer = Answer(generator.tokenizer)
    signal.signal(signal.SIGINT, streamer.stop)
    try:
        (sample,) = generator([prompt], seed, streamer)
    except Stopped:
        streamer.end()
        say("[stopped]")
        return streamer.text
    if sample is TOO_LONG:
        say(f"[the conversation fills the model's {generator.positions} tokens; use {CLEAR}]")
        return None
    if not sample.finished:
        say(f"[cut off after {sample.num_tokens} tokens; see max_new_tokens]")
    return streamer.text


if __name__ == "__main__":
    main(chat)
