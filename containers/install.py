"""Install locked packages in /opt/recipes, an environment on top of a base image's packages.

The base's packages stay unchanged. containers/build.py runs this program in the base. It needs only
the standard library of Python 3.10 or newer.

    python3 install.py inspect             print the base's versions as JSON
    python3 install.py download DEST       fetch the locked files (needs a network)
    python3 install.py install             make /opt/recipes (during the build, without a network)
    python3 install.py check               check requirements (run with /opt/recipes/bin/python)

Exit codes: 0 done, 3 a file is unavailable, 4 the locks conflict with the image.
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

# This folder also has probe.py, locks/, wheels/ and locks.txt, which lists locks in order.
HERE = Path(__file__).resolve().parent
OVERLAY = Path("/opt/recipes")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HASHED = ("--no-deps", "--require-hashes", "--no-build-isolation", "-r")
# Package -> other packages that provide the same module.
ALSO_CALLED = {"triton": ("triton-rocm", "pytorch-triton-rocm")}
# Packages of the base that must stay. pip would replace them with builds without AMD support.
GUARDED = re.compile(
    r"torch|torchvision|torchaudio|torchcodec|(pytorch-)?triton(-.+)?|vllm|flash-attn|(amd-)?aiter|amdsmi|rocm(-.+)?"
)
BUILT_FOR_AMD = re.compile(r"\+.*(rocm|hip|git)")  # the local part of a version
# A substitute for pycosat, which has no wheel, on machines without a compiler. reasoning-gym always
# imports pycosat, but only one task uses it. The others run with this substitute.
PYCOSAT = """def _missing(*args, **kwargs):
    raise ImportError("{}")


solve = itersolve = _missing
"""
NOT_IN_IMAGE = "this image has no pycosat, which reasoning-gym's task zebra_puzzles needs"


class InstallError(Exception):
    """An error to print, and the exit code."""

    def __init__(self, message: str, code: int = 4) -> None:
        super().__init__(message)
        self.code = code


class Pin(NamedTuple):
    """A requirement in a lock."""

    lock: str
    name: str
    version: str
    marker: str
    text: str  # the complete line, with hashes


# ---- Compare locks with the image


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(file: Path, name: str) -> list[Pin]:
    """Return the requirements in a lock.

    Raises InstallError for a line that is not `name==version [; marker] --hash=...`.
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
            raise InstallError(
                f"{name}: `{text[:100]}` does not have the form `name==version --hash=sha256:...`. "
                "Run make lock."
            )
        pins.append(Pin(name, canonical(match[1]), match[2], match[3] or "", text))
    return pins


def applicable(pins: Iterable[Pin]) -> list[Pin]:
    """Return the pins whose markers match this Python and machine."""
    marker = vendored("markers").Marker
    return [pin for pin in pins if not pin.marker or marker(pin.marker).evaluate()]


def vendored(module: str) -> Any:
    """Import a module of `packaging` from pip's own copy."""
    return importlib.import_module(f"pip._vendor.packaging.{module}")


def distributions(paths: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the packages on these paths by name. As in imports, earlier paths win."""
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
    """Return whether pip can parse this version. Versions of local builds can be arbitrary."""
    try:
        vendored("version").Version(text)
    except ValueError:
        return False
    return True


def missing_pins(pins: Iterable[Pin], base: Mapping[str, str]) -> list[Pin]:
    """Return the pins whose packages are not in the base.

    Raises InstallError if the base has another version of a pinned package.
    """
    missing, conflicts = [], []
    for pin in pins:
        if pin.name not in base:
            missing.append(pin)
        elif satisfies(base[pin.name], vendored("specifiers").SpecifierSet(f"=={pin.version}")):
            print(f"{pin.lock}: using the base's {pin.name} {base[pin.name]}")
        else:
            conflicts.append(
                f"{pin.lock} pins {pin.name}=={pin.version}, but the base has {pin.name} "
                f"{base[pin.name]}"
            )
    if conflicts:
        raise InstallError(
            "\n".join(conflicts)
            + "\nThe base's build has to stay, because PyPI's does not support AMD GPUs. Remove "
            "the pin from the lock, or use a base with that version (containers/images.lock.yaml)."
        )
    return missing


def unmet(
    ours: Iterable[str],
    everything: Mapping[str, importlib.metadata.Distribution],
    substitutes: Iterable[str] = (),
) -> list[str]:
    """Return a message for each unmet requirement of the packages `ours`.

    Requirements of extras are ignored, because the locks were resolved with them. Packages in
    `substitutes` may be missing.
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
                    problems.append(
                        f"{name} {dist.version} needs {need}, but the image has {package} {version}"
                    )
            elif package not in substitutes:
                problems.append(f"{name} {dist.version} needs {need}, which is not in the image")
    return problems


# ---- Environments and pip


def site_of(environment: Path) -> Path:
    return environment / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


def make_environment(folder: Path) -> tuple[str, ...]:
    """Make an environment; return the argv of its pip, or of the base's pip without ensurepip.

    Raises InstallError if the base has neither.
    """
    find = importlib.util.find_spec
    base_pip = find("ensurepip") is None and find("pip") is not None
    without = ["--without-pip"] if base_pip else []
    status, output = run([sys.executable, "-m", "venv", *without, str(folder)])
    if status:
        raise InstallError(f"the base's python3 -m venv failed:\n{output}", 3)
    python = str(folder / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python) if base_pip else (python, "-m", "pip")
    sys.path.append(str(site_of(folder)))  # for vendored()
    return pip


def run(argv: list[str], settings: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command, print its output, and return its exit code and output.

    `settings` replace the base's own settings of pip.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # Make builds reproducible: DeepSpeed's setup.py writes its extras in the order of a set.
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
    """Run a pip command for these pins, with hashes and without dependencies."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as requirements:
        requirements.writelines(f"{pin.text}\n" for pin in pins)
        requirements.flush()
        options = ["--use-pep517", "--progress-bar=off", *HASHED, requirements.name]
        return run([*pip, *command, *options], settings)


def failure(lock: str, output: str, code: int) -> InstallError:
    """Return an error with the reason from pip's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if "DO NOT MATCH THE HASHES" in line), None)
    if start is not None:
        reason = "a file's hash differs from the lock's"
        return InstallError("\n".join([f"{lock}: {reason}:", *lines[start + 1 :]]), 4)
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-3:]
    return InstallError("\n".join([f"{lock}: pip failed:", *errors]), code)


# ---- The four commands


def lock_files() -> list[tuple[str, Path]]:
    return [(name, HERE / "locks" / name) for name in (HERE / "locks.txt").read_text().split()]


def inspect() -> None:
    if OVERLAY.exists():
        raise InstallError(
            f"the base already has {OVERLAY}, so it is an image of containers/build.py. Use the "
            "base of that image"
        )
    python, machine = platform.python_version(), platform.machine()
    print(json.dumps({"python": python, "machine": machine, "held": guarded(versions(sys.path))}))


def download(folder: Path) -> None:
    """Fetch the locks' files for this Python and machine. Raises InstallError."""
    settings = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
    base = guarded(versions(sys.path))
    pip = make_environment(Path(os.environ["HOME"]) / "fetch")
    pins_by_lock = {
        name: missing_pins(applicable(read_lock(file, name)), base) for name, file in lock_files()
    }
    for name, pins in pins_by_lock.items():
        print(f"{name}: {len(pins)} files", flush=True)
        command = ["download", "--dest", str(folder)]
        status, output = run_pip(pip, command, pins, settings) if pins else (0, "")
        if status and any(pin.name == "torch" for pin in pins):
            # pip's configured index came first, because it works without internet access.
            print(f"{name}: retrying with {CPU_INDEX}", flush=True)
            command += ["--retries=1", f"--extra-index-url={CPU_INDEX}"]
            status, output = run_pip(pip, command, pins, settings)
        if status:
            raise failure(name, output, 3)
        # pip needs setuptools to read the metadata of source distributions in later locks.
        builders = [pin for pin in pins if pin.name == "setuptools"]
        if builders:
            install_pins(pip, name, builders, folder)


def install_pins(
    pip: tuple[str, ...], lock: str, pins: list[Pin], wheels: Path, *options: str
) -> None:
    # Make builds reproducible: bytecode contains the modification time of its source.
    command = ["install", "--no-index", "--find-links", str(wheels), "--no-compile", *options]
    status, output = run_pip(pip, command, pins)
    if status:
        raise failure(lock, output, 4)


def install() -> None:
    """Make the overlay and check it. Raises InstallError."""
    os.umask(0o022)
    base = guarded(versions(sys.path))
    base_folders = package_folders()
    pip = make_environment(OVERLAY)
    constraints = OVERLAY / "constraints.txt"
    write_constraints(constraints, base)
    for name, file in lock_files():
        pins = missing_pins(applicable(read_lock(file, name)), base)
        if pins:
            install_pins(pip, name, pins, HERE / "wheels", "--constraint", str(constraints))
    site = site_of(OVERLAY)
    # Add the base's packages after pip has run, because pip could remove them.
    add_base(site, base_folders)
    ours = versions([str(site)])
    if "pycosat" not in ours:
        (site / "pycosat.py").write_text(PYCOSAT.format(NOT_IN_IMAGE), encoding="utf-8")
    status, output = run([str(OVERLAY / "bin/python"), "-B", str(HERE / "install.py"), "check"])
    if status:
        raise InstallError(output.strip().removeprefix("error: "), status)
    write_constraints(constraints, {**base, **guarded(ours)})
    shutil.copy(HERE / "probe.py", OVERLAY / "probe.py")
    for cache in [*OVERLAY.rglob("__pycache__")]:
        shutil.rmtree(cache)  # venv installs pip with bytecode


def package_folders() -> list[str]:
    """Return the folders from which this Python imports installed packages."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if Path(path).name in names and Path(path).is_dir()]


def add_base(site: Path, folders: Iterable[str]) -> None:
    """Make the packages in `folders` importable behind those in `site`."""
    lines = [f"import site; site.addsitedir({path!r})\n" for path in folders]
    (site / "base.pth").write_text("".join(lines), encoding="utf-8")


def write_constraints(file: Path, packages: Mapping[str, str]) -> None:
    """Write pip's constraints, except those that pip cannot parse."""
    readable = sorted(item for item in packages.items() if is_version(item[1]))
    file.write_text("".join(f"{name}=={version}\n" for name, version in readable), encoding="utf-8")


def check() -> None:
    site = site_of(Path(sys.prefix))
    ours, everything = versions([str(site)]), distributions(sys.path)
    substitutes = ["pycosat"] if (site / "pycosat.py").is_file() else []
    # If one of the base's packages is earlier on the path, Python imports it instead of ours.
    hidden = [
        f"{name} {version} is not importable, since the base's {everything[name].version} is "
        f"earlier on the path. PYTHONPATH is {os.environ.get('PYTHONPATH', 'not set')}."
        for name, version in sorted(ours.items())
        if everything[name].version != version
    ]
    problems = hidden or unmet(ours, everything, substitutes)
    if problems:
        remedy = "Add the required versions to the locks, or use another base image."
        raise InstallError("\n".join([*problems, remedy]))
    print(
        f"{len(ours)} packages in the overlay, {len(everything)} in all. All requirements are met."
    )


def main(arguments: list[str]) -> int:
    commands = {
        "inspect": inspect,
        "install": install,
        "check": check,
        "download": lambda: download(Path(arguments[1])),
    }
    try:
        commands[arguments[0]]()
    except InstallError as error:
        print(f"error: {error}", flush=True)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
