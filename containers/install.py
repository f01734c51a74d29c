"""Install locked packages in an environment on top of the packages of the Python that runs this.

The base's packages stay unchanged: its own Python does not see ours, and ours sees both. build.py
runs this program in a container of the base; `make setup-in-image` imports it. It needs only the
standard library of Python 3.10 or newer.

    python3 install.py tools.lock ...      make /opt/recipes from locks next to this file

Exit codes: 0 done, 3 a file is unavailable, 4 the locks conflict with the base.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from subprocess import PIPE, STDOUT

HERE = Path(__file__).resolve().parent
OVERLAY = Path("/opt/recipes")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HASHED = ("--no-deps", "--require-hashes", "--no-build-isolation", "-r")
OPTIONAL = ("compiled.lock", "uv.lock")  # compiled.lock needs a C compiler
# Packages of the base that must stay. pip would replace them with builds without AMD support.
GUARDED = re.compile(
    r"torch|torchvision|torchaudio|torchcodec|(pytorch-)?triton(-.+)?|vllm|flash-attn|(amd-)?aiter|amdsmi|rocm(-.+)?"
)
BUILT_FOR_AMD = re.compile(r"\+.*(rocm|hip|git)")  # the local part of a version
# Versions of local builds can be arbitrary, but pip's constraints cannot.
PUBLIC = re.compile(r"[\d.]+((a|b|rc|\.?post|\.?dev)\d+)*(\+[a-z\d.]+)?")
TRITON = {"triton", "triton-rocm", "pytorch-triton-rocm"}  # provide the same module
PROBLEM = re.compile(r"(\S+) \S+ (?:requires|has requirement) ([\w.-]+)")  # of pip check
FULL_DISK = "no space left on device|disk quota exceeded"
REMEDIES = {  # pip's output -> what to do
    "ProxyError|proxy authentication required": "The proxy failed. Correct HTTPS_PROXY or pip's.",
    FULL_DISK: "The disk is full. Free space on it.",
    "": "Use a network that reaches the index, or PIP_FIND_LINKS=<folder with the file>.",
}
# A substitute for pycosat, which has no wheel, on machines without a compiler. reasoning-gym always
# imports pycosat, but only one task uses it. The others run with this substitute.
PYCOSAT = """def itersolve(*args, **kwargs):
    raise ImportError("{}")
"""


class PackagesError(Exception):
    """Packages are unavailable (exit code 3), or contradict each other or the lock (4)."""

    def __init__(self, message: str, exit_code: int = 4) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# ---- Packages and locks


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(paths: list[str]) -> dict[str, str]:
    """Return the versions of the packages on these paths. As in imports, earlier paths win."""
    dists = [*importlib.metadata.distributions(path=paths)]
    return {canonical(dist.name): dist.version for dist in reversed(dists) if dist.name}


def guarded(packages: Mapping[str, str]) -> dict[str, str]:
    return {
        name: version
        for name, version in sorted(packages.items())
        if GUARDED.fullmatch(name) or BUILT_FOR_AMD.search(version)
    }


def requirements(lock: Path) -> list[tuple[str, str]]:
    """Return the name and the text of each requirement in a lock, with its hashes."""
    texts = re.split(r"(?m)^(?=\w)", lock.read_text(encoding="utf-8"))
    return [(canonical(re.split(r"[\[=<>!~; ]", text)[0]), text) for text in texts[1:]]


def package_folders(venv: Path) -> list[str]:
    """Return the folders outside `venv` from which this Python imports installed packages."""
    names = ("site-packages", "dist-packages")
    paths = [path for path in sys.path if Path(path).name in names and Path(path).is_dir()]
    return [path for path in paths if not Path(path).is_relative_to(venv)]


def site_of(venv: Path) -> Path:
    return venv / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


# ---- pip


def run(argv: Iterable[str], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command, print its output, and return its exit code and output."""
    lines = []
    with subprocess.Popen(
        [*argv], env=env, text=True, errors="replace", stdout=PIPE, stderr=STDOUT
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def install_lock(
    installers: Iterable[tuple[str, ...]], lock: Path, kept: Container[str], env: Mapping[str, str]
) -> bool:
    """Install a lock without the packages in `kept`, with the first installer that succeeds.

    Return False if an optional lock cannot be installed. Raises PackagesError for others.
    """
    pins = [(name, text) for name, text in requirements(lock) if name not in kept]
    print(f"{lock.name}: {len(dict(pins))} packages", flush=True)
    # pip's configured index comes first, because it works without internet access.
    indexes = [[], [f"--extra-index-url={CPU_INDEX}"]] if "torch" in dict(pins) else [[]]
    if env.get("PIP_RETRIES") == "0":  # pip names a proxy that fails only before it tries again
        env = {**env, "PIP_RETRIES": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.writelines(text for _, text in pins)
        file.flush()
        for installer in installers:
            for index in indexes:
                status, output = run([*installer, *index, *HASHED, file.name], env)
                if status == 0:
                    return True
    if lock.name.endswith(OPTIONAL):
        return False
    raise failure(lock.name, output)


def failure(lock: str, output: str) -> PackagesError:
    """Return an error with pip's message, or else with the last lines of its output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if line.startswith("ERROR:")), -3)
    message = "\n".join([f"{lock}: pip failed:", *lines[start:]])
    if "DO NOT MATCH THE HASHES" in output:
        return PackagesError(message)
    remedy = next(text for words, text in REMEDIES.items() if re.search(words, output, re.I))
    return PackagesError(f"{message}\n{remedy}", 3)


# ---- The environment


def join(venv: Path, folders: list[str]) -> None:
    """Add `folders` behind the packages in `venv`, and check all. Raises PackagesError.

    This follows pip, because pip could remove the packages in `folders`.
    """
    site = site_of(venv)
    base = "".join(f"import site; site.addsitedir({path!r})\n" for path in folders)
    (site / "base.pth").write_text(base, encoding="utf-8")
    ours, theirs = versions([str(site)]), versions(folders)
    check(venv, ours, theirs)
    # These keep a later `pip install` from replacing torch.
    keep = guarded({**theirs, **ours}).items()
    pins = [f"{name}=={version}\n" for name, version in keep if PUBLIC.fullmatch(version)]
    (venv / "constraints.txt").write_text("".join(pins), encoding="utf-8")


def check(venv: Path, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Check the packages of `venv`, not those of the base. Raises PackagesError."""
    substitutes = {"pycosat", *(TRITON if TRITON & {**ours, **theirs}.keys() else ())}
    argv = [str(venv / "bin" / "python"), *"-B -m pip --disable-pip-version-check check".split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    problems = []
    for line in done.stdout.splitlines():
        match = PROBLEM.match(line)
        if match and canonical(match[1]) in ours and canonical(match[2]) not in substitutes:
            problems.append(line)
    if problems or done.returncode > 1 or done.stderr.startswith("Traceback"):
        remedy = "Add the required versions to the locks, or use another base image."
        raise PackagesError("\n".join([*problems, done.stderr.strip(), remedy]))
    print(f"{len(ours)} packages on top of the base's {len(theirs)}: they fit together")


def make_overlay(locks: list[str]) -> None:
    """Make OVERLAY with the pip settings of the host, which reach no file of it."""
    os.umask(0o022)
    settings = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # Make builds reproducible: DeepSpeed's setup.py writes its extras in the order of a set.
    env |= {"PYTHONHASHSEED": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    env |= {**settings, "PIP_CONFIG_FILE": os.devnull}
    folders, python = package_folders(OVERLAY), str(OVERLAY / "bin" / "python")
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None  # if not, the base has pip
    status, output = run([sys.executable, "-m", "venv", "--without-pip", str(OVERLAY)])
    if has_ensurepip and status == 0:  # venv would hide its output, such as of a full disk
        status, output = run([python, *"-Im ensurepip --upgrade --default-pip".split()])
    if status:
        errors = "\n".join(re.findall("(?im)^.*error.*$", output)) or output or f"code {status}"
        raise PackagesError(f"the base's python3 -m venv failed:\n{errors}", 3)
    program, *target = [python] if has_ensurepip else [sys.executable, "--python", python]
    pip = (program, "-m", "pip", *target, "install", "--no-compile", "--use-pep517")
    for lock in locks:
        install_lock([pip], HERE / lock, guarded(versions(folders)), env)
    join(OVERLAY, folders)
    missing = "this image has no pycosat, which reasoning-gym's task zebra_puzzles needs"
    (site_of(OVERLAY) / "pycosat.py").write_text(PYCOSAT.format(missing), encoding="utf-8")
    for cache in [*OVERLAY.rglob("__pycache__")]:
        shutil.rmtree(cache)  # venv installs pip with bytecode
    shutil.rmtree(HERE)  # has passwords and perhaps a client certificate of the host


if __name__ == "__main__":
    try:
        make_overlay(sys.argv[1:])
    except (PackagesError, OSError) as error:  # OSError: of a full disk
        print(f"error: {error}", flush=True)
        sys.exit(getattr(error, "exit_code", 3))
