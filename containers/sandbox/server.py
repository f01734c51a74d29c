"""First process of a sandbox container: runs the code of one job at a time, which is as hostile as code can be.

    python server.py TIME_S MEMORY_BYTES OUTPUT_BYTES DISK_BYTES

Jobs come on stdin, one JSON object a line: {"language", "code", "tests"}; a verdict goes to stdout for each: {"passed", "total",
"error"}. `error` is set where code was cut off (time, memory, processes, output, a signal), not where its answer is wrong. A test is
{"call", "expected"} or {"check"} (Python), or {"stdin", "stdout"}. What a test expects stays in this process.

Its protection: it is process 1, which the kernel lets no signal from inside reach; it is not dumpable, so that nobody may trace it
or open its files; and after each test it kills every other process there is and empties /tmp, so that jobs meet nothing of each
other. Where it fails all the same it ends, and whoever started it starts another.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_DUMPABLE = 4  # linux/prctl.h
LIBC = ctypes.CDLL(None)
# Where the kernel counts how often a limit of the container was met, in control groups of version 2 or 1: count -> files and their key.
COUNTS = {
    "processes": (("pids.events", "max"), ("pids/pids.events", "max")),
    "memory": (("memory.events", "oom_kill"), ("memory/memory.oom_control", "oom_kill")),
}
TMP = Path("/tmp")
PROGRAM = TMP / "program"
POLL_S = 0.002
NUM_FILES = 256  # open at once
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
PYTHON = [sys.executable, "-I", "-S"]  # the standard library and nothing else
COMPILERS = {
    "c": ["gcc", "-O1", "-x", "c", "-o", str(PROGRAM), "program.c", "-lm"],
    "cpp": ["g++", "-O1", "-x", "c++", "-o", str(PROGRAM), "program.cpp"],
    "rust": ["rustc", "-O", "-o", str(PROGRAM), "program.rs"],
}
EMPTY = {"c": "int main(void) { return 0; }", "cpp": "int main() { return 0; }", "rust": "fn main() {}"}
FIRST_COMPILATION_S = 60.0  # of all workers at once, perhaps from a cold disk
# Runs a test of Python: the program's own output goes to stderr, the value alone to stdout.
EVALUATE = """
import json, os, sys
job = json.load(sys.stdin)
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
space = {"__name__": "program"}
exec(compile(job["code"], "program.py", "exec"), space)
value = eval(job["call"], space) if "call" in job else exec(job["check"], space)
json.dump({"value": value}, answer)
answer.flush()
"""


@dataclass(frozen=True)
class Limits:
    time_s: float  # of one job, all of its tests and the compiler together
    memory_bytes: int  # address space of one process; the container's own limit holds for all of them
    output_bytes: int  # what a program writes to stdout, and the largest file it may write
    disk_bytes: int  # the largest file that a compiler may write


class Cut(Exception):
    """Code was stopped, and why."""


class Wrong(Exception):
    """The answer is wrong, or there is none."""


def main(arguments: list[str]) -> None:
    if os.getpid() != 1:
        sys.exit("server.py kills every process that it can see: it runs as the first of a container only.")
    limits = Limits(float(arguments[0]), *map(int, arguments[1:]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of process 1: one without a handler does not arrive
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
        return {"passed": 0, "error": f"the sandbox has no {job['language']}, only {', '.join(languages)}"}
    deadline, passed, error = time.monotonic() + limits.time_s, 0, None
    try:
        compiled = None if job["language"] == "python" else build(job["language"], job["code"], deadline, limits)
        for test in job["tests"]:
            if time.monotonic() >= deadline:
                raise Cut(f"it took longer than {limits.time_s:g} s")
            try:
                passed += passes(test, job["code"], compiled, deadline, limits)
            except Wrong:
                continue
            except Cut as cut:
                error = error or str(cut)
            finally:
                empty_tmp()
    except Wrong:
        passed = 0  # it does not compile
    except Cut as cut:
        error = error or str(cut)
    return {"passed": passed, "error": error}


def compiles(language: str, limits: Limits) -> bool:
    """Whether its compiler is there and makes programs: one that finds no linker would make every answer a wrong one."""
    if shutil.which(COMPILERS[language][0], path=ENVIRONMENT["PATH"]) is None:
        return False
    try:
        build(language, EMPTY[language], time.monotonic() + FIRST_COMPILATION_S, limits)
    except (Wrong, Cut):
        return False
    return True


def build(language: str, code: str, deadline: float, limits: Limits) -> bytes:
    """The compiled program. Raises Wrong and Cut."""
    argv = COMPILERS[language]
    source = next(a for a in argv if a.startswith("program."))
    (TMP / source).write_text(code)
    try:
        run(argv, b"", deadline, limits, compiling=True)
        return PROGRAM.read_bytes()
    finally:
        empty_tmp()


def passes(test: dict[str, Any], code: str, compiled: bytes | None, deadline: float, limits: Limits) -> bool:
    """Raises Wrong and Cut."""
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
    asked: dict[str, Any] = {"code": code, **{key: test[key] for key in ("call", "check") if key in test}}
    output = run([*PYTHON, "-c", EVALUATE], json.dumps(asked).encode(), deadline, limits)
    try:
        value = json.loads(output)["value"]
        return "check" in test or same(value, test["expected"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:  # it ended early, or wrote something of its own
        raise Wrong(str(error)) from error


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(given: Any, expected: Any) -> bool:
    """As JSON has them: a tuple is a list, and floats may differ in the last digits."""
    if isinstance(expected, float) or isinstance(given, float):
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (given, expected))
        return numbers and math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12)
    if type(given) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    return bool(given == expected)


def run(argv: list[str], stdin: bytes, deadline: float, limits: Limits, compiling: bool = False) -> bytes:
    """What a program writes to stdout; afterwards no process of it is left. Raises Cut, and Wrong where it ends with an error."""
    size = limits.disk_bytes if compiling else limits.output_bytes
    # Files in memory: no pipe to drain while it runs, and the limit of a file's size is that of the output.
    given, output, errors = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
    before, own = counted(), own_limits()
    try:
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)

        def limit() -> None:
            LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its own files under /proc would be root's
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # where memory runs out it goes first, not process 1
            if not compiling:
                resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        process = subprocess.Popen(argv, stdin=given, stdout=output, stderr=errors, cwd=TMP, env=ENVIRONMENT, preexec_fn=limit)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        code = process.returncode
        kill_all()
        if own_limits() != own:
            sys.exit("code changed the limits of this process, which the next job would meet")
        process.returncode = -signal.SIGKILL if code is None else code  # it has been waited for
        said = os.pread(errors, limits.output_bytes, 0)
        reason = why_cut(code, before, os.fstat(output).st_size >= size or os.fstat(errors).st_size >= size, said, limits)
        if reason:
            raise Cut(reason)
        if code != 0:
            raise Wrong(f"exit code {code}")
        return os.pread(output, size, 0)
    finally:
        for file in (given, output, errors):
            os.close(file)


def why_cut(code: int | None, before: dict[str, int], full: bool, said: bytes, limits: Limits) -> str | None:
    events = {name: count - before[name] for name, count in counted().items()}
    if events["processes"]:
        return "it started more processes than it may"
    if events["memory"] or (code not in (0, None) and b"MemoryError" in said[-200:]):
        return "it took more memory than it may"
    if full or code == -signal.SIGXFSZ:
        return f"it wrote more than {limits.output_bytes} bytes"
    if code is None:
        return f"it took longer than {limits.time_s:g} s"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else None


def own_limits() -> list[tuple[int, int]]:
    """Of this process; any other of the same user may lower them."""
    return [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


def counted() -> dict[str, int]:
    """How often each limit has been met so far; 0 where the kernel does not say."""
    found = dict.fromkeys(COUNTS, 0)
    for name, places in COUNTS.items():
        for file, key in ((Path("/sys/fs/cgroup", place), key) for place, key in places):
            rows = file.read_text().splitlines() if file.exists() else []
            found[name] += sum(int(row.split()[1]) for row in rows if row.split()[0] == key)
    return found


def kill_all() -> None:
    """Every other process: as the first one, of this user, it sees all that there are, orphans among them."""
    while True:
        with contextlib.suppress(ProcessLookupError):  # there is none
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def empty_tmp() -> None:
    """Raises OSError where something cannot be removed, and this process ends."""
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
