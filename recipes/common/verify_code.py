"""Reward `code_tests`: the share of a row's tests that the code of a completion passes, run in the sandbox beside the run."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.rewards import final_answer

SOCKET = "sandbox.sock"  # in the run directory; launch/runtimes/sandboxed.py listens
BLOCK = re.compile(r"```([\w+#-]*)[^\n]*\n(.*?)```", re.DOTALL)
LANGUAGES = {"": "python", "python": "python", "python3": "python", "py": "python", "c": "c", "cpp": "cpp", "c++": "cpp", "rust": "rust"}
FORMS = ({"call", "expected"}, {"stdin", "stdout"}, {"check"})


class CodeTests:
    """code_tests(completions, tests, languages) -> (score, error) of each; sends one request a batch."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def __call__(self, completions: list[str], tests: list[Any], languages: list[str | None] | None) -> list[tuple[float, str | None]]:
        jobs = [job(c, t, g) for c, t, g in zip(completions, tests, languages or [None] * len(tests), strict=True)]
        return [(v["passed"] / v["total"], v["error"]) for v in self._ask(jobs)]

    def _ask(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        folder = os.open(self.run_dir, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # a socket's path has at most 107 bytes; a run's may have more
                with connection.makefile("rwb") as file:
                    file.write(json.dumps(jobs).encode() + b"\n")
                    file.flush()
                    answer = file.readline()
        except OSError as error:
            raise RuntimeError(f"the sandbox does not answer at {self.run_dir / SOCKET}: {error.strerror}") from error
        finally:
            os.close(folder)
        if not answer:
            raise RuntimeError("the sandbox went away; logs/sandbox.log says why")
        verdicts: list[dict[str, Any]] = json.loads(answer)
        return verdicts


def job(completion: str, tests: Any, language: str | None) -> dict[str, Any]:
    """What the sandbox runs. Raises UserError for tests that are none."""
    named, code = code_of(completion)
    return {"language": _language(language) if language else named, "code": code, "tests": parse_tests(tests)}


def code_of(completion: str) -> tuple[str, str]:
    """Language and text of the last fenced block; without one, the final answer as Python."""
    blocks = BLOCK.findall(completion)
    if not blocks:
        return "python", final_answer(completion)
    name, code = blocks[-1]
    return _language(name), code


def _language(name: str) -> str:
    """As the sandbox calls it."""
    return LANGUAGES.get(name.lower(), name.lower())


def parse_tests(given: Any) -> list[dict[str, Any]]:
    """Column `tests` of one row: a list, or its JSON, which a table of rows with unlike tests needs. Raises UserError."""
    try:
        tests = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise UserError(f"column 'tests' holds {given[:80]!r}, which is no JSON list of tests ({error.msg}).") from error
    if not isinstance(tests, list) or not tests:
        raise UserError(f"column 'tests' holds {str(given)[:80]!r}: a list of at least one test is expected.")
    return [_test(test) for test in tests]


def _test(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return {"check": given}
    test = {key: value for key, value in given.items() if value is not None or key == "expected"} if isinstance(given, dict) else {}
    if "expected" in test and "call" not in test:  # a table fills in every key that any test has
        del test["expected"]
    if set(test) not in FORMS or not all(isinstance(value, str) for key, value in test.items() if key != "expected"):
        forms = ", ".join("{" + ", ".join(sorted(form)) + "}" for form in FORMS)
        raise UserError(f"column 'tests' holds the test {str(given)[:80]}: one of {forms} (texts, but expected), or a statement of Python.")
    return test
