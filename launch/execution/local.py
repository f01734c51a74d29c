"""Run a process group on this machine without a container (runtime=local)."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from launch.execution import logs, orphans, server_client, stacks
from launch.schema.plan import Process


def environment(process: Process) -> dict[str, str]:
    """Return the variables of a process on this machine: those it inherits, and the plan's."""
    inherited = {name: os.environ[name] for name in process.inherited if name in os.environ}
    return {**inherited, **process.env}


class LocalProcess:
    """A GroupHandle for processes in their own session, so that Ctrl-C reaches only the launcher.

    Raises OSError if the program cannot be started.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.log = log
        self.mark = orphans.mark(process.name)
        self.stopping_ranks: list[str] = []
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                process.argv,
                env={**environment(process), **self.mark},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return torchrun's exit code after its ranks have exited; None before.

        torchrun exits before its ranks have saved if it receives a second signal.
        """
        code = self.child.poll()
        if any(orphans.identity(int(r.partition(":")[0])) == r for r in self.stopping_ranks):
            return None
        return code

    def terminate(self) -> None:
        self.stopping_ranks = orphans.children(self.child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout_s)
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(orphans.POLL_S)

    def remove(self) -> None:
        """Kill leftovers, which the marker in their environment identifies.

        torchrun starts ranks in their own sessions, so a signal to the group does not reach them.
        """
        survivors = set(orphans.kill(self.mark))
        try:
            self.child.wait(orphans.KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            survivors.add(self.child.pid)
        if survivors:
            with self.log.open("a") as file:
                file.write(
                    f"SIGKILL did not kill process {', '.join(map(str, sorted(survivors)))}, which "
                    "probably waits for a hung GPU (see `dmesg`). Restart this machine.\n"
                )

    def end_reason(self) -> str | None:
        code = self.child.poll()
        return logs.killed_by(-code) if code is not None and code < 0 else None

    def query(self, port: int, path: str) -> str:
        return server_client.get(port, path)

    def dump_stacks(self, folder: Path) -> Path | None:
        folder.mkdir(exist_ok=True)
        stacks.dump(orphans.marked(self.mark), folder)
        return folder
