"""runtime=local: a process group of this machine, in the environment that the launcher runs in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from launch.topology import Process


class LocalProcess:
    """In a session of its own: Ctrl-C reaches the launcher only, which then lets every rank save."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                process.argv,
                env={**os.environ, **process.env},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.child.poll()

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=timeout_s)

    def remove(self) -> None:
        """Whatever is left of it, killed."""
        self._signal(signal.SIGKILL)
        self.child.wait()

    def why(self) -> str | None:
        """What the operating system did to it, where its log cannot say."""
        return None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of it is gone: that is what we wanted
            os.killpg(self.child.pid, number)
