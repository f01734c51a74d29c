"""A named reward in a process of its own, which is killed where one completion takes it too long."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from typing import Any

READY_WITHIN_S = 300.0  # its imports, from a slow disk
TIME_S = 5.0  # math-verify's own limit for one answer


class Isolated:
    """isolated(name, completion, row) -> (score, error). The process starts with the first question and is replaced when it ends.

    Reads and writes one JSON line a question.
    """

    def __init__(self, names: list[str], time_s: float = TIME_S) -> None:
        self.names, self.time_s = names, time_s
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, name: str, completion: str, row: dict[str, Any]) -> tuple[float, str | None]:
        process = self.process or self._start()
        question = json.dumps({"name": name, "completion": completion, "row": row})
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            answer = _line(process, self.time_s)
        except BrokenPipeError:
            answer = b""
        if not answer:
            return 0.0, self._end()
        found = json.loads(answer)
        return found["score"], found["error"]

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: a signal that asks the ranks to stop lets them finish their step, which needs this process.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recipes.common.verify_worker", *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        if not _line(self.process, READY_WITHIN_S):
            raise RuntimeError(f"the process of the rewards does not start: {self._end()}; what it said stands above")
        return self.process

    def _end(self) -> str:
        """Kill what is left of it, and say why."""
        process, self.process = self.process, None
        code = process.poll()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what was still to be written to it
                pipe.close()
        return f"no score within {self.time_s:g} s" if code is None else f"its process ended with exit code {code}"

    def __del__(self) -> None:
        if self.process is not None:
            self._end()


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """What it says next; b"" where it says nothing in time, or has ended."""
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else b""
