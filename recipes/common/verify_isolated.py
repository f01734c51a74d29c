"""Rewards in a process of their own, which ends where completions take them too much time or memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

from recipes.common.errors import UserError

READY_WITHIN_S = 300.0  # its imports, from a slow disk
TIME_S = 5.0  # math-verify's own limit for one answer; of the processor's time, so that a busy machine fails no other samples
WAIT_S = 60.0  # of the clock: for what waits and does not compute; of several completions, TIME_S more for each further one
END_WITHIN_S = 30.0
MEMORY_GB = 1.0  # beside what its imports take
# Nothing else of the rank's environment, where tokens may be. One thread: those of BLAS would count as time.
PASSED_ON = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
GIVEN = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each thread's own would take 64 MB of addresses, which the limit counts
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/nonexistent",
    # The GPUs are the ranks': one that it took memory of would be any.
    "HIP_VISIBLE_DEVICES": "-1",
    "CUDA_VISIBLE_DEVICES": "-1",
}
READY = b"ready\n"
HANGS = "no score within"


class Isolated:
    """Asks the rewards of `names` in a process that is replaced when it ends, one JSON line a question.

    `time_s`: seconds of the processor for one completion; `wait_s`: of the clock for a question of one, with `time_s` for each further one.
    """

    def __init__(self, names: list[str], time_s: float = TIME_S, wait_s: float = WAIT_S, memory_gb: float = MEMORY_GB) -> None:
        self.names, self.time_s, self.wait_s, self.memory_gb = names, time_s, wait_s, memory_gb
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def __call__(self, name: str, completion: str, row: dict[str, Any]) -> tuple[float | None, str | None]:
        """(score, error) of one completion and what the reward reads beside it."""
        scores, error = self.ask(name, [""], [completion], {key: [value] for key, value in row.items()})
        return (scores[0], None) if scores else (0.0, error)

    def ask(self, name: str, prompts: list[Any], completions: list[Any], columns: dict[str, Any]) -> tuple[list[Any] | None, str | None]:
        """(scores, None), or (None, why there are none). Raises UserError for a reward that does not do what a reward does."""
        question = json.dumps({"name": name, "prompts": prompts, "completions": completions, "columns": columns})
        process = self.start()
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            answer = _line(process, self.wait_s + self.time_s * (len(completions) - 1))
        except BrokenPipeError:
            answer = b""
        if not answer:
            return None, self._end(hangs=answer is None)
        found = json.loads(answer)
        if "refused" in found:
            raise UserError(found["refused"])
        return found["scores"], found["error"]

    def begin(self) -> None:
        """Start the process, whose imports take seconds, and do not wait for it; the first question starts it otherwise."""
        # A session of its own: a signal that asks the ranks to stop lets them finish their step, which needs this process.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recipes.common.verify_worker", str(self.time_s), str(int(self.memory_gb * 1e9)), *self.names],
            env={name: os.environ[name] for name in PASSED_ON if name in os.environ} | GIVEN,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self) -> subprocess.Popen[bytes]:
        """The process, with the rewards imported. Raises UserError for one that is not there."""
        if self.process is None:
            self.begin()
        elif self._ready:
            return self.process
        said = _line(self.process, READY_WITHIN_S)
        if said == READY:
            self._ready = True
            return self.process
        ended = self._end(hangs=said is None)
        if said:
            raise UserError(said.decode().strip())
        raise RuntimeError(f"the process of the rewards does not start: {ended}; what it said stands above")

    def _end(self, hangs: bool) -> str:
        """Kill what is left of it, and say why. One that does not hang is ending already, which takes time where it has much memory."""
        process, self.process, self._ready = self.process, None, False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if hangs else END_WITHIN_S)
        code = process.poll()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what was still to be written to it
                pipe.close()
        if code is None:
            return f"{HANGS} {self.wait_s:g} s"
        return f"{HANGS} {self.time_s:g} s of CPU time" if code == -signal.SIGPROF else f"its process ended with exit code {code}"

    def __del__(self) -> None:
        if self.process is not None:
            self._end(hangs=True)


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """What it says next; b"" where it has ended, None where it says nothing in time."""
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else None
