"""Run untrusted code, one job at a time, as the first process of a sandbox container.

    python server.py TIME_S MEMORY_BYTES OUTPUT_BYTES DISK_BYTES

Each line of stdin is a job, {"language", "code", "tests"}. Each line of stdout is a job's verdict,
{"passed", "total", "error"}. A test is {"call", "expected"} or {"check"} (Python), or {"stdin",
"stdout"}. The code never sees the expected value or the check. `error` is set if the code was
stopped (time, memory, processes, output, a signal), but not if an answer is wrong.

The code cannot send signals to this process, because the kernel protects PID 1. The code can
neither trace this process nor open its files, because it is not dumpable. After each test, this
process kills all others and empties /tmp, so that jobs cannot affect each other. The caller
replaces a sandbox whose server has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PR_SET_DUMPABLE = 4  # linux/prctl.h
IOPRIO_WHO_PROCESS = 1  # linux/ioprio.h
SCHED_ATTR_SIZE = 56  # linux/sched/types.h
# Numbers of system calls without a function in Python: those of x86-64, or asm-generic/unistd.h.
SCHED_GETATTR, IOPRIO_GET = (315, 252) if os.uname().machine == "x86_64" else (275, 31)
LIBC = ctypes.CDLL(None)
# Kernel counts of how often a limit of the container was reached: (file, key) in cgroup v2 and v1.
COUNTS = {
    "processes": (("pids.events", "max"), ("pids/pids.events", "max")),
    "memory": (("memory.events", "oom_kill"), ("memory/memory.oom_control", "oom_kill")),
}
TMP = Path("/tmp")
PROGRAM = TMP / "program"
JUDGE = Path(__file__).with_name("judge.py")
POLL_S = 0.002
NUM_FILES = 256  # limit of open files
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
PYTHON = [sys.executable, "-I", "-S"]  # only the standard library
COMPILERS = {
    "c": ["gcc", "-O1", "-x", "c", "-o", str(PROGRAM), "program.c", "-lm"],
    "cpp": ["g++", "-O1", "-x", "c++", "-o", str(PROGRAM), "program.cpp"],
    "rust": ["rustc", "-O", "-o", str(PROGRAM), "program.rs"],
}
EMPTY = {
    "c": "int main(void) { return 0; }",
    "cpp": "int main() { return 0; }",
    "rust": "fn main() {}",
}
SHARE_OF_FURTHER_TEST = 0.1  # of the time limit; a test takes at least the start of a Python
MAX_TIME_FACTOR = 6.0  # so that code that hangs does not hold up a worker for long
FIRST_COMPILATION_S = 60.0  # workers compile at the same time, and the disk may be slow
# Program that makes a call. The code's own output goes to stderr, the value to stdout.
EVALUATE = """
import json, os, sys
job = json.load(sys.stdin)
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
space = {"__name__": "program"}
exec(compile(job["code"], "program.py", "exec"), space)
value = eval(job["call"], space)
json.dump({"value": value}, answer)
answer.flush()
"""


@dataclass(frozen=True)
class Limits:
    time_s: float  # of one job with one test; see job_time_s
    memory_bytes: int  # limit of the address space of one process
    output_bytes: int  # limit of a program's stdout and of each file
    disk_bytes: int  # the largest file that a compiler may write


class Stopped(Exception):
    """The code was stopped. The message is the reason."""


class Wrong(Exception):
    """The code gave a wrong answer or no answer."""


def main(arguments: list[str]) -> None:
    if os.getpid() != 1:
        sys.exit("server.py kills all other processes. Run it as PID 1 of a container.")
    limits = Limits(float(arguments[0]), *map(int, arguments[1:]))
    # PID 1 ignores signals without a handler, so remove Python's handler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    languages = ["python", *(name for name in COMPILERS if compiles(name, limits))]
    print(json.dumps({"languages": languages}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        verdict = judge(job, languages, limits)
        print(json.dumps({**verdict, "total": len(job["tests"])}), flush=True)


def judge(job: dict[str, Any], languages: list[str], limits: Limits) -> dict[str, Any]:
    if job["language"] not in languages:
        return {
            "passed": 0,
            "error": f"the sandbox has no {job['language']}, only {', '.join(languages)}",
        }
    limits = replace(limits, time_s=job_time_s(limits.time_s, len(job["tests"])))
    deadline, passed, error = time.monotonic() + limits.time_s, 0, None
    try:
        compiled = None
        if job["language"] != "python":
            compiled = build(job["language"], job["code"], deadline, limits)
        for test in job["tests"]:
            if time.monotonic() >= deadline:
                raise Stopped(f"it took longer than {limits.time_s:g} s")
            try:
                passed += passes(test, job["code"], compiled, deadline, limits)
            except Wrong:
                continue
            except Stopped as stop:
                error = error or str(stop)
            finally:
                empty_tmp()
    except Wrong:
        passed = 0  # the code does not compile
    except Stopped as stop:
        error = error or str(stop)
    return {"passed": passed, "error": error}


def job_time_s(time_s: float, num_tests: int) -> float:
    """Return the wall-clock limit of a job: compilation and all tests."""
    return time_s * min(1 + SHARE_OF_FURTHER_TEST * (num_tests - 1), MAX_TIME_FACTOR)


def compiles(language: str, limits: Limits) -> bool:
    """Return whether the compiler can build an empty program."""
    if shutil.which(COMPILERS[language][0], path=ENVIRONMENT["PATH"]) is None:
        return False
    try:
        build(language, EMPTY[language], time.monotonic() + FIRST_COMPILATION_S, limits)
    except (Wrong, Stopped):
        return False
    return True


def build(language: str, code: str, deadline: float, limits: Limits) -> bytes:
    """Return the compiled program. Raises Wrong, Stopped."""
    argv = COMPILERS[language]
    source = next(a for a in argv if a.startswith("program."))
    (TMP / source).write_text(code)
    try:
        run(argv, b"", deadline, limits, compiling=True)
        return PROGRAM.read_bytes()
    finally:
        empty_tmp()


def passes(
    test: dict[str, Any], code: str, compiled: bytes | None, deadline: float, limits: Limits
) -> bool:
    """Return whether the code passes a test. Raises Wrong, Stopped."""
    if "stdin" in test:
        if compiled is None:
            (TMP / "program.py").write_text(code)
            argv = [*PYTHON, str(TMP / "program.py")]
        else:
            PROGRAM.write_bytes(compiled)
            PROGRAM.chmod(0o700)
            argv = [str(PROGRAM)]
        output = run(argv, test["stdin"].encode(), deadline, limits)
        return lines(output.decode(errors="replace")) == lines(test["stdout"])
    if compiled is not None:
        raise Wrong("a test that calls Python")
    question = {"code": code} | {key: test[key] for key in ("call", "check") if key in test}
    argv = [*PYTHON, *([str(JUDGE)] if "check" in test else ["-c", EVALUATE])]
    output = run(argv, json.dumps(question).encode(), deadline, limits)
    try:
        value = json.loads(output)["value"]
        return "check" in test or same(value, test["expected"])
    # the code ended early or wrote to stdout
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Wrong(str(error)) from error


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(actual: Any, expected: Any) -> bool:
    """Return whether JSON values are equal. Floats may differ in the last digits."""
    if isinstance(expected, float) or isinstance(actual, float):
        numbers = all(
            isinstance(v, (int, float)) and not isinstance(v, bool) for v in (actual, expected)
        )
        return numbers and math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12)
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same(actual[key], expected[key]) for key in expected
        )
    return bool(actual == expected)


def run(
    argv: list[str], stdin: bytes, deadline: float, limits: Limits, compiling: bool = False
) -> bytes:
    """Run a program, kill its processes, and return its stdout.

    Raises Stopped if a limit or a signal stopped it, and Wrong if it fails.
    """
    size = limits.disk_bytes if compiling else limits.output_bytes
    # Use files in memory, because RLIMIT_FSIZE limits them, and nobody has to read them meanwhile.
    source, output, errors = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
    counts, settings_before = limit_counts(), own_settings()
    try:
        os.write(source, stdin)
        os.lseek(source, 0, os.SEEK_SET)

        def limit() -> None:
            LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root would own its /proc files
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # out of memory, kill this process first
            if not compiling:
                resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        process = subprocess.Popen(
            argv,
            stdin=source,
            stdout=output,
            stderr=errors,
            cwd=TMP,
            env=ENVIRONMENT,
            preexec_fn=limit,
        )
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        code = process.returncode
        kill_all()
        if own_settings() != settings_before:
            sys.exit("the code changed limits or scheduling that later jobs would inherit")
        # kill_all has already waited for the process
        process.returncode = -signal.SIGKILL if code is None else code
        full = any(os.fstat(file).st_size >= size for file in (output, errors))
        stderr = os.pread(errors, limits.output_bytes, 0)
        reason = reason_for_stop(code, counts, full, stderr, limits)
        if reason:
            raise Stopped(reason)
        if code != 0:
            raise Wrong(f"exit code {code}")
        return os.pread(output, size, 0)
    finally:
        for file in (source, output, errors):
            os.close(file)


def reason_for_stop(
    code: int | None, counts: dict[str, int], full: bool, stderr: bytes, limits: Limits
) -> str | None:
    """Return why a program was stopped, or None. `counts` are limit_counts() before it ran."""
    events = {name: count - counts[name] for name, count in limit_counts().items()}
    if events["processes"]:
        return "it started more processes than allowed"
    if events["memory"] or (code not in (0, None) and b"MemoryError" in stderr[-200:]):
        return "it used more memory than allowed"
    if full or code == -signal.SIGXFSZ:
        return f"it wrote more than {limits.output_bytes} bytes"
    if code is None:
        return f"it took longer than {limits.time_s:g} s"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else None


def own_settings() -> list[Any]:
    """Return resource limits and scheduling of this process.

    The code may change them, since it has the same user. Later jobs would inherit them, and this
    process lacks the capability to restore them.
    """
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    attributes = ctypes.create_string_buffer(SCHED_ATTR_SIZE)  # policy, nice, priority, clamps
    LIBC.syscall(SCHED_GETATTR, 0, attributes, SCHED_ATTR_SIZE, 0)
    io_priority = LIBC.syscall(IOPRIO_GET, IOPRIO_WHO_PROCESS, 0)
    return [limits, attributes.raw, io_priority, os.sched_getaffinity(0)]


def limit_counts() -> dict[str, int]:
    """Return how often each limit of the container was reached; 0 if the kernel does not count."""
    counts = dict.fromkeys(COUNTS, 0)
    for name, places in COUNTS.items():
        for file, key in ((Path("/sys/fs/cgroup", place), key) for place, key in places):
            rows = file.read_text().splitlines() if file.exists() else []
            counts[name] += sum(int(row.split()[1]) for row in rows if row.split()[0] == key)
    return counts


def kill_all() -> None:
    """Kill all other processes and wait for them. PID 1 is also the parent of orphans."""
    while True:
        with contextlib.suppress(ProcessLookupError):  # no other process
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def empty_tmp() -> None:
    """Empty /tmp. If that fails, an OSError ends this process, so that the caller replaces it."""
    for path in TMP.iterdir():
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
            for folder, inside, _ in os.walk(path):
                for name in inside:
                    if not os.path.islink(os.path.join(folder, name)):
                        os.chmod(os.path.join(folder, name), 0o700)
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
