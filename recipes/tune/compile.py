"""Compile kernels for any GPU, each in a new process because LLVM aborts the process on errors."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import IO, TYPE_CHECKING

from recipes.tune.amdgpu import ARCHITECTURES, MAX_THREADS

if TYPE_CHECKING:
    from recipes.tune.kernels import Launch


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a kernel, or the `error`."""

    isa: str = ""
    ttgir: str = ""
    lds_bytes: int = 0  # allocated by Triton at launch
    seconds: float = 0.0
    dots: int = 0  # matrix products in the code, no matter how often they run
    error: str | None = None


def compile_all(
    tasks: Sequence[tuple[Launch, str]], jobs: int, timeout_s: float
) -> Iterator[tuple[int, Compiled]]:
    """Compile each (launch, architecture) in its own process, at most `jobs` in parallel.

    Yield the index of a task and its result as soon as it finishes.
    """
    with contextlib.suppress(ImportError):  # cache the hash of the installation for all forks
        from triton.runtime.cache import triton_key

        triton_key()
    # Fork, so that torch and Triton are imported only once and tasks need not be pickled. This is
    # safe because this process has only one thread.
    context, waiting = multiprocessing.get_context("fork"), deque(enumerate(tasks))
    running: dict[Connection, tuple[int, ForkProcess, IO[bytes], float]] = {}
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, task = waiting.popleft()
                    connection, child_end = context.Pipe(duplex=False)
                    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - _result closes it
                    arguments = (*task, cache, child_end, stderr.fileno())
                    process = context.Process(target=compile_in_child, args=arguments, daemon=True)
                    process.start()
                    child_end.close()
                    running[connection] = (index, process, stderr, time.monotonic() + timeout_s)
                next_deadline = min(deadline for *_, deadline in running.values())
                ready = wait(list(running), max(0.0, next_deadline - time.monotonic()))
                for connection, (index, process, stderr, deadline) in list(running.items()):
                    if connection in ready or time.monotonic() >= deadline:
                        del running[connection]
                        yield index, _result(connection, process, stderr, timeout_s)
        finally:
            for _, process, *_ in running.values():
                process.kill()
                process.join()


def _result(
    connection: Connection, process: ForkProcess, stderr: IO[bytes], timeout_s: float
) -> Compiled:
    """Return the result that a process sent. If it died or is late, kill it and return an error."""
    result, reason = None, f"still compiling after timeout_s={timeout_s:g}"
    with connection, stderr:
        try:
            result = connection.recv() if connection.poll() else None
        except EOFError:
            process.join()
            code = process.exitcode or 0
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"the compiler crashed ({reason})"
        process.kill()
        process.join()
        if result and not result.error:
            return result
        # MLIR and LLVM print the cause to stderr. Triton's exceptions do not contain it.
        stderr.seek(0)
        lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines()]
    errors = [line[-400:] for line in lines if "error" in line.lower() or "LLVM" in line]
    return Compiled(error=": ".join([result.error if result else reason, *errors[:1]]))


def compile_in_child(
    launch: Launch, arch: str, cache: str, connection: Connection, stderr: int
) -> None:
    os.dup2(stderr, 2)
    os.environ["TRITON_CACHE_DIR"] = cache  # an empty cache, so that times include compilation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends this process
    try:
        result = compile_one(launch, arch)
    except Exception as error:  # any failure becomes a row of the table
        result = Compiled(error=f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}")
    connection.send(result)


def compile_one(launch: Launch, arch: str) -> Compiled:
    """Compile a launch in this process and return the result. Triton's exceptions pass through."""
    wave_size = ARCHITECTURES[arch].wave_size
    threads = launch.options.get("num_warps", 4) * wave_size  # 4: HIPOptions
    if threads > MAX_THREADS:
        return Compiled(
            error=f"num_warps={launch.options['num_warps']}: {threads} threads per workgroup, but "
            f"the maximum is {MAX_THREADS}. Use num_warps={MAX_THREADS // wave_size}."
        )
    from triton import compile as triton_compile  # only child processes need these imports
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    started_s = time.monotonic()
    kernel = triton_compile(
        source, target=GPUTarget("hip", arch, wave_size), options=dict(launch.options)
    )
    seconds = time.monotonic() - started_s
    assembly, lds = kernel.asm, kernel.metadata.shared
    dots = len(re.findall(r"\btt\.dot", assembly["ttir"]))  # TTGIR copies them for each stage
    return Compiled(assembly["amdgcn"], assembly["ttgir"], lds, seconds, dots)
