"""Run rewards in separate processes, which are killed if a completion takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.core.errors import UserError

READY_WITHIN_S = 300.0  # enough for imports from a slow disk
# CPU seconds, so that samples do not fail on a busy machine. math-verify has the same limit.
TIME_S = 5.0
# Wall-clock seconds, for a reward that waits without using the CPU.
WAIT_S = 60.0
END_WITHIN_S = 30.0
MEMORY_GB = 1.0  # in addition to the memory of the imports
MAX_WORKERS = 16  # per rank; each takes about 0.3 GB
# A batch that takes longer than this is worth the imports of more processes, which take seconds.
SOLO_S = 1.0
# Only these variables are passed to the process, since others may contain secrets.
PASSED_ON = (
    *("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHASHSEED"),
    *("LD_LIBRARY_PATH", "LANG", "LC_ALL"),
)
ENVIRONMENT = {
    # One thread, since the limit counts the CPU time of all threads.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # Each thread's arena takes 64 MB of the limited address space.
    "MALLOC_ARENA_MAX": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/nonexistent",
    # The GPUs belong to the ranks.
    "HIP_VISIBLE_DEVICES": "-1",
    "CUDA_VISIBLE_DEVICES": "-1",
}
READY = b"ready\n"
HANGS = "no score within"
IN_RANK = (
    "The reward's process has no access to the rank's environment, GPU and network. To run it in "
    "the rank, where a hang stops the run, use: method.reward_confined=false."
)


# (scores, None), or (None, reason)
Attempt = tuple[list[Any] | None, str | None]


class Pool:
    """Score single completions in several worker processes at the same time."""

    def __init__(self, names: list[str], num_workers: int) -> None:
        self.workers = [Isolated(names) for _ in range(num_workers)]

    def attempts(self, name: str, rows: Sequence[tuple[Any, Any, Any]]) -> list[Attempt]:
        """Return the attempt for each row (prompts, completions, columns), in their order."""
        first, *others = self.workers
        results: dict[int, Attempt] = {}
        numbers, finished = iter(range(len(rows))), threading.Event()

        def work(worker: Isolated) -> None:
            while (number := next(numbers, None)) is not None:
                results[number] = worker.attempt(name, *rows[number])
            finished.set()

        def join(worker: Isolated) -> None:
            if worker.process is not None or not finished.wait(SOLO_S):
                work(worker)

        with ThreadPoolExecutor(max(1, len(others))) as threads:
            joined = [threads.submit(join, worker) for worker in others]
            try:
                work(first)
            finally:
                finished.set()
            for future in joined:
                future.result()
        return [results[number] for number in range(len(rows))]


def num_workers() -> int:
    """Return the number of worker processes of a rank: its share of the cores, less its own."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // local_ranks - 1))


class Isolated:
    """Compute rewards in a worker process, which is restarted if it ends.

    Requests and replies are lines of JSON. `time_s` limits the CPU seconds per completion. `wait_s`
    limits the wall-clock seconds of a request for one completion. Each additional completion adds
    `time_s`.
    """

    def __init__(
        self,
        names: list[str],
        time_s: float = TIME_S,
        wait_s: float = WAIT_S,
        memory_gb: float = MEMORY_GB,
    ) -> None:
        self.names, self.time_s, self.wait_s, self.memory_gb = names, time_s, wait_s, memory_gb
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def attempt(
        self, name: str, prompts: list[Any], completions: list[Any], columns: dict[str, Any]
    ) -> Attempt:
        """Return (scores, None), or (None, reason) if the reward or the worker fails.

        Raises UserError if the reward itself is invalid.
        """
        content = {"prompts": prompts, "completions": completions, "columns": columns}
        try:
            request = json.dumps({"name": name, **content})
        except TypeError as error:
            raise UserError(
                f"method.rewards.{name} gets columns {', '.join(columns)} as JSON, but one of them "
                f"cannot be converted ({error}). {IN_RANK}"
            ) from error
        process = self.wait_until_ready()
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            line = _line(process, self.wait_s + self.time_s * (len(completions) - 1))
        except BrokenPipeError:
            line = b""
        if not line:
            return None, self._end(hangs=line is None)
        reply = json.loads(line)
        if "rejected" in reply:
            raise UserError(reply["rejected"])
        return reply["scores"], reply["error"]

    def start(self) -> None:
        """Start the process without waiting for its imports, which take seconds."""
        argv = [sys.executable, "-m", "recipes.rewards.verify_worker"]
        argv += [str(self.time_s), str(int(self.memory_gb * 1e9)), *self.names]
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        # A new session, since ranks still need the process to finish their step after a signal.
        self.process = subprocess.Popen(
            argv,
            env=passed_on | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def wait_until_ready(self) -> subprocess.Popen[bytes]:
        """Start the process if necessary, and return it once its rewards are imported.

        Raises UserError if an import fails, and RuntimeError if the process does not start.
        """
        if self.process is None:
            self.start()
        elif self._ready:
            return self.process
        line = _line(self.process, READY_WITHIN_S)
        if line == READY:
            self._ready = True
            return self.process
        reason = self._end(hangs=line is None)
        if line:
            raise UserError(line.decode().strip())
        raise RuntimeError(
            f"the process of the rewards does not start: {reason}. See the lines above"
        )

    def _end(self, hangs: bool) -> str:
        """Kill the process, and return the reason why it ended.

        A process that does not hang is already ending. Freeing its memory may take a while.
        """
        process, self.process, self._ready = self.process, None, False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if hangs else END_WITHIN_S)
        code = process.poll()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # from flushing an unfinished request
                pipe.close()
        if code is None:
            return f"{HANGS} {self.wait_s:g} s"
        if code == -signal.SIGPROF:
            return f"{HANGS} {self.time_s:g} s of CPU time"
        return f"its process ended with exit code {code}"

    def __del__(self) -> None:
        if self.process is not None:
            self._end(hangs=True)


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """Return the next line, or b"" if the process ends, or None after `timeout_s`."""
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else None
