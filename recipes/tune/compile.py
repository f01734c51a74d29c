"""Compiles kernels for GPUs that are not there, in processes of their own: LLVM ends the process in which it cannot go on."""

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
    """`error` says why there is nothing else."""

    isa: str = ""
    ttgir: str = ""
    lds_bytes: int = 0  # that Triton asks for at launch
    seconds: float = 0.0
    error: str | None = None


def compile_all(tasks: Sequence[tuple[Launch, str]], jobs: int, timeout_s: float) -> Iterator[tuple[int, Compiled]]:
    """Each (launch, architecture) compiled, with its index, in the order in which they end; at most `jobs` at once."""
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
                ready = wait([worker.connection for worker in busy], max(0.0, next_end_s - time.monotonic()))
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
    """A process that compiles one task after another: the first costs a second more than the rest."""

    def __init__(self, tasks: Sequence[tuple[Launch, str]], cache: str) -> None:
        # fork: torch and Triton are imported once, and the tasks need no pickling. No thread runs in this process.
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - kill() closes it
        self.process = context.Process(target=_work, args=(tasks, cache, theirs, self.stderr.fileno()), daemon=True)
        self.process.start()
        theirs.close()
        self.busy = False

    def begin(self, index: int) -> None:
        self.index, self.began_s, self.busy = index, time.monotonic(), True
        self.stderr.seek(0)
        self.stderr.truncate()
        self.connection.send(index)

    def end(self, timeout_s: float) -> Compiled:
        """What it has sent. Where it died, or was still at work after its time: why there is nothing, and then it is gone for good."""
        self.busy = False
        seconds = time.monotonic() - self.began_s
        try:
            result = self.connection.recv() if self.connection.poll() else None
            reason = f"not compiled after {timeout_s:g} s (timeout_s)"
        except (EOFError, ConnectionResetError):
            self.process.join()
            result, code = None, self.process.exitcode or 0
            reason = f"the compiler died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        if result and not result.error:
            return result
        failed = Compiled(error=f"{result.error if result else reason}{self._last_error()}", seconds=seconds)
        if not result:
            self.kill()
        return failed

    def _last_error(self) -> str:
        """What MLIR or LLVM has printed, which Triton's exceptions leave out."""
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr.read().decode(errors="replace").splitlines()]
        errors = [line for line in lines if "error" in line.lower() or "LLVM" in line]
        return f": {errors[0][-400:]}" if errors else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stderr.close()


def _work(tasks: Sequence[tuple[Launch, str]], cache: str, connection: Connection, stderr: int) -> None:
    os.dup2(stderr, 2)
    os.environ["TRITON_CACHE_DIR"] = cache  # of this call only: nothing is left behind, and times are those of compiling
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has gone
        while True:
            launch, arch = tasks[connection.recv()]
            started_s = time.monotonic()
            try:
                result = compile_one(launch, arch)
            except Exception as error:  # every way in which a compilation can fail becomes a row of the table
                text = " ".join(str(error).split())
                result = Compiled(error=f"{type(error).__name__}: {text[-400:]}", seconds=time.monotonic() - started_s)
            connection.send(result)


def compile_one(launch: Launch, arch: str) -> Compiled:
    """In this process. Raises what Triton raises."""
    wave_size = ARCHITECTURES[arch].wave_size
    threads = launch.options.get("num_warps", 4) * wave_size  # 4: HIPOptions
    if threads > MAX_THREADS:
        return Compiled(
            error=f"num_warps={launch.options['num_warps']} makes a workgroup of {threads} threads, and {MAX_THREADS} are the most"
        )
    from triton import compile as triton_compile  # here: what runs the workers needs no Triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    started_s = time.monotonic()
    kernel = triton_compile(source, target=GPUTarget("hip", arch, wave_size), options=dict(launch.options))
    return Compiled(kernel.asm["amdgcn"], kernel.asm["ttgir"], kernel.metadata.shared, time.monotonic() - started_s)


def save(folder: Path, stem: str, compiled: Compiled) -> None:
    """`stem`.s and `stem`.ttgir: the assembly, and Triton's representation with its layouts."""
    (folder / f"{stem}.s").write_text(compiled.isa)
    (folder / f"{stem}.ttgir").write_text(compiled.ttgir)
