"""`make setup`: the environment in .venv, from hashed locks, with the build of torch that this machine needs. add_ons.py adds to it.

Runs with nothing but Python's standard library, before anything is installed. Its annotations are quoted so that even a
Python as old as 3.6 can read the file as far as the message that says it is too old.

    python containers/environment.py [--torch cpu|rocm|cuda]

Exit codes: 0 done (or nothing to do), 2 the request is wrong (too old a Python, an unknown build of torch), 3 the host cannot
do it (no venv module, a package that cannot be had), 75 interrupted (run it again: pip keeps what it has downloaded).
"""

import argparse
import collections
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

OLDEST = (3, 11)
NEWER_PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
BUILDS = ("cpu", "rocm", "cuda")
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROCM = "rocm7.2"
ROCM_INDEX = "https://download.pytorch.org/whl/" + ROCM

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "containers" / "cpu"
VENV = ROOT / ".venv"
STAMP, LOG = "setup.json", "setup.log"
ADDED = ".sha256"  # of the lock of an add-on that is installed

# reasoning-gym imports pycosat for a single task, at its own import: without this module none of its tasks could be used.
STAND_IN = '''"""A stand-in that `make setup` wrote: pycosat could not be compiled on this machine."""


def _missing(*args, **kwargs):
    raise ImportError("pycosat is not built on this machine. Install a C compiler and Python's headers "
                      "(Debian: apt-get install gcc python3-dev), delete .venv and run make setup again")


solve = itersolve = _missing
'''


class Refused(Exception):
    """A message for the user, and the exit code that goes with it."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Facts(NamedTuple):
    """What decides which build of torch is right."""

    system: str  # platform.system(): Linux, Darwin, Windows
    amd_gpu: bool
    nvidia_driver: bool


class Step(NamedTuple):
    """One line of progress: the first argv that succeeds ends it."""

    title: str
    attempts: "tuple[tuple[str, ...], ...]"
    optional: bool = False


# ---- What to install: pure functions


def too_old(version: "tuple[int, ...]") -> "str | None":
    if version[:2] >= OLDEST:
        return None
    return (
        "Python {}.{} is too old: 3.11 or newer is needed. Name one with `make setup PYTHON=python3.11`, "
        "or install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv)".format(*version[:2])
    )


def choose_build(facts: Facts, asked: "str | None") -> str:
    """cpu, rocm, cuda or macos. Without a GPU it is always cpu: CUDA's gigabytes never come by accident."""
    if asked and asked not in BUILDS:
        raise Refused(f"TORCH={asked} is no build of torch. It is one of: {', '.join(BUILDS)}")
    if facts.system == "Darwin":
        if asked not in (None, "", "cpu"):
            raise Refused(f"TORCH={asked} does not exist for macOS. Leave it out: torch for macOS has the CPU and MPS")
        return "macos"
    if facts.system != "Linux":
        raise Refused(f"{facts.system} is not supported. On Windows use WSL 2 (wsl --install), and run this there", 3)
    if asked:
        return asked
    if facts.amd_gpu:
        return "rocm"
    return "cuda" if facts.nvidia_driver else "cpu"


def lock_files(build: str) -> "tuple[Path, ...]":
    """Everything that decides what is installed, for the stamp."""
    torch = {"cpu": ("torch",), "cuda": ("torch_pypi",), "macos": ("torch_pypi",), "rocm": ()}[build]
    return tuple(LOCKS / f"{name}.lock" for name in ("pip", "tools", *torch, "requirements", "compiled", "dev"))


def fingerprint(build: str, python: str, locks: "tuple[Path, ...]") -> str:
    digest = hashlib.sha256(f"{build} {python} {TORCH} {ROCM}\n".encode())
    for lock in locks:
        digest.update(lock.name.encode() + lock.read_bytes())
    return digest.hexdigest()


def pip_command(python: Path) -> "tuple[str, ...]":
    """Return the start of every `pip install`.

    Bytecode is left to the first import. pip would compile 260 MB of source in a minute of CPU time, and a run imports 74 MB.
    Where the shell forbids Python to write bytecode, every process would compile its imports again, so pip does it once.
    """
    bytecode = "--compile" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "--no-compile"
    return (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", bytecode)


def pip_install(python: Path, lock: Path, *options: str) -> "tuple[str, ...]":
    """Exactly the files whose hashes the lock states: no dependency that it does not name, no build tool from elsewhere."""
    hashed = ("--no-deps", "--require-hashes", "--no-build-isolation", "--use-pep517", "-r", str(lock))
    return (*pip_command(python), *options, *hashed)


def torch_step(python: Path, build: str) -> Step:
    if build == "cpu":
        lock = LOCKS / "torch.lock"
        # What pip is configured to know comes first: a machine without the internet has its wheels there.
        # One retry: an index that cannot be reached is asked several times over otherwise, for half a minute.
        attempts = (pip_install(python, lock), pip_install(python, lock, "--retries", "1", "--extra-index-url", CPU_INDEX))
        return Step(f"torch {TORCH}, CPU build", attempts)
    if build == "rocm":
        # PyTorch's ROCm wheels are large and change with the ROCm; no public source states their hashes.
        argv = (*pip_command(python), "--index-url", ROCM_INDEX, f"torch=={TORCH}+{ROCM}")
        return Step(f"torch {TORCH}, {ROCM} build (unverified: no hash)", (argv,))
    title = f"torch {TORCH} for macOS" if build == "macos" else f"torch {TORCH}, CUDA build (several GB)"
    return Step(title, (pip_install(python, LOCKS / "torch_pypi.lock"),))


def plan(python: Path, build: str) -> "tuple[Step, ...]":
    torch = torch_step(python, build)
    rest = Step("training stack", (pip_install(python, LOCKS / "requirements.lock"),))
    # torch first, because it is what may not be had; the ROCm build last, because it brings what the lock has not already.
    middle = (rest, torch) if build == "rocm" else (torch, rest)
    return (
        Step("pip", (pip_install(python, LOCKS / "pip.lock"),)),
        Step("build tools", (pip_install(python, LOCKS / "tools.lock"),)),
        *middle,
        Step("test tools", (pip_install(python, LOCKS / "dev.lock"),)),
        Step("compiled extras", (pip_install(python, LOCKS / "compiled.lock"),), optional=True),
    )


def torch_unavailable(python: str, machine: str) -> str:
    tag = "cp" + "".join(python.split(".")[:2])
    wheel = f"torch-{TORCH}+cpu-{tag}-{tag}-manylinux_2_28_{machine}.whl"
    return (
        f"torch's CPU build could not be had for Python {python} on {machine}: {wheel} is neither where pip is configured to look "
        f"(`pip config list`) nor could it be fetched from {CPU_INDEX}. Nothing else was installed in its place.\n"
        "What would work: a network that reaches that index; the wheel in a folder, named by PIP_FIND_LINKS=<folder>; "
        "another Python, `make setup PYTHON=python3.11`; or, for a machine with a GPU, `make setup TORCH=rocm|cuda`"
    )


# ---- What this machine is


def amd_gpu(kfd: Path = Path("/dev/kfd"), topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> bool:
    """A KFD node with SIMDs: /dev/kfd also exists where only a CPU is registered."""
    texts = [file.read_text() for file in topology.glob("*/properties")] if kfd.exists() else []
    return any(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("simd_count "))


def detect() -> Facts:
    nvidia = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    return Facts(platform.system(), amd_gpu(), nvidia)


def read_stamp(venv: Path) -> "dict[str, str]":
    """The stamp of a finished setup. Empty where there is none, or where the Python it was made with has gone."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and venv_python(venv).exists() else {}


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def newer_python() -> "str | None":
    return next((found for found in map(shutil.which, NEWER_PYTHONS) if found), None)


# ---- Doing it


class Progress:
    """One line for each step; on a terminal also the last line that pip printed. Everything goes to a log."""

    def __init__(self, log: Path, steps: int) -> None:
        self.log, self.steps, self.done = log, steps, 0
        self.terminal = sys.stdout.isatty()

    def begin(self, title: str) -> None:
        self.done += 1
        self.started_s = time.monotonic()
        print(f"[{self.done}/{self.steps}] {title}", flush=True)

    def line(self, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 7
            print(f"\r\033[K      {text.strip()[:width]}", end="", flush=True)

    def end(self, remark: str = "") -> None:
        print("\r\033[K" * self.terminal + f"      {time.monotonic() - self.started_s:.1f} s{remark}", flush=True)

    def run(self, argv: "tuple[str, ...]") -> "tuple[int, str]":
        """The exit status and the last lines, without what pip says of requirements for other machines."""
        last: collections.deque[str] = collections.deque(maxlen=8)
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        assert process.stdout is not None
        with self.log.open("a") as log, process:
            log.write("$ " + " ".join(argv) + "\n")
            for text in process.stdout:
                log.write(text)
                self.line(text)
                if not text.startswith(("Ignoring ", "WARNING: Location ")):
                    last.append(text)
        return process.returncode, "".join(last)


def run_step(step: Step, progress: Progress) -> bool:
    """Whether the step succeeded; a required one that did not is refused by whoever asked."""
    progress.begin(step.title)
    output = ""
    for argv in step.attempts:
        status, output = progress.run(argv)
        if status == 0:
            progress.end()
            return True
    progress.end("  failed" if not step.optional else "  not installed")
    if not step.optional:
        sys.stderr.write(output)
    return False


def make_venv(venv: Path, base: str, clear: bool) -> None:
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = "{}.{}".format(*sys.version_info[:2])
        raise Refused(f"This Python has no venv module. Install it (Debian, Ubuntu: apt-get install python{version}-venv)")
    argv = [base, "-m", "venv", *(["--clear"] if clear else []), str(venv)]
    if subprocess.run(argv, check=False).returncode:
        raise Refused(f"Python could not make the environment {venv}; what it says stands above", 3)


def stand_in(venv: Path) -> None:
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "pycosat.py").write_text(STAND_IN)
    print(
        "      note: pycosat has no wheel and could not be compiled. Only reasoning-gym's zebra_puzzles needs it; to have it:\n"
        "      apt-get install gcc python3-dev, delete .venv, make setup"
    )


def check_torch(venv: Path, build: str) -> None:
    """The installed build is the one that was meant, whatever pip is configured to prefer."""
    code = "import importlib.metadata as m; print(m.version('torch'), *[d.name for d in m.distributions() if d.name.startswith('nvidia-')])"
    version, *nvidia = subprocess.run([str(venv_python(venv)), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    wanted = {"cpu": f"{TORCH}+cpu", "rocm": f"{TORCH}+{ROCM}"}.get(build, TORCH)
    if version != wanted or (build == "cpu" and nvidia):
        found = " and ".join([f"torch {version}", *nvidia[:1]])
        raise Refused(f"{found} came where torch {wanted} was meant. Delete .venv and run make setup again", 3)


def install(venv: Path, build: str, version: str) -> None:
    steps = plan(venv_python(venv), build)
    progress = Progress(venv / LOG, len(steps))
    progress.log.write_text("")
    for step in steps:
        if run_step(step, progress):
            continue
        if step.optional:
            stand_in(venv)
        elif step.title.startswith("torch") and build == "cpu":
            raise Refused(torch_unavailable(version, platform.machine()), 3)
        else:
            raise Refused(f"{step.title}: pip failed, its last lines stand above. All of its output: {progress.log}", 3)
    check_torch(venv, build)


def base_python(venv: Path, stamp: "dict[str, str]", python_named: bool) -> "tuple[str, str]":
    """The Python to make the environment with and its version. One that was chosen earlier stays until another is named."""
    if stamp and not python_named:
        return str(venv_python(venv).resolve()), stamp["python"]
    # Resolved: inside an activated .venv, the environment's own python would have to replace itself.
    return str(Path(sys.executable).resolve()), platform.python_version()


def setup(venv: Path, asked: "str | None", python_named: bool) -> bool:
    """Whether anything had to be done. What an earlier setup was asked for (a Python, a build) stays unless asked anew."""
    stamp = read_stamp(venv)
    asked = asked or stamp.get("torch_asked", "")
    build = choose_build(detect(), asked)
    base, version = base_python(venv, stamp, python_named)
    target = fingerprint(build, version, lock_files(build))
    if stamp.get("fingerprint") == target:
        return False
    print(f"Environment in {venv.name}: Python {version}, torch {TORCH} ({build})", flush=True)
    if build == "rocm":
        print("  note: an AMD GPU is supported through images (runtime=docker), whose ROCm fits it; this wheel suits recent GPUs only")
    # What setup made itself is made afresh: packages of another lock, and half-installed ones, must not stay behind.
    clear = bool(stamp) or (venv / LOG).exists()
    added = sorted(venv.glob(f"*{ADDED}"))
    for file in (venv / STAMP, *added):
        file.unlink(missing_ok=True)
    if clear and (venv / "lib").is_dir():
        shutil.rmtree(venv / "lib")  # before the log: an interruption here leaves what says that the rest is no good
    make_venv(venv, base, clear)
    install(venv, build, version)
    (venv / STAMP).write_text(json.dumps({"fingerprint": target, "python": version, "torch": build, "torch_asked": asked}) + "\n")
    for file in added:
        print(f"note: what make {file.stem} had added went with the old environment. To have it again: make {file.stem}")
    return True


def main(argv: "list[str]") -> int:
    named = bool(os.environ.get("PYTHON"))
    old = too_old(tuple(sys.version_info[:3]))
    if old:
        found = None if named else newer_python()
        if found:
            os.execv(found, [found, __file__, *argv])
        print(f"error: {old}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(description="The environment in .venv, from hashed locks")
    parser.add_argument("--torch", default=os.environ.get("TORCH"), help="cpu, rocm or cuda; default: TORCH, or what this machine needs")
    asked = parser.parse_args(argv).torch
    return finish(lambda: setup(VENV, asked, named))


def finish(work: "Callable[[], bool]") -> int:
    """The exit code of `work`, which says whether anything had to be done."""
    started_s = time.monotonic()
    try:
        if work():
            print(f"Ready in {time.monotonic() - started_s:.0f} s: .venv")
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        print("\ninterrupted: run it again, pip keeps what it has downloaded", file=sys.stderr)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
