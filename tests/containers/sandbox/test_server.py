"""Test the sandbox's server as PID 1 of Linux namespaces, without an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from containers.sandbox import server
from tests.conftest import ROOT

UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"),
    *("--mount-proc", "--ipc", "--net", "sh", "-ec"),
)
# The server empties /tmp, so give it its own. Its user has no capabilities, as in the container.
START = """
mount --bind "$1" /mnt
mount -t tmpfs tmpfs /tmp
cd /tmp
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all \\
    "$2" /mnt/server.py 60 200000000 8000 64000000
"""
GOOD = "def f(x): return x + 1"
CALL = {"call": "f(1)", "expected": 2}


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    if not shutil.which("setpriv") or subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("no unprivileged namespaces")


def judged(*jobs: tuple[str, list]) -> tuple[list[tuple[int, str | None]], int]:
    """Return (passed, error) of each answered job, and the server's exit code."""
    lines = [json.dumps({"language": "python", "code": c, "tests": t}) + "\n" for c, t in jobs]
    folder, python = ROOT / "containers/sandbox", os.path.realpath(sys.executable)
    done = subprocess.run(
        [*UNSHARE, START, "sh", folder, python],
        input="".join(lines),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    _, *verdicts = map(json.loads, done.stdout.splitlines())
    return [(v["passed"], v["error"]) for v in verdicts], done.returncode


@pytest.mark.parametrize("change", [
    "os.setpriority(os.PRIO_PROCESS, 1, 15)",
    "os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))",
    "os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})",
])  # fmt: skip
def test_server_ends_if_code_changed_what_later_jobs_inherit(change):
    if "affinity" in change and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core")
    assert judged((f"import os\n{change}\n{GOOD}", [CALL]), (GOOD, [CALL])) == ([], 1)


EQUALS = """
class Equal(int):
    __eq__ = __lt__ = __contains__ = lambda self, other: True
    __sub__ = __abs__ = lambda self, *other: 0
    __hash__ = int.__hash__
def f(x): return Equal()
def g(x): return [Equal()]
"""
IS_2 = "assert f(1) == 2"
# Code that does not solve its check: (code, check).
FAKES = {
    "equals": (EQUALS, IS_2),
    "equals, nested": (EQUALS, "assert g(1) == [2]"),
    "equals, in a function": (EQUALS, "def check(c):\n    assert c(1) in (2, 3)\ncheck(f)"),
    "differs by 0": (EQUALS, "assert abs(f(1) - 2) < 0.1"),
    "mock.ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", IS_2),
    "replaced builtin": ("abs = lambda v: 0\ndef f(x): return 9", "assert abs(f(1) - 2) < 0.1"),
    "replaced module": (
        "class math: isclose = lambda *values: True\ndef f(x): return 9",
        "assert math.isclose(f(1), 2)",
    ),
    "caught exit": (
        "import os\ndef f(x): os._exit(0)",
        "try: f(1)\nexcept BaseException: pass",
    ),
    "verdict": ("import os\nos.write(1, b'{\"value\": null}')\nos._exit(0)", IS_2),
    "the judge's file": (
        "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'w').write('{\"value\": null}')",
        IS_2,
    ),
    "namespace of the check": (
        "def f(g): g.__globals__['h'] = lambda: 2\ndef h(): return 3",
        "f(lambda: 1)\nassert h() == 2",
    ),
}


def test_code_cannot_fake_a_check():
    verdicts, _ = judged(*((code, [{"check": check}]) for code, check in FAKES.values()))
    passed = [name for name, (passed, _) in zip(FAKES, verdicts, strict=True) if passed]
    assert passed == []


SOLVES = """
import collections, dataclasses, enum
def f(x): return x + 1
def sort(a): a.sort()
def apply(g, x): return g(x)
def gen(n): yield from range(n)
class Bad(KeyError): pass
class Worse(Bad): pass
def bad(): raise Worse("k")
class Stack:
    def __init__(self): self.a = []
    def push(self, v): self.a.append(v)
    def __len__(self): return len(self.a)
    def __getitem__(self, i): return self.a[i]
@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return Point(self.x * k, self.y * k)
Pair = collections.namedtuple("Pair", "a b")
Level = enum.IntEnum("Level", "LOW")
def count(s): return collections.Counter(s)
"""
SOLVED = """
import math
assert f(1) == 2 and f(-1) in (0,) and not f(1) == 3, "message"
assert math.isclose(f(0.1), 1.1) and f(1 << 20000) == (1 << 20000) + 1 and f(1j) == 1 + 1j
a = [3, 1]
sort(a)
assert a == [1, 3]
assert apply(lambda v: v * 2, 4) == 8 and apply(max, [1, 4]) == 4
assert list(gen(3)) == [0, 1, 2] and 2 in gen(4)
for error in (Worse, Bad, KeyError):
    try: bad()
    except error as caught: assert caught.args == ("k",)
    else: assert False
s = Stack()
s.push([1])
assert len(s) == 1 and s[0] == [1] == s.a[0] and isinstance(s, Stack)
assert Point(1, 2) + Point(1, 1) == Point(2, 3) != Point(1, 2) and Point(1, 2).y == 2
assert Point(1, 2) * 2 == Point(2, 4) and str(Point(1, 2)) == "Point(x=1, y=2)"
assert Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1 and Level.LOW == 1
assert count("aab") == {"a": 2, "b": 1} and count("aab").most_common(1) == [("a", 2)]
"""


def test_correct_code_passes_a_check():
    tests = [{"check": check} for check in (SOLVED, SOLVED + "assert f(1) == 3", "f(")]
    assert judged((SOLVES, tests))[0] == [(1, None)]


@pytest.mark.parametrize(("num_tests", "limit"), [(1, 2.0), (11, 4.0), (51, 12.0), (999, 12.0)])
def test_time_limit_grows_with_the_number_of_tests(num_tests, limit):
    assert server.job_time_s(2.0, num_tests) == pytest.approx(limit)
