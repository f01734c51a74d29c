"""Compile kernels for absent GPUs in new processes, because LLVM ends its process on an error."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.tune.amdgpu import ARCHITECTURES, MAX_THREADS

if TYPE_CHECKING:
    from recipes.tune.kernels import Launch


@dataclass(frozen=True)
class Compiled:
    """Hold a compiled kernel, or the `error` that prevented it."""

    isa: str = ""
    ttgir: str = ""
    lds_bytes: int = 0  # allocated by Triton at launch
    seconds: float = 0.0
    error: str | None = None


def compile_all(
    tasks: Sequence[tuple[Launch, str]], jobs: int, timeout_s: float
) -> Iterator[tuple[int, Compiled]]:
    """Compile each (launch, architecture), at most `jobs` at once.

    Yield (index, result) of each as it finishes.
    """
    waiting, workers = deque(range(len(tasks))), list[_Worker]()
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        try:
            while waiting or any(worker.busy for worker in workers):
                while waiting and sum(worker.busy for worker in workers) < jobs:
                    worker = next((w for w in workers if not w.busy), None) or _Worker(tasks, cache)
                    if worker not in workers:
                        workers.append(worker)
                    worker.begin(waiting.popleft())
                busy = [worker for worker in workers if worker.busy]
                next_end_s = min(worker.began_s for worker in busy) + timeout_s
                ready = wait(
                    [worker.connection for worker in busy], max(0.0, next_end_s - time.monotonic())
                )
                for worker in busy:
                    late = time.monotonic() - worker.began_s >= timeout_s
                    if worker.connection in ready or late:
                        index, compiled = worker.index, worker.end(timeout_s)
                        if not worker.process.is_alive():
                            workers.remove(worker)
                        yield index, compiled
        finally:
            for worker in workers:
                worker.kill()


class _Worker:
    """Compile tasks one by one in a process, where only the first costs a second more."""

    def __init__(self, tasks: Sequence[tuple[Launch, str]], cache: str) -> None:
        # fork, so that torch and Triton are imported once, and tasks need no pickling. It is safe,
        # since this process has no threads.
        context = multiprocessing.get_context("fork")
        self.connection, child_end = context.Pipe()
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - kill() closes it
        self.process = context.Process(
            target=_work, args=(tasks, cache, child_end, self.stderr.fileno()), daemon=True
        )
        self.process.start()
        child_end.close()
        self.busy = False

    def begin(self, index: int) -> None:
        self.index, self.began_s, self.busy = index, time.monotonic(), True
        self.stderr.seek(0)
        self.stderr.truncate()
        self.connection.send(index)

    def end(self, timeout_s: float) -> Compiled:
        """Return the task's result. If the worker died or is late, kill it and return an error."""
        self.busy = False
        seconds = time.monotonic() - self.began_s
        try:
            result = self.connection.recv() if self.connection.poll() else None
            reason = f"not compiled after {timeout_s:g} s (timeout_s)"
        except (EOFError, ConnectionResetError):
            self.process.join()
            result, code = None, self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"the compiler died ({how})"
        if result and not result.error:
            return result
        # Triton's exceptions leave out what MLIR or LLVM has printed.
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr.read().decode(errors="replace").splitlines()]
        errors = [line[-400:] for line in lines if "error" in line.lower() or "LLVM" in line]
        error = ": ".join([result.error if result else reason, *errors[:1]])
        if not result:
            self.kill()
        return Compiled(error=error, seconds=seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stderr.close()


def _work(
    tasks: Sequence[tuple[Launch, str]], cache: str, connection: Connection, stderr: int
) -> None:
    os.dup2(stderr, 2)
    os.environ["TRITON_CACHE_DIR"] = cache  # new for each call, so times include compilation
    # The parent handles Ctrl-C and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            launch, arch = tasks[connection.recv()]
            started_s = time.monotonic()
            try:
                result = compile_one(launch, arch)
            except Exception as error:  # any failure becomes a row of the table
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"
                result = Compiled(error=reason, seconds=time.monotonic() - started_s)
            connection.send(result)


def compile_one(launch: Launch, arch: str) -> Compiled:
    """Compile a launch in this process and return the result. Raise what Triton does."""
    wave_size = ARCHITECTURES[arch].wave_size
    threads = launch.options.get("num_warps", 4) * wave_size  # 4: HIPOptions
    if threads > MAX_THREADS:
        return Compiled(
            error=f"num_warps={launch.options['num_warps']} makes a workgroup of {threads} "
            f"threads, and {MAX_THREADS} are the most"
        )
    from triton import compile as triton_compile  # imported here, since the parent does not need it
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    started_s = time.monotonic()
    kernel = triton_compile(
        source, target=GPUTarget("hip", arch, wave_size), options=dict(launch.options)
    )
    seconds = time.monotonic() - started_s
    return Compiled(kernel.asm["amdgcn"], kernel.asm["ttgir"], kernel.metadata.shared, seconds)


def save(folder: Path, stem: str, compiled: Compiled) -> None:
    """Write `stem`.s, the assembly, and `stem`.ttgir, Triton's representation with layouts."""
    (folder / f"{stem}.s").write_text(compiled.isa)
    (folder / f"{stem}.ttgir").write_text(compiled.ttgir)
