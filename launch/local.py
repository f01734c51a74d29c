"""runtime=local: a process group of this machine, in the environment that the launcher runs in."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from launch import orphans, serving, stacks
from launch.topology import Process


class LocalProcess:
    """In a session of its own: Ctrl-C reaches the launcher only, which then lets every rank save."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.mark = orphans.mark(process.name)
        # When the launcher dies, however it dies, the kernel sends SIGTERM: ranks save, a server ends.
        tied = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                [*tied, *process.argv],
                env={**os.environ, **process.env, **self.mark},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.child.poll()

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of it is gone: that is what we wanted
            os.killpg(self.child.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=timeout_s)

    def remove(self) -> None:
        """Whatever is left of it, killed: torchrun gives every rank a session of its own, so they are found by their mark."""
        for pid in orphans.marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.child.wait()

    def why(self) -> str | None:
        """What the operating system did to it, where its log cannot say."""
        return None

    def ask(self, port: int, path: str) -> str:
        """What the server of this group answers. Raises OSError."""
        return serving.get(port, path)

    def dump_stacks(self, folder: Path) -> None:
        stacks.dump(orphans.marked(self.mark), folder)
