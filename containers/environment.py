"""Create .venv from hashed locks, with the build of torch that this machine needs (`make setup`).

This program needs only Python's standard library.

    python containers/environment.py [--torch cpu|rocm|cuda|image]

Exit codes: 0 done or already up to date, 2 an unknown build of torch, 3 the host has no venv module
or a package is unavailable, 75 interrupted (run the command again; downloads are reused).
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from containers import causes, install
from containers.install import CPU_INDEX, HASHED, PYCOSAT
from containers.pip_settings import pip_config, uv_settings
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, HostError, UserError

BUILDS = ("cpu", "rocm", "cuda", "image")  # image: the torch of the Python that runs this file
TORCH = "2.13.0"
ROCM = "rocm7.2"
ROCM_INDEX = "https://download.pytorch.org/whl/" + ROCM

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "containers" / "cpu"
VENV = ROOT / ".venv"
STAMP, LOG = "setup.json", "setup.log"
COMPILED = "compiled extras"
ADDED = ".sha256"  # suffix of the file that holds the hash of an installed add-on's lock
NO_COMPILER = (
    "pycosat is missing, which reasoning-gym's task zebra_puzzles needs. Install a C compiler and "
    "Python's headers (Debian: apt-get install gcc python3-dev), delete .venv, and run make setup"
)
FOR_IMAGES = (
    "torch's CPU build is enough here, because runs on AMD GPUs use images. Without docker: make "
    "setup-in-image in a container that has torch, or make setup TORCH=rocm"
)
# Releases of torch in the images that use the same locks (images.lock.yaml).
OLDEST, NEWEST = (2, 11), (2, 13)
OTHER_TORCH = "Use a container of another image, or a torch of our own: make setup TORCH=rocm"
WITHOUT_VLLM = (
    "vLLM cannot be imported, so GRPO generates with transformers (topology=single or ddp), and "
    "topology=split, method=serve and engine=vllm do not run"
)
WITHOUT_UV = "pip installs the other packages, which takes longer"


class Facts(NamedTuple):
    """The facts that determine the build of torch."""

    system: str  # platform.system(): Linux, Darwin, Windows
    amd_gpu: bool
    nvidia_driver: bool


class Step(NamedTuple):
    """A part of the installation. Its commands are tried in order until one succeeds."""

    title: str
    attempts: tuple[tuple[str, ...], ...]
    optional: bool = False
    remedy: str = ""  # printed if the step fails


# ---- What to install: pure functions


def choose_build(facts: Facts, requested: str | None) -> str:
    """Return one of BUILDS or macos. Raises UserError, HostError.

    The default for AMD GPUs is cpu, because their runs use the torch of an image.
    """
    if facts.system == "Darwin":
        if requested not in (None, "", "cpu"):
            raise UserError(
                f"TORCH={requested} does not exist for macOS. Run make setup without it"
            )
        return "macos"
    if facts.system != "Linux":
        raise HostError(f"{facts.system} is not supported. On Windows, use WSL 2 (wsl --install)")
    return requested or ("cuda" if facts.nvidia_driver else "cpu")


def lock_files(build: str) -> tuple[Path, ...]:
    """Return the locks that this build's environment is installed from."""
    torch = {"cpu": ["torch"], "rocm": [], "image": ["liger"]}
    names = ("uv", "tools", *torch.get(build, ["torch_pypi"]), "requirements", "compiled", "dev")
    return tuple(LOCKS / f"{name}.lock" for name in names)


def fingerprint(build: str, python: str, kept: str, locks: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(f"{build} {python} {kept} {ROCM}\n".encode())
    for lock in locks:
        digest.update(lock.name.encode() + lock.read_bytes())
    return digest.hexdigest()


def with_pip(python: Path, *options: str) -> tuple[str, ...]:
    """Return the argv of `pip install`.

    Compiling all 260 MB of source takes a minute, and a run imports only 74 MB, so leave
    bytecode to the first import. If PYTHONDONTWRITEBYTECODE forbids that, pip compiles everything.
    """
    bytecode = "--compile" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "--no-compile"
    pip = (str(python), *"-m pip install --disable-pip-version-check --no-input".split())
    return (*pip, bytecode, *options)


def with_uv(python: Path, *options: str) -> tuple[str, ...]:
    """Return the argv of `uv pip install`, which takes a tenth of pip's time."""
    bytecode = ("--compile-bytecode",) if os.environ.get("PYTHONDONTWRITEBYTECODE") else ()
    # Search all indexes, like pip. Hashes in the lock make this safe.
    uv = (str(python.with_name("uv")), *"pip install --index-strategy unsafe-best-match".split())
    return (*uv, "--python", str(python), *bytecode, *options)


def install_lock(python: Path, lock: Path) -> tuple[tuple[str, ...], ...]:
    """Return commands that install the lock's files: uv's, then pip's.

    uv is faster, but fails if an index does not answer or the cache is not writable.
    """
    return (
        with_uv(python, *HASHED, str(lock)),
        with_pip(python, "--use-pep517", *HASHED, str(lock)),
    )


def torch_step(python: Path, build: str, version: str) -> Step:
    if build == "cpu":
        # First try pip's configured index, because a machine without internet access has its wheels
        # there. With pip's default retries, an unreachable index costs half a minute.
        uv, pip = install_lock(python, LOCKS / "torch.lock")
        index = (*pip, "--retries", "1", "--extra-index-url", CPU_INDEX)
        attempts = (uv, (*uv, "--index", CPU_INDEX), pip, index)
        tag = "cp" + "".join(version.split(".")[:2])
        wheel = f"torch-{TORCH}+cpu-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl"
        remedy = (
            f"{wheel} is neither at pip's configured indexes (`pip config list`) nor at "
            f"{CPU_INDEX}. Use a network that reaches that index, PIP_FIND_LINKS=<folder with the "
            "wheel>, another Python (`make setup PYTHON=python3.11`) or, on a machine with a GPU, "
            "`make setup TORCH=rocm|cuda`"
        )
        return Step(f"torch {TORCH}, CPU build", attempts, remedy=remedy)
    if build == "rocm":
        # No public source states the hashes of PyTorch's ROCm wheels.
        argv = with_pip(python, "--index-url", ROCM_INDEX, f"torch=={TORCH}+{ROCM}")
        return Step(f"torch {TORCH}, {ROCM} build (unverified: no hash)", (argv,))
    kind = " for macOS" if build == "macos" else ", CUDA build (several GB)"
    return Step(f"torch {TORCH}{kind}", install_lock(python, LOCKS / "torch_pypi.lock"))


def plan(python: Path, build: str, version: str) -> tuple[Step, ...]:
    def locked(title: str, name: str, optional: bool = False, remedy: str = "") -> Step:
        return Step(title, install_lock(python, LOCKS / f"{name}.lock"), optional, remedy)

    uv = Step("uv", install_lock(python, LOCKS / "uv.lock")[1:], True, WITHOUT_UV)
    tools, stack = locked("build tools", "tools"), locked("training stack", "requirements")
    last = (locked("test tools", "dev"), locked(COMPILED, "compiled", True, NO_COMPILER))
    torch = torch_step(python, build, version)
    # Install torch first, because it may be unavailable. Install its ROCm build last, because it
    # also installs packages that are not in the lock.
    return (uv, tools, *((stack, torch) if build == "rocm" else (torch, stack)), *last)


# ---- The torch and vLLM of an image that this container was started from


def packages_of_image(venv: Path) -> dict[str, str]:
    """Return the versions of this Python's packages that must stay. Raises HostError."""
    kept = install.guarded(install.versions(install.package_folders(venv)))
    torch = kept.get("torch", "")
    release = tuple(map(int, re.findall(r"\d+", torch)[:2]))
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    if not torch:
        problem = "no torch. If another Python here has it: make setup-in-image PYTHON=<its path>"
    elif not OLDEST <= release <= NEWEST:
        problem = f"torch {torch}, but our locked packages support {oldest} to {newest}"
    else:
        return kept
    raise HostError(f"make setup-in-image: {sys.executable} has {problem}. {OTHER_TORCH}")


def install_in_image(venv: Path, kept: dict[str, str]) -> None:
    """Install the locked packages over those of this Python. Raises HostError."""
    python = venv_python(venv)
    names = ("tools", "requirements", *(["liger"] if "triton" in kept else []), "dev", "compiled")
    try:
        locks = [LOCKS / f"{name}.lock" for name in names]
        install.install(venv, with_pip(python), locks, os.environ)
    except install.InstallError as error:
        raise HostError(f"make setup-in-image: {error}\n{OTHER_TORCH}") from error
    # As in our images, this keeps a later `pip install` from replacing torch.
    constraint = f"[install]\nconstraint = {venv / 'constraints.txt'}\n"
    (venv / "pip.conf").write_text(constraint, encoding="utf-8")
    if subprocess.run([str(python), "-c", "import torch; from vllm import LLM"]).returncode:
        print(f"note: {WITHOUT_VLLM}")


# ---- Detection


def amd_gpu(
    kfd: Path = Path("/dev/kfd"), topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> bool:
    """Return whether a KFD node has SIMDs. A CPU's node has none."""
    if not kfd.exists():
        return False
    texts = [file.read_text() for file in topology.glob("*/properties")]
    return any(re.search(r"^simd_count [1-9]", text, re.MULTILINE) for text in texts)


def detect() -> Facts:
    nvidia = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    return Facts(platform.system(), amd_gpu(), nvidia)


def read_stamp(venv: Path) -> dict[str, str]:
    """Return the stamp of a finished setup, or {} if the stamp or the Python is missing."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and venv_python(venv).exists() else {}


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


# ---- Setup


class Progress:
    """Run steps, print their titles and times, and write their output to a log."""

    def __init__(self, log: Path, steps: int, python: Path) -> None:
        self.log, self.steps, self.python, self.done = log, steps, python, 0

    @functools.cached_property
    def uv_env(self) -> dict[str, str]:
        """Return environment variables that give uv the same settings as the venv's pip."""
        return {**uv_settings(pip_config(str(self.python))), **os.environ}

    def install(self, step: Step) -> bool:
        """Run a step and return whether it succeeded. Raises HostError if a required step fails."""
        self.done += 1
        started_s, status = time.monotonic(), 1
        print(f"[{self.done}/{self.steps}] {step.title} (output: {self.log})", flush=True)
        for argv in step.attempts:
            status = status and self.run(argv)
        remark = "" if not status else "  not installed" if step.optional else "  failed"
        print(f"      {time.monotonic() - started_s:.1f} s{remark}", flush=True)
        if status and not step.optional:
            log = self.log.read_text(errors="replace")
            last_lines, attempt = "\n".join(log.splitlines()[-8:]), log.rpartition("\n$ ")[2]
            disk = f"The disk of {self.log.parent} or of TMPDIR"
            full = causes.full_disk(attempt, disk, "Free space on it.")
            remedy = full or causes.wrong_proxy(attempt, os.environ) or step.remedy
            raise HostError(
                f"{step.title} could not be installed. The last lines of {self.log}:\n"
                f"{last_lines}\n{remedy}"
            )
        return not status

    def run(self, argv: tuple[str, ...]) -> int:
        """Run a command and return its exit status."""
        env = self.uv_env if Path(argv[0]).name == "uv" else None
        with self.log.open("a") as log:
            print("$", *argv, file=log, flush=True)
            try:
                return subprocess.run(
                    argv, env=env, stdout=log, stderr=subprocess.STDOUT
                ).returncode
            except OSError as error:
                print(f"{error.filename}: {error.strerror}", file=log)
                return 127


def make_venv(venv: Path, base: str, clear: bool) -> None:
    argv = [base, "-m", "venv", *(["--clear"] if clear else []), str(venv)]
    if subprocess.run(argv, check=False).returncode:
        raise HostError(f"Python could not create {venv}. See its message above")


def install_steps(venv: Path, build: str, version: str) -> None:
    steps = plan(venv_python(venv), build, version)
    progress = Progress(venv / LOG, len(steps), venv_python(venv))
    progress.log.write_text("")
    for step in steps:
        if progress.install(step):
            continue
        if step.title == COMPILED:
            (install.site_of(venv) / "pycosat.py").write_text(PYCOSAT.format(NO_COMPILER))
        print(f"      note: {step.remedy}")


def setup(venv: Path, requested: str | None, python_named: bool) -> bool:
    """Make the environment; return False if it is already up to date.

    The build and the Python of an earlier setup are reused unless the user asks for others.
    """
    stamp, facts = read_stamp(venv), detect()
    requested = requested or stamp.get("torch_asked", "")
    build = choose_build(facts, requested)
    kept = packages_of_image(venv) if build == "image" else {}
    torch = kept.get("torch", TORCH)
    if stamp and not python_named and not kept:
        base, version = venv_python(venv).resolve(), stamp["python"]
    else:  # resolve the link, because .venv's own python cannot replace itself
        base, version = Path(sys.executable).resolve(), platform.python_version()
    target = fingerprint(build, version, str(kept or TORCH), lock_files(build))
    if stamp.get("fingerprint") == target:
        return False
    print(f"Environment in {venv.name}: Python {version}, torch {torch} ({build})", flush=True)
    if build == "rocm":
        print("  note: this wheel supports only recent AMD GPUs. For others, use runtime=docker")
    if build == "cpu" and facts.amd_gpu and not requested:
        print(f"  note: {FOR_IMAGES}")
    # Clear only environments that this program made. They may have half-installed packages.
    clear = bool(stamp) or (venv / LOG).exists()
    added = sorted(venv.glob(f"*{ADDED}"))
    for file in (venv / STAMP, *added):
        file.unlink(missing_ok=True)
    if clear and (venv / "lib").is_dir():
        shutil.rmtree(venv / "lib")  # keep the log, which marks the environment as ours
    make_venv(venv, str(base), clear)
    (venv / LOG).touch()
    if kept:
        install_in_image(venv, kept)
    else:
        install_steps(venv, build, version)
    content = {"fingerprint": target, "python": version, "torch": build, "torch_asked": requested}
    (venv / STAMP).write_text(json.dumps(content) + "\n")
    for file in added:
        print(
            f"note: {file.stem} was removed with the old environment. To add it again: "
            f"make {file.stem}"
        )
    return True


def finish(work: Callable[[], bool]) -> int:
    """Run `work`, print its error or time, and return the exit code. False means no changes."""
    started_s = time.monotonic()
    try:
        if work():
            print(f"Ready in {time.monotonic() - started_s:.0f} s: .venv")
    except (UserError, HostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again (downloads are reused)", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Create .venv from hashed locks.")
    parser.add_argument(
        "--torch", choices=BUILDS, help="default: TORCH, or the build for this machine's GPU"
    )
    arguments = ["--torch", os.environ["TORCH"]] if os.environ.get("TORCH") else []
    requested = parser.parse_args([*arguments, *argv]).torch
    return finish(lambda: setup(VENV, requested, bool(os.environ.get("PYTHON"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
