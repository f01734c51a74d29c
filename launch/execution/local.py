"""Run a process group on this machine, in the launcher's own environment (runtime=local)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from launch.execution import logs, orphans, server_client, stacks
from launch.machine import masks
from launch.schema.plan import Process


class LocalProcess:
    """A process group (Started) in its own session, so that Ctrl-C reaches only the launcher.

    Raises OSError.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.log = log
        self.mark = orphans.mark(process.name)
        self.stopping: list[str] = []
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                process.argv,
                env=masks.merged_environ({**process.env, **self.mark}),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return torchrun's exit code once its ranks have ended too; None before.

        If somebody else signals torchrun too, such as a service manager, it exits while its ranks
        still save.
        """
        code = self.child.poll()
        saving = (orphans.identity(int(rank.partition(":")[0])) == rank for rank in self.stopping)
        return None if code is not None and any(saving) else code

    def ask_to_stop(self) -> None:
        self.stopping = orphans.children(self.child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout_s)
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(orphans.POLL_S)

    def remove(self) -> None:
        """Kill leftovers.

        torchrun starts ranks in their own sessions, so find them by the mark in their environment.
        """
        survivors = set(orphans.kill(self.mark))
        try:
            self.child.wait(orphans.DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            survivors.add(self.child.pid)
        if survivors:
            with self.log.open("a") as file:
                file.write(
                    f"process {', '.join(map(str, sorted(survivors)))} survived SIGKILL. It waits "
                    "in the kernel, usually for a hung GPU (see `dmesg`). Restart this machine.\n"
                )

    def why(self) -> str | None:
        code = self.child.poll()
        return logs.killed_by(-code) if code is not None and code < 0 else None

    def ask(self, port: int, path: str) -> str:
        return server_client.get(port, path)

    def dump_stacks(self, folder: Path) -> Path | None:
        folder.mkdir(exist_ok=True)
        stacks.dump(orphans.marked(self.mark), folder)
        return folder
