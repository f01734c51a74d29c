"""Install locked packages in an environment on top of a base image's, which stays unchanged.

containers/build.py runs it in the base. Standard library only, Python 3.10 or newer.

    python3 install.py inspect             print the base's versions as JSON
    python3 install.py download DEST       fetch the locked files (needs a network)
    python3 install.py install             fill /opt/recipes during the build, without a network
    python3 install.py check               check requirements (run with /opt/recipes/bin/python)

Exit codes: 0 done, 3 a file is unavailable, 4 the locks contradict the image.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Next to this file: probe.py, locks.txt (one lock per line, in their order), locks/, wheels/
HERE = Path(__file__).resolve().parent
OVERLAY = Path("/opt/recipes")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HASHED = ("--no-deps", "--require-hashes", "--no-build-isolation", "-r")
# Module -> other names under which it is distributed.
ALSO_CALLED = {"triton": ("triton-rocm", "pytorch-triton-rocm")}
# Packages that the base must keep. pip would replace each with a build without AMD support.
GUARDED = re.compile(
    r"torch|torchvision|torchaudio|torchcodec|(pytorch-)?triton(-.+)?|vllm|flash-attn|(amd-)?aiter|amdsmi|rocm(-.+)?"
)
BUILT_FOR_AMD = re.compile(r"\+.*(rocm|hip|git)")  # in a version's local part
# Replaces pycosat, which has no wheel, on machines without a compiler. reasoning-gym needs it for a
# single task but imports it at the top, so without this module all of its tasks would fail.
PYCOSAT = """def _missing(*args, **kwargs):
    raise ImportError("{}")


solve = itersolve = _missing
"""
NOT_IN_IMAGE = "pycosat is not in this image; only reasoning-gym's task zebra_puzzles needs it"


class Refused(Exception):
    """An error for the build's log, with the exit code of the program."""

    def __init__(self, message: str, code: int = 4) -> None:
        super().__init__(message)
        self.code = code


class Pin(NamedTuple):
    """One requirement of a lock."""

    lock: str
    name: str
    version: str
    marker: str
    text: str  # as pip reads it, hashes included


# ---- Compare locks with the image


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(file: Path, name: str) -> list[Pin]:
    """Return the requirements of a lock, for all machines.

    Raises Refused for a line that is not `name==version [; marker] --hash=...`.
    """
    pins = []
    for line in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        match = re.fullmatch(
            r"([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)\s*(?:;\s*(.*?))??\s+((?:--hash=sha256:[0-9a-f]{64}\s*)+)",
            text,
        )
        if not match:
            raise Refused(
                f"{name}: `{text[:100]}` is not `name==version --hash=sha256:...`, the only form "
                "that a lock may contain"
            )
        pins.append(Pin(name, canonical(match[1]), match[2], match[3] or "", text))
    return pins


def applicable(pins: Iterable[Pin]) -> list[Pin]:
    """Return the pins whose marker suits this Python and machine."""
    marker = vendored("markers").Marker
    return [pin for pin in pins if not pin.marker or marker(pin.marker).evaluate()]


def vendored(module: str) -> Any:
    """Import pip's copy of `packaging`, which exists wherever pip does."""
    return importlib.import_module(f"pip._vendor.packaging.{module}")


def distributions(paths: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the packages on these paths by name. The first wins, as for an import."""
    packages: dict[str, importlib.metadata.Distribution] = {}
    for dist in importlib.metadata.distributions(path=paths):
        if dist.metadata["Name"]:
            packages.setdefault(canonical(dist.metadata["Name"]), dist)
    return packages


def versions(paths: list[str]) -> dict[str, str]:
    """Return the versions of the packages on these paths."""
    return {name: dist.version for name, dist in distributions(paths).items()}


def guarded(packages: Mapping[str, str]) -> dict[str, str]:
    return {
        name: version
        for name, version in sorted(packages.items())
        if GUARDED.fullmatch(name) or BUILT_FOR_AMD.search(version)
    }


def satisfies(version: str, specifier: Any) -> bool:
    return not str(specifier) or (
        is_version(version) and bool(specifier.contains(version, prereleases=True))
    )


def is_version(text: str) -> bool:
    """Return whether pip can parse this version. A local build may have any text as its version."""
    try:
        vendored("version").Version(text)
    except ValueError:
        return False
    return True


def refuse_conflicts(pins: Iterable[Pin], base: Mapping[str, str]) -> list[Pin]:
    """Return the pins that the base does not already satisfy.

    Raises Refused if the base has a package in another version.
    """
    missing, conflicts = [], []
    for pin in pins:
        if pin.name not in base:
            missing.append(pin)
        elif satisfies(base[pin.name], vendored("specifiers").SpecifierSet(f"=={pin.version}")):
            print(f"kept: the base's {pin.name} {base[pin.name]}, as {pin.lock} asks for")
        else:
            conflicts.append(
                f"{pin.lock} pins {pin.name}=={pin.version}, and the image holds {pin.name} "
                f"{base[pin.name]}"
            )
    if conflicts:
        raise Refused(
            "\n".join(conflicts)
            + "\nThe base's own build is never replaced: PyPI's has no AMD support. "
            "Take the pin out of the lock, or choose a base with that version "
            "(containers/images.lock.yaml)."
        )
    return missing


def unmet(
    ours: Iterable[str],
    everything: Mapping[str, importlib.metadata.Distribution],
    stand_ins: Iterable[str] = (),
) -> list[str]:
    """Return a line for each unmet requirement of our packages.

    Extras are ignored, since the locks were resolved with them. So are requirements of the base's
    own packages, and missing packages in `stand_ins`.
    """
    requirements = vendored("requirements")
    problems = []
    for name in ours:
        dist = everything[name]
        for text in dist.requires or []:
            need = requirements.Requirement(text)
            if need.marker and not need.marker.evaluate({"extra": ""}):
                continue
            package = canonical(need.name)
            names = (package, *ALSO_CALLED.get(package, ()))
            package = next((name for name in names if name in everything), package)
            if package in everything:
                version = everything[package].version
                if not satisfies(version, need.specifier):
                    holds = f"the image holds {package} {version}"
                    problems.append(f"{name} {dist.version} needs {need}, and {holds}")
            elif package not in stand_ins:
                problems.append(f"{name} {dist.version} needs {need}, which is not in the image")
    return problems


# ---- Environments and pip


def site_of(environment: Path) -> Path:
    return environment / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


def make_environment(folder: Path) -> tuple[str, ...]:
    """Make an environment; return its pip, or the base's pip if there is no ensurepip.

    Raises Refused if the base has neither.
    """
    find = importlib.util.find_spec
    base_pip = find("ensurepip") is None and find("pip") is not None
    without = ["--without-pip"] if base_pip else []
    status, output = run([sys.executable, "-m", "venv", *without, str(folder)])
    if status:
        raise Refused(f"the base's python3 cannot make an environment:\n{output}", 3)
    python = str(folder / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python) if base_pip else (python, "-m", "pip")
    sys.path.append(str(site_of(folder)))  # for vendored()
    return pip


def run(argv: list[str], settings: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command, print its output, and return its exit code and output.

    pip sees `settings`, and none of the base's own.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # DeepSpeed's setup.py writes its extras in the order of a set, and two builds would differ.
    environ |= {"PYTHONHASHSEED": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    environ |= {**(settings or {}), "PIP_CONFIG_FILE": os.devnull}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    lines = []
    with subprocess.Popen(argv, env=environ, text=True, errors="replace", **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def run_pip(
    pip: tuple[str, ...],
    command: list[str],
    pins: list[Pin],
    settings: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a pip command for exactly these pins, with hashes and without other dependencies."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as requirements:
        requirements.writelines(f"{pin.text}\n" for pin in pins)
        requirements.flush()
        options = ["--use-pep517", "--progress-bar=off", *HASHED, requirements.name]
        return run([*pip, *command, *options], settings)


def failure(lock: str, output: str, code: int) -> Refused:
    """Return an error with only the reason from pip's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    wrong = next((i for i, line in enumerate(lines) if "DO NOT MATCH THE HASHES" in line), None)
    if wrong is not None:
        reason = "a file's hash differs from the lock's, so it is not used"
        return Refused("\n".join([f"{lock}: {reason}:", *lines[wrong + 1 :]]), 4)
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-3:]
    return Refused("\n".join([f"{lock}: pip failed:", *errors]), code)


# ---- The four commands


def lock_files() -> list[tuple[str, Path]]:
    return [(name, HERE / "locks" / name) for name in (HERE / "locks.txt").read_text().split()]


def inspect() -> None:
    if OVERLAY.exists():
        raise Refused(
            f"the base already has {OVERLAY}, so this program built it. Use the base that it was "
            "built from"
        )
    python, machine = platform.python_version(), platform.machine()
    print(json.dumps({"python": python, "machine": machine, "held": guarded(versions(sys.path))}))


def download(folder: Path) -> None:
    """Fetch every file that the locks name for this Python and machine. Raises Refused."""
    settings = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
    base = guarded(versions(sys.path))
    pip = make_environment(Path(os.environ["HOME"]) / "fetch")
    pins_by_lock = {
        name: refuse_conflicts(applicable(read_lock(file, name)), base)
        for name, file in lock_files()
    }
    for name, pins in pins_by_lock.items():
        print(f"{name}: {len(pins)} files", flush=True)
        command = ["download", "--dest", str(folder)]
        status, output = run_pip(pip, command, pins, settings) if pins else (0, "")
        if status and any(pin.name == "torch" for pin in pins):
            # Try pip's configured index first: without internet access, the wheels are there.
            print(f"{name}: retrying with {CPU_INDEX}", flush=True)
            command += ["--retries=1", f"--extra-index-url={CPU_INDEX}"]
            status, output = run_pip(pip, command, pins, settings)
        if status:
            raise failure(name, output, 3)
        # pip builds the metadata of later source distributions, which takes setuptools.
        builders = [pin for pin in pins if pin.name == "setuptools"]
        if builders:
            install_pins(pip, name, builders, folder)


def install_pins(
    pip: tuple[str, ...], lock: str, pins: list[Pin], wheels: Path, *options: str
) -> None:
    # Bytecode contains the time of its source, so two builds would differ.
    command = ["install", "--no-index", "--find-links", str(wheels), "--no-compile", *options]
    status, output = run_pip(pip, command, pins)
    if status:
        raise failure(lock, output, 4)


def install() -> None:
    """Make the overlay and check it. Raises Refused."""
    os.umask(0o022)
    base = guarded(versions(sys.path))
    below = [
        path
        for path in sys.path
        if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()
    ]
    pip = make_environment(OVERLAY)
    constraints = OVERLAY / "constraints.txt"
    write_constraints(constraints, base)
    for name, file in lock_files():
        pins = refuse_conflicts(applicable(read_lock(file, name)), base)
        if pins:
            install_pins(pip, name, pins, HERE / "wheels", "--constraint", str(constraints))
    site = site_of(OVERLAY)
    # Do this last, so that pip neither takes the base's packages for ours nor removes them.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
    (site / "base.pth").write_text("".join(lines), encoding="utf-8")
    ours = versions([str(site)])
    if "pycosat" not in ours:
        (site / "pycosat.py").write_text(PYCOSAT.format(NOT_IN_IMAGE), encoding="utf-8")
    status, output = run([str(OVERLAY / "bin/python"), "-B", str(HERE / "install.py"), "check"])
    if status:
        raise Refused(output.strip().removeprefix("error: "), status)
    write_constraints(constraints, {**base, **guarded(ours)})
    shutil.copy(HERE / "probe.py", OVERLAY / "probe.py")
    for cache in [*OVERLAY.rglob("__pycache__")]:
        shutil.rmtree(cache)  # venv installs pip with bytecode


def write_constraints(file: Path, packages: Mapping[str, str]) -> None:
    """Write pip's constraints without unparsable versions, for which pip rejects the whole file."""
    readable = sorted(item for item in packages.items() if is_version(item[1]))
    file.write_text("".join(f"{name}=={version}\n" for name, version in readable), encoding="utf-8")


def check() -> None:
    site = site_of(Path(sys.prefix))
    ours, everything = versions([str(site)]), distributions(sys.path)
    stand_ins = ["pycosat"] if (site / "pycosat.py").is_file() else []
    # A base's package that is earlier on the path would be imported in place of ours.
    hidden = [
        f"{name} {version} is hidden by {everything[name].version} of the base: PYTHONPATH is "
        f"{os.environ.get('PYTHONPATH', 'not set')}"
        for name, version in sorted(ours.items())
        if everything[name].version != version
    ]
    problems = hidden or unmet(ours, everything, stand_ins)
    if problems:
        remedy = "Lock what is missing, in the required version, or choose another base."
        raise Refused("\n".join([*problems, remedy]))
    print(f"{len(ours)} packages in the overlay, {len(everything)} in all: all that they need")


def main(arguments: list[str]) -> int:
    commands = {
        "inspect": inspect,
        "install": install,
        "check": check,
        "download": lambda: download(Path(arguments[1])),
    }
    try:
        commands[arguments[0]]()
    except Refused as refusal:
        print(f"error: {refusal}", flush=True)
        return refusal.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
