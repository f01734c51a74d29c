"""Train the tiny model, then talk to it in a terminal through launch/chat.py."""

from __future__ import annotations

import importlib.util
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import command
from tests.integration.conftest import skip_without

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, argv: list[str], cwd: Path) -> None:
        self.text = ""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execv(argv[0], argv)

    def wait_for(self, text: str) -> str:
        """Read the output up to `text`, and return what came before it."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.file], [], [], 1)[0]:
                self.text += os.read(self.file, 65536).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the working directory of a run, runs/mine/latest."""
    folder = tmp_path_factory.mktemp("trained")
    done = command("hardware=cpu", "runtime=local", "smoke=true", "name=mine", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("library", ["transformers", "vllm"])
def test_a_chat_in_a_terminal(trained, library):
    if library == "vllm" and importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")
    chat = [sys.executable, str(ROOT / "launch/chat.py"), "runs/mine/latest"]
    terminal = Terminal([*chat, f"engine={library}", "max_new_tokens=200"], trained)
    terminal.wait_for("stops an answer.")
    terminal.wait_for("> ")
    for line in ("1 + 1 =", "again"):
        terminal.type(f"{line}\n")
        terminal.wait_for(line)
        answer = terminal.wait_for("\n> ")
        assert answer.partition("[cut off")[0].strip()
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert not list((trained / "runs").glob("chat*"))


def test_ctrl_c_ends_a_chat_that_is_loading(trained):
    chat = [sys.executable, str(ROOT / "launch/chat.py"), "runs/mine/latest", "verbose=true"]
    terminal = Terminal(chat, trained)
    terminal.wait_for("smoke=true")  # the plan's warning, just before the process starts
    time.sleep(1)
    terminal.type("\x03")
    assert terminal.exit_code() == 75


def test_a_chat_names_the_commit_of_the_hub_model(trained, tmp_path):
    cache, commit = tmp_path / "models--me--mine", "c" * 40
    shutil.copytree(trained / "runs/mine/latest/model", cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    argv = [sys.executable, str(ROOT / "launch/chat.py"), "model.hub_id=me/mine", "hardware=cpu"]
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        argv, input="1 + 1 =\n", env=env, cwd=trained, capture_output=True, text=True
    )
    assert (done.returncode, f"model.revision={commit}" in done.stdout) == (0, True), done.stderr
