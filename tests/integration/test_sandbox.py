"""Test the sandbox with a real engine: hostile code, languages, and a run that uses it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from containers import build as builder
from containers import engine as engines
from containers import images
from containers.images import LABEL
from launch.execution import sandboxed
from launch.machine import detect
from launch.plan.planning import make_plan, prepare
from launch.schema.plan import Mount
from recipes.rewards.verify_code import CodeTests
from tests.conftest import command, composed
from tests.integration.conftest import build, inside, pushed, started, wait_until

pytestmark = pytest.mark.integration
CODE = """
hardware=cpu method=grpo data=code smoke=true ~method.rewards.reasoning_gym
+method.rewards.code_tests=1.0
""".split()
GOOD = "def f(x):\n    return x + 1"
TESTS = [{"call": "f(1)", "expected": 2}, {"call": "f(2)", "expected": 3}]
# Hostile code, its score, and its error.
FLOOD = "import sys\nwhile True: sys.stdout.write('x' * 1000)"
KILLS = """import contextlib, os
for pid in (1, os.getppid(), -1):
    with contextlib.suppress(ProcessLookupError): os.kill(pid, 9)
"""
STARVES = "import resource as r\nr.prlimit(1, r.RLIMIT_NOFILE, (0, 0))"
SLOWS = "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)\n"
REACHES = "import socket\nsocket.create_connection(('1.1.1.1', 53))\n"
LEAVES = """import os, time
os.makedirs('/tmp/a/b')
os.chmod('/tmp/a', 0)
if not os.fork():
    os.setsid()
    time.sleep(99)
"""
SHARES = "import ctypes\nassert ctypes.CDLL(None).shmget(0, 10**7, 0o1600) == -1\n"
ONE_HANG = "def f(x):\n    while x == 2: pass\n    return x + 1"
HOSTILE = {
    "hang": ("def f(x):\n    while True: pass", 0.0, "it took longer than 2.2 s"),
    "hang of one test": (ONE_HANG, 0.5, "it took longer than 2.2 s"),
    "fork": ("import os\nwhile True: os.fork()", 0.0, "it started more processes than allowed"),
    "flood": (FLOOD, 0.0, "it wrote more than 8000 bytes"),
    "memory": ("b = [bytearray(10**10)]", 0.0, "it used more memory than allowed"),
    "crash": ("import ctypes\nctypes.string_at(0)", 0.0, "killed by SIGSEGV"),
    "kills all that it may": (KILLS + GOOD, 1.0, None),
    "starves its parent": (STARVES, 0.0, sandboxed.EXITED_DURING_JOB),
    "slows later jobs": (SLOWS + GOOD, 0.0, sandboxed.EXITED_DURING_JOB),
    "ends early": ("import os\nos._exit(0)", 0.0, None),
    "looks into its parent": ("open('/proc/1/environ').read()\n" + GOOD, 0.0, None),
    "writes elsewhere": ("open('/opt/recipes/server.py', 'a')\n" + GOOD, 0.0, None),
    "reaches out": (REACHES + GOOD, 0.0, None),
    "leaves a process and closed folders": (LEAVES + GOOD, 1.0, None),
    "leaves shared memory": (SHARES + GOOD, 1.0, None),
    "is not Python": ("def f(x) return x", 0.0, None),
}
# Returns what code can see: users, processes, files, and networks.
INSIDE = """
import os
def f(x):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    numbers = [int(p) for p in os.listdir("/proc") if p.isdigit()]
    mounts = [line.split()[1] for line in open("/proc/mounts")]
    return {
        "user": os.getuid(),
        "capabilities": [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")],
        "no_new_privileges": status["NoNewPrivs"].strip(),
        "environment": sorted(os.environ),
        "processes": len(numbers),
        "files": os.listdir("/tmp"),
        "interfaces": os.listdir("/sys/class/net"),
        "sockets": [os.path.exists(p) for p in ("/var/run/docker.sock", "/run/docker.sock")],
        "writable": [
            m
            for m in mounts
            if os.path.isdir(m) and os.access(m, os.W_OK) and not m.startswith("/dev/")
        ],
    }
"""


def block(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"


@pytest.fixture(scope="module")
def sandbox_image(engine, base) -> Iterator[str]:
    done = build("image=sandbox", f"base={base}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is up to date" in build("image=sandbox", f"base={base}").stdout
    reference = images.load()["sandbox"].local_reference
    yield reference
    engine.images.remove(reference)


@contextlib.contextmanager
def running(
    engine, run_dir: Path, *overrides: str, mounts: tuple[Mount, ...] = ()
) -> Iterator[sandboxed.SandboxProcess]:
    """Run the sandbox like the launcher. `mounts` simulate an image with more files."""
    run_dir.mkdir(exist_ok=True)
    config, _ = prepare(composed(*CODE, "runtime=local", *overrides))
    host = detect.host(sys.executable)
    plan = make_plan(config, host, run_dir)
    confined = dataclasses.replace(plan.containers["sandbox"], mounts=list(mounts))
    plan = dataclasses.replace(plan, containers={"sandbox": confined})
    process = sandboxed.SandboxProcess(
        engine, plan, plan.processes[0], host, run_dir / "sandbox.log"
    )
    try:
        yield process
    finally:
        process.remove()
        assert containers(engine, run_dir) == []


def containers(engine, run_dir: Path) -> list:
    return engine.containers.list(
        all=True, filters={"label": f"{LABEL}.run={run_dir}"}, ignore_removed=True
    )


@pytest.fixture(scope="module")
def sandbox(
    engine, sandbox_image, tmp_path_factory
) -> Iterator[tuple[sandboxed.SandboxProcess, Callable]]:
    folder = tmp_path_factory.mktemp(
        "a-folder-whose-name-is-longer-than-the-path-of-a-socket-may-be" * 2
    )
    limits = [
        f"method.sandbox.{key}"
        for key in ("workers=1", "time_s=2", "memory_gb=0.2", "output_kb=8", "processes=16")
    ]
    with running(engine, folder / "run", *limits) as process:
        judge = CodeTests(folder / "run")

        def ask(blocks: list[str], tests: list, languages: list[str] | None) -> list:
            return judge([""] * len(blocks), blocks, {"tests": tests, "language": languages})

        yield process, ask


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_fails_alone(sandbox, name):
    process, ask = sandbox
    code, score, error = HOSTILE[name]
    assert ask([block(code), block(GOOD)], [TESTS] * 2, None) == [(score, error), (1.0, None)]
    assert process.poll() is None


def test_what_code_can_see(sandbox):
    expected = {
        "user": 65534,
        "capabilities": [0, 0, 0],
        "no_new_privileges": "1",
        "environment": ["HOME", "LANG", "PATH"],
        "processes": 2,
        "files": [],
        "interfaces": ["lo"],
        "sockets": [False, False],
        "writable": ["/tmp"],
    }
    assert sandbox[1]([block(INSIDE)], [[{"call": "f(0)", "expected": expected}]], None) == [
        (1.0, None)
    ]


def test_score_is_share_of_passed_tests(sandbox):
    tests = [*TESTS, {"check": "assert f(0) == 7"}, {"stdin": "", "stdout": "a line\n"}]
    program = block(GOOD + "\nprint('a line  ')")
    assert sandbox[1](
        [program, block("import sys\nprint(sys.stdin.read())")],
        [tests, [{"stdin": "4", "stdout": "4"}]],
        None,
    ) == [(0.75, None), (1.0, None)]


@pytest.mark.skipif(
    not all(map(shutil.which, ("gcc", "g++"))) or not Path("/usr/bin/rustc").exists(),
    reason="no gcc, g++ and rustc in /usr to mount into the sandbox",
)
def test_compile_languages_whose_compiler_exists(engine, sandbox_image, tmp_path):
    # The test's base has no compilers, so mount this machine's, which has the same distribution.
    # rustc links with /usr/bin/cc, a link into /etc/alternatives.
    mounts = tuple(
        Mount(folder, folder, True, "compilers") for folder in ("/usr", "/etc/alternatives")
    )
    c = '#include <stdio.h>\nint main() { int n; scanf("%d", &n); printf("%d\\n", n * 2); }'
    cpp = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * 2; }"
    rust = (
        "fn main() { let mut n = String::new(); std::io::stdin().read_line(&mut n).unwrap();"
        ' println!("{}", n.trim().parse::<i64>().unwrap() * 2); }'
    )
    blocks = [
        block(c, "c"),
        block(cpp, "cpp"),
        block(rust, "rust"),
        block("int main() { return }", "c"),
        block("fn main() {}", "swift"),
    ]
    tests = [{"stdin": "2", "stdout": "4"}, {"stdin": "5", "stdout": "10"}]
    with running(engine, tmp_path / "run", "method.sandbox.workers=1", mounts=mounts):
        answers = CodeTests(tmp_path / "run")(
            [""] * len(blocks), blocks, {"tests": [tests] * len(blocks)}
        )
    assert [score for score, _ in answers] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert answers[-1][1].startswith("the sandbox has no swift, only python, c, cpp, rust")


def test_a_pushed_image_is_pulled(engine, base, registry, monkeypatch):
    """Push another image with the name of the sandbox's."""
    repository = f"{registry}/sandbox"
    reference, entry = pushed(engine, base, repository), images.load()["sandbox"]
    digest = reference.partition("@")[2]
    entry = dataclasses.replace(entry, pushed=f"{repository}:{entry.tag}@{digest}")
    monkeypatch.setattr(images, "load", lambda: {"sandbox": entry})
    engine.images.remove(f"{repository}:1")
    assert engines.find(engine, reference) is None
    assert sandboxed.image_id(engine) == engine.images.get(base).id
    assert engines.find(engine, reference) is not None


def test_run_with_code_tests(engine, sandbox_image, tmp_path):
    done = command(
        *CODE, "runtime=local", "method.sandbox.workers=2", "run_root=runs", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = next(tmp_path.glob("runs/*/[0-9]*/record.json")).parent
    assert json.loads((run_dir / "result.json").read_text())["verifier_errors"] == 0
    assert json.loads((run_dir / "record.json").read_text())["sandbox_image"] == sandboxed.image_id(
        engine
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # Models with random weights do not write code.
    assert [row["rewards/code_tests/mean"] for row in rows] == [0.0, 0.0]
    assert rows[0]["verifier_error_share"] == 0.0
    assert (containers(engine, run_dir), list(run_dir.glob("*.sock"))) == ([], [])


def test_sandbox_ends_with_killed_launcher(engine, sandbox_image, tmp_path):
    overrides = ["runtime=local", "method.sandbox.workers=1", "method.args.max_steps=9999"]
    launcher = started(*CODE, *overrides, cwd=tmp_path)
    socket = wait_until(lambda: next(tmp_path.glob("runs/*/[0-9]*/sandbox.sock"), None), launcher)
    assert len(containers(engine, socket.parent)) == 1
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: containers(engine, socket.parent) == [])


def test_image_has_only_python(engine, sandbox_image, base):
    """Check that the image has no installers, no setuid programs and no network."""
    code = "import os; print(os.getuid(), os.getgid(), os.getgroups())"
    assert inside(engine, sandbox_image, "python", "-c", code) == "65534 65534 [65534]\n"
    modules = (
        "import importlib.util as u; print([m for m in ('pip', 'ensurepip', 'setuptools', 'wheel', "
        "'torch') if u.find_spec(m)])"
    )
    assert inside(engine, sandbox_image, "python", "-c", modules) == "[]\n"
    programs = (
        "command -v pip pip3 sudo; find / -xdev -perm /6000 -type f 2>/dev/null; ls /sys/class/net"
    )
    assert inside(engine, sandbox_image, "sh", "-c", programs) == "lo\n"
    probed = builder.probe(engine, sandbox_image)
    entry = images.load()["sandbox"]
    builder.compare(entry, probed)
    names = "import importlib.metadata as m; print(len(list(m.distributions())))"
    assert inside(engine, sandbox_image, "python", "-c", names) == "0\n"
