"""Create .venv from hashed locks, with the build of torch that this machine needs (`make setup`).

This program needs only Python's standard library.

    python containers/environment.py [--torch cpu|rocm|cuda|image]
    .venv/bin/python containers/environment.py --add vllm|quantization|kernels|gguf|lm-eval

Exit codes: 0 done or already up to date, 2 an unknown build of torch, 3 the host has no venv module
or a package is unavailable, 75 interrupted (run the command again; downloads are reused).
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from containers import install
from containers.install import CPU_INDEX, PYCOSAT, PackagesError
from containers.pip_settings import pip_options, uv_settings
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, HostError, UserError

BUILDS = ("cpu", "rocm", "cuda", "image")  # image: the torch of the Python that runs this file
TORCH = "2.13.0"
ROCM = "rocm7.2"
ROCM_INDEX = "https://download.pytorch.org/whl/" + ROCM
# Releases of torch in the images that use the same locks (images.lock.yaml).
OLDEST, NEWEST = (2, 11), (2, 13)
# Add-on (a target of make and a lock) -> builds of torch that it works with. `make setup` omits
# quantization, because every rank would import it, which takes two seconds. kernels does not
# support torch's ROCm build, because its Triton would overwrite the one of that build.
ADD_ONS = {
    "vllm": ("cpu",),  # the lock has files only for x86_64
    "quantization": (*BUILDS, "macos"),
    "kernels": ("cpu", "cuda"),
    "gguf": (*BUILDS, "macos"),
    "lm-eval": (*BUILDS, "macos"),
}

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "containers" / "cpu"
VENV = ROOT / ".venv"
STAMP, LOG = "setup.json", "setup.log"
ADDED = ".sha256"  # suffix of the file that holds the hash of an installed add-on's lock
NO_COMPILER = (
    "pycosat is missing, which reasoning-gym's task zebra_puzzles needs. Install a C compiler and "
    "Python's headers (Debian: apt-get install gcc python3-dev), delete .venv, and run make setup"
)
FOR_IMAGES = (
    "torch's CPU build is enough here, because runs on AMD GPUs use images. Without docker: make "
    "setup-in-image in a container that has torch, or make setup TORCH=rocm"
)
REMEDY = (
    f"The output is in .venv/{LOG}. torch's CPU build is on {CPU_INDEX}; for another build: make "
    "setup TORCH=cpu|rocm|cuda, make setup-in-image. pip writes to the disks of .venv and TMPDIR"
)


# ---- What to install


def choose_build(system: str, has_nvidia: bool, requested: str | None) -> str:
    """Return one of BUILDS or macos. Raises UserError, HostError.

    The default for AMD GPUs is cpu, because their runs use the torch of an image.
    """
    if system not in ("Linux", "Darwin"):
        raise HostError(f"{system} is not supported. On Windows, use WSL 2 (wsl --install)")
    if system == "Linux":
        return requested or ("cuda" if has_nvidia else "cpu")
    if requested not in (None, "", "cpu"):
        raise UserError(f"TORCH={requested} does not exist for macOS. Run make setup without it")
    return "macos"


def lock_files(build: str, kept: Container[str] = ()) -> list[Path]:
    """Return the locks of this build's environment in the order of installation.

    torch comes early, because it may be unavailable.
    """
    torch = {"cpu": ["torch"], "rocm": [], "image": []}.get(build, ["torch_pypi"])
    liger = ["liger"] if build == "image" and "triton" in kept else []
    names = ("uv", "tools", *torch, "requirements", *liger, "dev", "compiled")
    return [LOCKS / f"{name}.lock" for name in names]


def fingerprint(build: str, python: str, kept: str, locks: list[Path]) -> str:
    digest = hashlib.sha256(f"{build} {python} {kept} {ROCM}\n".encode())
    for lock in locks:
        digest.update(lock.name.encode() + lock.read_bytes())
    return digest.hexdigest()


def packages_of_image(venv: Path) -> dict[str, str]:
    """Return the versions of this Python's packages that must stay. Raises HostError."""
    kept = install.guarded(install.versions(install.package_folders(venv)))
    torch = kept.get("torch", "")
    if OLDEST <= tuple(map(int, re.findall(r"\d+", torch)[:2])) <= NEWEST:
        return kept
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    raise HostError(
        f"make setup-in-image: {sys.executable} has torch {torch or 'not installed'}, but our "
        f"locked packages support {oldest} to {newest}. If another Python here has it: make "
        "setup-in-image PYTHON=<its path>. Or use a container of another image, or a torch of our "
        "own: make setup TORCH=rocm"
    )


# ---- Installing


def installers(python: Path) -> list[tuple[str, ...]]:
    """Return the commands of uv, if it is installed, and of pip.

    uv takes a tenth of pip's time, but fails if an index does not answer. Compiling all 260 MB of
    source takes a minute, and a run imports only 74 MB, so leave bytecode to the first import. If
    PYTHONDONTWRITEBYTECODE forbids that, compile everything.
    """
    compiles = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    pip = f"{python} -m pip install --disable-pip-version-check --no-input --use-pep517".split()
    pip += ["--progress-bar=off", "--compile" if compiles else "--no-compile"]
    program = python.with_name("uv")
    # Search all indexes, like pip. Hashes in the lock make this safe.
    uv = f"{program} pip install --index-strategy unsafe-best-match --python {python}".split()
    uv += ["--compile-bytecode"] * compiles
    return [tuple(uv), tuple(pip)] if program.exists() else [tuple(pip)]


def install_all(venv: Path, locks: list[Path], kept: Container[str] = ()) -> None:
    """Install the locks in this order. Raises PackagesError."""
    python, log = venv_python(venv), venv / LOG
    env = {**uv_settings(pip_options(str(python))), **os.environ}
    for number, lock in enumerate(locks, 1):
        started_s = time.monotonic()
        print(f"[{number}/{len(locks)}] {lock.stem} (output: {log})", flush=True)
        with log.open("a") as file, contextlib.redirect_stdout(file):
            installed = install.install_lock(installers(python), lock, kept, env)
        remark = "" if installed else "  not installed"
        print(f"      {time.monotonic() - started_s:.1f} s{remark}", flush=True)


def fill(venv: Path, build: str, kept: Container[str]) -> None:
    """Install everything in a new environment. Raises PackagesError."""
    install_all(venv, lock_files(build, kept), kept)
    if build == "image":
        install.join(venv, install.package_folders(venv))
        # As in our images, this keeps a later `pip install` from replacing torch.
        constraint = f"[install]\nconstraint = {venv / 'constraints.txt'}\n"
        (venv / "pip.conf").write_text(constraint, encoding="utf-8")
    site = install.site_of(venv)
    if "pycosat" not in install.versions([str(site)]):
        (site / "pycosat.py").write_text(PYCOSAT.format(NO_COMPILER))
        print(f"      note: {NO_COMPILER}")
    if build == "rocm":  # last, because it also installs packages that are not in the lock
        # Unverified, because no public source states the hash of PyTorch's ROCm wheel.
        wheel = f"torch=={TORCH}+{ROCM}"
        pip = installers(venv_python(venv))[-1]
        status, output = install.run((*pip, "--index-url", ROCM_INDEX, wheel))
        if status:
            raise install.failure(wheel, output)


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def read_stamp(venv: Path) -> dict[str, str]:
    """Return the stamp of a finished setup, or {} if the stamp or the Python is missing."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and venv_python(venv).exists() else {}


def make_venv(venv: Path, base: str, clear: bool) -> None:
    argv = [base, "-m", "venv", *(["--clear"] if clear else []), str(venv)]
    if subprocess.run(argv, check=False).returncode:
        raise HostError(f"Python could not create {venv}. See its message above")


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def setup(venv: Path, requested: str | None, python_named: bool) -> bool:
    """Make the environment; return False if it is already up to date.

    The build and the Python of an earlier setup are reused unless the user asks for others.
    """
    stamp = read_stamp(venv)
    requested = requested or stamp.get("torch_asked", "")
    build = choose_build(platform.system(), has_nvidia_driver(), requested)
    kept = packages_of_image(venv) if build == "image" else {}
    if stamp and not python_named and not kept:
        base, version = venv_python(venv).resolve(), stamp["python"]
    else:  # resolve the link, because .venv's own python cannot replace itself
        base, version = Path(sys.executable).resolve(), platform.python_version()
    target = fingerprint(build, version, str(kept or TORCH), lock_files(build, kept))
    if stamp.get("fingerprint") == target:
        return False
    torch = kept.get("torch", TORCH)
    print(f"Environment in {venv.name}: Python {version}, torch {torch} ({build})", flush=True)
    if build == "rocm":
        print("  note: this wheel supports only recent AMD GPUs. For others, use runtime=docker")
    if build == "cpu" and Path("/dev/kfd").exists() and not requested:
        print(f"  note: {FOR_IMAGES}")
    # Clear only environments that this program made. They may have half-installed packages.
    clear = bool(stamp) or (venv / LOG).exists()
    added = sorted(venv.glob(f"*{ADDED}"))
    for file in (venv / STAMP, *added):
        file.unlink(missing_ok=True)
    if clear and (venv / "lib").is_dir():
        shutil.rmtree(venv / "lib")  # keep the log, which marks the environment as ours
    make_venv(venv, str(base), clear)
    (venv / LOG).write_text("")
    fill(venv, build, kept)
    content = {"fingerprint": target, "python": version, "torch": build, "torch_asked": requested}
    (venv / STAMP).write_text(json.dumps(content) + "\n")
    for name in (file.stem for file in added):
        print(f"note: {name} was removed with the old environment. To add it again: make {name}")
    return True


def add(venv: Path, name: str) -> bool:
    """Add the packages of an add-on, without changing others; return False if it has them."""
    build = read_stamp(venv).get("torch")
    if build is None:
        raise UserError(f"make {name}: .venv does not exist. Run make setup first")
    machine = " on x86_64" if name == "vllm" else ""
    if build not in ADD_ONS[name] or machine not in ("", f" on {platform.machine()}"):
        raise HostError(
            f"make {name} needs torch's build for {' or '.join(ADD_ONS[name])}{machine}, but .venv "
            f"has the build for {build} on {platform.machine()}. Run make setup TORCH=cpu, then "
            f"make {name}"
        )
    lock, stamp = LOCKS / f"{name}.lock", venv / f"{name}{ADDED}"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return False
    install_all(venv, [lock])
    stamp.write_text(digest)
    return True


# ---- The command


def finish(work: Callable[[], bool]) -> int:
    """Run `work`, print its error or time, and return the exit code. False means no changes."""
    started_s = time.monotonic()
    try:
        if work():
            print(f"Ready in {time.monotonic() - started_s:.0f} s: .venv")
        return EXIT_DONE
    except (UserError, HostError) as error:
        message, code = f"error: {error}", error.exit_code
    except PackagesError as error:
        message, code = f"error: {error}\n{REMEDY}", 3
    except KeyboardInterrupt:
        message = "\ninterrupted; run the same command again (downloads are reused)"
        code = EXIT_INTERRUPTED
    print(message, file=sys.stderr)
    return code


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Create .venv from hashed locks.")
    parser.add_argument(
        "--torch", choices=BUILDS, help="default: TORCH, or the build for this machine's GPU"
    )
    parser.add_argument("--add", choices=ADD_ONS, help="add packages to .venv")
    arguments = ["--torch", os.environ["TORCH"]] if os.environ.get("TORCH") else []
    options = parser.parse_args([*arguments, *argv])
    if options.add:
        return finish(lambda: add(VENV, options.add))
    return finish(lambda: setup(VENV, options.torch, bool(os.environ.get("PYTHON"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
