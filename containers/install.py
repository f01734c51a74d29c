"""What happens inside a base image: locked packages go into an environment over the base's own, which stays as it is.

containers/build.py runs it there. Standard library only, Python 3.10 or newer.

    python3 install.py inspect             what the base holds, as JSON
    python3 install.py download DEST       fetches what the locks name: with a network, in a container that is thrown away
    python3 install.py install             fills /opt/recipes: without a network, in the build
    python3 install.py check               whether what was installed has all that it needs; run by /opt/recipes/bin/python

Exit codes: 0 done, 3 a file cannot be had, 4 the locks and what is there contradict each other.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent  # beside it: probe.py, locks.txt (one lock a line, in their order), locks/, wheels/
OVERLAY = Path("/opt/recipes")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What a base is chosen for. pip would replace each with a build that knows no AMD GPU.
# One module under its makers' names.
ALSO_CALLED = {"triton": ("triton-rocm", "pytorch-triton-rocm")}
GUARDED = re.compile(r"torch|torchvision|torchaudio|torchcodec|(pytorch-)?triton(-.+)?|vllm|flash-attn|(amd-)?aiter|amdsmi|rocm(-.+)?")
BUILT_FOR_AMD = re.compile(r"\+.*(rocm|hip|git)")  # in a version's local part
# reasoning-gym imports pycosat for a single task, at its own import: without this module none of its tasks could be used.
STAND_INS = {
    "pycosat": '''"""A stand-in: pycosat is written in C, and a base need have no compiler."""


def _missing(*args, **kwargs):
    raise ImportError("pycosat is not in this image; of reasoning-gym's tasks only zebra_puzzles needs it")


solve = itersolve = _missing
'''
}


class Refused(Exception):
    """A message for the build's log, and the exit code that goes with it."""

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

    def __str__(self) -> str:
        return f"{self.name}=={self.version} ({self.lock})"


# ---- Locks against what is there


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(file: Path, name: str) -> list[Pin]:
    """Every requirement of a lock, for any machine. Nothing but `name==version [; marker] --hash=...` may stand in one."""
    pins = []
    for line in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        found = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)\s*(?:;\s*(.*?))??\s+((?:--hash=sha256:[0-9a-f]{64}\s*)+)", text)
        if not found:
            raise Refused(f"{name}: `{text[:100]}` is not `name==version --hash=sha256:...`, which alone may stand in a lock")
        pins.append(Pin(name, canonical(found[1]), found[2], found[3] or "", text))
    return pins


def applicable(pins: Iterable[Pin]) -> list[Pin]:
    """Those whose marker suits this Python and machine."""
    packaging = vendored("markers")
    return [pin for pin in pins if not pin.marker or packaging.Marker(pin.marker).evaluate()]


def vendored(module: str) -> Any:
    """pip's copy of `packaging`: the one that is there wherever pip is."""
    return importlib.import_module(f"pip._vendor.packaging.{module}")


def distributions(paths: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Every package on these paths; the first found counts, as for an import."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for dist in importlib.metadata.distributions(path=paths):
        if dist.metadata["Name"]:
            found.setdefault(canonical(dist.metadata["Name"]), dist)
    return found


def held(paths: list[str]) -> dict[str, str]:
    """Their versions."""
    return {name: dist.version for name, dist in distributions(paths).items()}


def guarded(packages: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in sorted(packages.items()) if GUARDED.fullmatch(name) or BUILT_FOR_AMD.search(version)}


def satisfies(version: str, specifier: Any) -> bool:
    return not str(specifier) or (is_version(version) and bool(specifier.contains(version, prereleases=True)))


def is_version(text: str) -> bool:
    """Whether pip can read it. A build by hand may call itself anything."""
    versions = vendored("version")
    try:
        versions.Version(text)
    except versions.InvalidVersion:
        return False
    return True


def refuse_conflicts(pins: Iterable[Pin], kept: Mapping[str, str]) -> list[Pin]:
    """The pins left to install: those that the image holds already are kept as they are. Refuses one in another version."""
    left, conflicts = [], []
    for pin in pins:
        if pin.name not in kept:
            left.append(pin)
        elif satisfies(kept[pin.name], vendored("specifiers").SpecifierSet(f"=={pin.version}")):
            print(f"kept: the base's {pin.name} {kept[pin.name]}, which {pin} asks for")
        else:
            conflicts.append(f"{pin.lock} pins {pin.name}=={pin.version}, and the image holds {pin.name} {kept[pin.name]}")
    if conflicts:
        raise Refused(
            "\n".join(conflicts) + "\nThe base's own build is never replaced: PyPI's knows no AMD GPU. "
            "Take the pin out of the lock, or choose a base that holds that version (containers/images.lock.yaml)."
        )
    return left


def unmet(ours: Iterable[str], everything: Mapping[str, importlib.metadata.Distribution], stood_in: Iterable[str] = ()) -> list[str]:
    """What these packages need and do not find, and what the extras that they ask for need. Not what the base's own packages need."""
    requirements = vendored("requirements")
    lacking = []
    queue = [(name, "") for name in ours]
    for name, extra in queue:  # grows while it is read
        dist = everything[name]
        for text in dist.requires or []:
            need = requirements.Requirement(text)
            plain = not need.marker or need.marker.evaluate({"extra": ""})
            asked = not plain and need.marker.evaluate({"extra": extra}) if extra else plain
            if not asked:
                continue
            wanted = canonical(need.name)
            wanted = next((name for name in (wanted, *ALSO_CALLED.get(wanted, ())) if name in everything), wanted)
            if wanted not in everything:
                if wanted not in stood_in:
                    lacking.append(f"{name} {dist.version} needs {need}, which is not in the image")
            elif not satisfies(everything[wanted].version, need.specifier):
                lacking.append(f"{name} {dist.version} needs {need}, and the image holds {wanted} {everything[wanted].version}")
            else:
                queue += [(wanted, e) for e in sorted(need.extras) if (wanted, e) not in queue]
    return lacking


def shadowed(ours: Mapping[str, str], everything: Mapping[str, importlib.metadata.Distribution]) -> list[str]:
    """Of our packages, those that an import does not find: something of the base comes before them."""
    return [
        f"{name} {version} is hidden by {everything[name].version} of the base: PYTHONPATH is {os.environ.get('PYTHONPATH', 'not set')}"
        for name, version in sorted(ours.items())
        if everything[name].version != version
    ]


# ---- Environments and pip


class Environment(NamedTuple):
    """One that pip installs into."""

    folder: Path
    pip: tuple[str, ...]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return site_of(self.folder)


def site_of(environment: Path) -> Path:
    return environment / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


def make_environment(folder: Path) -> Environment:
    """Empty but for pip, which is the base's where the base has no ensurepip (Debian: python3-venv)."""
    own_pip = importlib.util.find_spec("ensurepip") is not None
    if not own_pip and importlib.util.find_spec("pip") is None:
        raise Refused(
            "the base's python3 has neither ensurepip nor pip: nothing can be installed (Debian, Ubuntu: apt-get install python3-venv)", 3
        )
    status, output = run([sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), str(folder)])
    if status:
        raise Refused(f"the base's python3 cannot make an environment:\n{output}", 3)
    python = str(folder / "bin" / "python")
    environment = Environment(folder, (python, "-m", "pip") if own_pip else (sys.executable, "-m", "pip", "--python", python))
    sys.path.append(str(environment.site))  # for vendored()
    return environment


def run(argv: list[str], settings: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs it, shows its output and returns it. pip gets these settings and none of the base's."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ["PYTHONHASHSEED"] = "0"  # DeepSpeed's setup.py writes its extras in the order of a set, and two builds would differ
    environ.update({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **(settings or {}), "PIP_CONFIG_FILE": os.devnull})
    lines = []
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def pip(environment: Environment, command: list[str], pins: list[Pin], settings: Mapping[str, str] | None = None) -> tuple[int, str]:
    """One pip command for these pins and no other file: hashes required, no dependency that is not among them."""
    wanted = environment.folder / "wanted.txt"
    wanted.write_text("".join(f"{pin.text}\n" for pin in pins), encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--no-build-isolation", "--use-pep517", "--progress-bar=off", "-r", str(wanted)]
    result = run([*environment.pip, *command, *options], settings)
    wanted.unlink()
    return result


def failure(lock: str, output: str, code: int) -> Refused:
    """From what pip said."""
    at = output.find("DO NOT MATCH THE HASHES")
    if at >= 0:
        wrong = [line.strip() for line in output[at:].splitlines()[1:] if line.strip()]
        return Refused(f"{lock}: a file has another hash than the lock states, and is not used:\n" + "\n".join(wrong), 4)
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-3:]
    return Refused(f"{lock}: pip failed:\n" + "\n".join(errors), code)


# ---- The four commands


def lock_files() -> list[tuple[str, Path]]:
    names = (HERE / "locks.txt").read_text(encoding="utf-8").split()
    return [(name, HERE / "locks" / name) for name in names]


def inspect() -> None:
    refuse_overlay()
    facts = {"python": platform.python_version(), "machine": platform.machine(), "held": guarded(held(sys.path))}
    print(json.dumps(facts))


def refuse_overlay() -> None:
    if OVERLAY.exists():
        raise Refused(f"the base has a {OVERLAY} already: it is an image built by this program. Name what that one was built from")


def download(folder: Path) -> None:
    """Every file that the locks name for this Python and machine. What lies there already with the right hash is not fetched again."""
    settings = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
    kept = guarded(held(sys.path))
    environment = make_environment(Path(os.environ["HOME"]) / "fetch")
    chosen = {name: refuse_conflicts(applicable(read_lock(file, name)), kept) for name, file in lock_files()}
    for name, pins in chosen.items():
        print(f"{name}: {len(pins)} files", flush=True)
        command = ["download", "--dest", str(folder)]
        status, output = pip(environment, command, pins, settings) if pins else (0, "")
        if status and any(pin.name == "torch" for pin in pins):
            # What pip is configured to know came first: a machine without the internet has its wheels there.
            print(f"{name}: once more, with {CPU_INDEX}", flush=True)
            status, output = pip(environment, [*command, "--retries=1", f"--extra-index-url={CPU_INDEX}"], pins, settings)
        if status:
            raise failure(name, output, 3)
        # A source distribution is asked for its metadata as it comes, and setuptools answers.
        builders = [pin for pin in pins if pin.name == "setuptools"]
        if builders:
            install_pins(environment, name, builders, folder)


def install_pins(environment: Environment, lock: str, pins: list[Pin], wheels: Path, *options: str) -> None:
    # No bytecode: it holds the time of its source, and two builds would differ.
    status, output = pip(environment, ["install", "--no-index", "--find-links", str(wheels), "--no-compile", *options], pins)
    if status:
        raise failure(lock, output, 4)


def install() -> None:
    """The overlay, complete and checked."""
    refuse_overlay()
    os.umask(0o022)
    kept = guarded(held(sys.path))
    below = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]
    environment = make_environment(OVERLAY)
    constraints = OVERLAY / "constraints.txt"
    write_constraints(constraints, kept)
    for name, file in lock_files():
        pins = refuse_conflicts(applicable(read_lock(file, name)), kept)
        if pins:
            install_pins(environment, name, pins, HERE / "wheels", "--constraint", str(constraints))
    # Only now: pip has seen the overlay alone, so that what the base holds can neither be taken for ours nor be removed.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
    (environment.site / "base.pth").write_text("".join(lines), encoding="utf-8")
    ours = held([str(environment.site)])
    for module, text in STAND_INS.items():
        if module not in ours:
            (environment.site / f"{module}.py").write_text(text, encoding="utf-8")
    status, output = run([str(environment.python), "-B", str(HERE / "install.py"), "check"])
    if status:
        raise Refused(output.strip().removeprefix("error: "), status)
    write_constraints(constraints, {**kept, **guarded(ours)})
    shutil.copy(HERE / "probe.py", OVERLAY / "probe.py")
    for cache in sorted(OVERLAY.rglob("__pycache__")):
        shutil.rmtree(cache)  # of pip itself, which venv installs


def write_constraints(file: Path, packages: Mapping[str, str]) -> None:
    """One that pip cannot read is left out: pip would refuse the whole file, and everything with it."""
    lines = [f"{name}=={version}\n" for name, version in sorted(packages.items()) if is_version(version)]
    file.write_text("".join(lines), encoding="utf-8")


def check() -> None:
    site = site_of(Path(sys.prefix))
    ours, everything = held([str(site)]), distributions(sys.path)
    hidden = shadowed(ours, everything)
    if hidden:
        raise Refused("\n".join(hidden) + "\nChoose a base that leaves PYTHONPATH alone, or one that holds what the locks pin.")
    lacking = unmet(ours, everything, [name for name in STAND_INS if (site / f"{name}.py").is_file()])
    if lacking:
        raise Refused("\n".join(lacking) + "\nLock what is missing, in the version that is asked for, or choose another base.")
    print(f"{len(ours)} packages in the overlay, {len(everything)} in all: each of the overlay's requirements is met")


def main(arguments: list[str]) -> int:
    commands = {"inspect": inspect, "install": install, "check": check, "download": lambda: download(Path(arguments[1]))}
    try:
        commands[arguments[0]]()
    except Refused as refusal:
        print(f"error: {refusal}", flush=True)
        return refusal.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
