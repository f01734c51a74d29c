"""Reward `code_tests`: the share of a row's tests that a completion's code passes.

Tests run in the run's sandbox, a separate container.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any

from launch.core.row_tests import parse_tests
from recipes.rewards.reward_functions import Completion, Judgment, final_answer, text

SOCKET = "sandbox.sock"  # in the run directory; launch/execution/sandboxed.py listens
BLOCK = re.compile(r"```([\w+#-]*)[^\n]*\n(.*?)```", re.DOTALL)
LANGUAGES = {"": "python", "python3": "python", "py": "python", "c++": "cpp"}


class CodeTests:
    """Judge the completions of a batch with one request to the sandbox."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def __call__(
        self, prompts: list[Any], completions: list[Completion], columns: dict[str, Any]
    ) -> list[Judgment]:
        """Return each completion's share of passed tests. Raises UserError for malformed tests."""
        jobs = []
        languages = columns.get("language") or [None] * len(completions)
        rows = zip(completions, columns["tests"], languages, strict=True)
        for completion, tests, language in rows:
            fence_language, code = extract_code(text(completion))
            name = _sandbox_language(language) if language else fence_language
            jobs.append({"language": name, "code": code, "tests": parse_tests(tests)})
        folder = os.open(self.run_dir, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                # A socket's path is limited to 107 bytes, and a run directory may be longer.
                connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")
                with connection.makefile("rwb") as file:
                    file.write(json.dumps(jobs).encode() + b"\n")
                    file.flush()
                    answer = file.readline()
                    if not answer:
                        raise ConnectionError(0, "it has stopped")
        except OSError as error:
            raise RuntimeError(
                f"the sandbox does not answer at {self.run_dir / SOCKET}: {error.strerror}. See "
                "logs/sandbox.log"
            ) from error
        finally:
            os.close(folder)
        return [Judgment(v["passed"] / v["total"], v["error"]) for v in json.loads(answer)]


def extract_code(completion: str) -> tuple[str, str]:
    """Return (language, code) of the last fenced block, or the final answer as Python code."""
    blocks = BLOCK.findall(completion)
    if not blocks:
        return "python", final_answer(completion)
    name, code = blocks[-1]
    return _sandbox_language(name), code


def _sandbox_language(name: str) -> str:
    return LANGUAGES.get(name.lower(), name.lower())


def check_tests(rows: Iterable[dict[str, Any]]) -> None:
    """Raise UserError for malformed tests now, before the run reaches their prompt."""
    for row in rows if isinstance(rows, Sized) else ():  # skip streams
        parse_tests(row["tests"])
