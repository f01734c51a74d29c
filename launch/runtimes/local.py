"""runtime=local: a process group of this machine, in the environment that the launcher runs in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from launch.errors import HostError
from launch.machine import masks
from launch.supervision import logs, orphans, serving, stacks
from launch.topology import Process


class LocalProcess:
    """In a session of its own: Ctrl-C reaches the launcher only, which then lets every rank save. Raises HostError."""

    def __init__(self, process: Process, log: Path) -> None:
        self.log = log
        self.mark = orphans.mark(process.name)
        self.asked: list[str] = []
        try:
            with log.open("ab") as file:
                self.child = subprocess.Popen(
                    process.argv,
                    env=masks.inherited({**process.env, **self.mark}),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            raise HostError(f"{process.name} cannot be started: {error.filename}: {error.strerror}.") from error

    def poll(self) -> int | None:
        """The exit code, None while it runs.

        That of torchrun, when the ranks it had as it was asked to stop have ended too: asked by somebody else as well (a service
        manager signals every process), it leaves them while they save.
        """
        code = self.child.poll()
        still = code is not None and any(orphans.identity(int(rank.partition(":")[0])) == rank for rank in self.asked)
        return None if still else code

    def ask_to_stop(self) -> None:
        self.asked = orphans.children(self.child.pid)
        with contextlib.suppress(ProcessLookupError):  # all of it is gone: that is what we wanted
            os.killpg(self.child.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout_s)
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(orphans.POLL_S)

    def remove(self) -> None:
        """Whatever is left of it, killed: torchrun gives every rank a session of its own, so they are found by their mark."""
        left = orphans.kill(self.mark)
        try:
            self.child.wait(orphans.DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            left = [self.child.pid, *left]
        if left:
            with self.log.open("a") as file:
                file.write(
                    f"process {', '.join(map(str, sorted(set(left))))} does not die of SIGKILL: it waits inside the kernel, most often "
                    "for a GPU that hangs (`dmesg`). A restart of this machine frees it.\n"
                )

    def why(self) -> str | None:
        """What the operating system did to it, where its log cannot say."""
        code = self.child.poll()
        return logs.killed_by(-code) if code is not None and code < 0 else None

    def ask(self, port: int, path: str) -> str:
        """What the server of this group answers. Raises OSError."""
        return serving.get(port, path)

    def dump_stacks(self, folder: Path) -> Path | None:
        """Returns where they are; None where its processes print them into their logs. Raises OSError."""
        folder.mkdir(exist_ok=True)
        stacks.dump(orphans.marked(self.mark), folder)
        return folder
