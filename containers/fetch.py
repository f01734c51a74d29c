"""Fetch the files in an image's locks, so that the build needs no network or password.

pip runs in a container of the base. It reads the host's pip settings from a mounted file, so that
no layer contains their passwords. The files stay in the user's cache for later builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import docker

from containers import causes, engine
from containers.environment import pip_options
from containers.images import FOLDER, SHARED, Image
from launch.core.errors import HostError

LAST_LINES = 15
INSIDE = "/mnt/recipes"  # the fetching container's folder with script, locks and settings
WHEELS_INSIDE = "/mnt/wheels"
# pip's options for the sources of files. Other options, such as a cache, apply only to the host.
SETTINGS = """
index-url extra-index-url find-links no-index trusted-host proxy cert client-cert timeout retries
""".split()
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
# Otherwise SELinux may deny access to mounted files.
READABLE = {"security_opt": ["label=disable"]}
BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


class BuildFailed(Exception):
    """A lock, its hashes or an image is inconsistent. Exit code 4."""

    exit_code = 4


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocm-recipes"


def lock_names(image: Image) -> list[str]:
    """Return the file names of the locks in the build, which are unique and relative."""
    return [
        name if not Path(name).is_absolute() else f"{i}-{Path(name).name}"
        for i, name in enumerate(image.locks)
    ]


def files_of(image: Image) -> dict[str, Path]:
    """Return the files for the fetching container and the build, except wheels.

    The keys are paths relative to the container's folder.
    """
    locks = {
        f"locks/{name}": FOLDER / file
        for name, file in zip(lock_names(image), image.locks, strict=True)
    }
    programs = {Path(name).name: FOLDER / name for name in (*SHARED, *image.programs)}
    return {**programs, **locks}


def lock_hash(image: Image) -> str:
    """Return the hash of the locks' contents in the order of installation."""
    total = hashlib.sha256()
    for name in image.locks:
        total.update(hashlib.sha256((FOLDER / name).read_bytes()).digest())
    return total.hexdigest()


# ---- The host's settings


def pip_settings(listed: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the host's pip settings and proxies as environment variables for the container's pip.

    `listed` is the output of `pip config list`.
    """
    merged = pip_options(listed, "global", "install", "download")
    options = {
        option: " ".join(map(absolute, merged[option].split()))
        for option in SETTINGS
        if merged.get(option)
    }
    if "cert" not in options:
        # Unlike pip's own certificates, the system's may include a company's authority.
        bundle = (
            next((environ[name] for name in BUNDLES if environ.get(name)), None)
            or ssl.get_default_verify_paths().cafile
        )
        options |= {"cert": bundle} if bundle else {}
    settings = {
        f"PIP_{option.replace('-', '_').upper()}": value for option, value in options.items()
    }
    for name in PROXIES:  # may be in upper or lower case
        proxy = environ.get(name) or environ.get(name.lower())
        settings |= {name: proxy} if proxy else {}
    return settings


def absolute(value: str) -> str:
    """Return an existing path as an absolute one, and any other value unchanged."""
    path = Path(value).expanduser()
    return str(path.absolute()) if path.exists() else value


def listed_by_pip() -> str:
    """Return the output of `pip config list`. Without pip, list PIP_* variables instead."""
    process = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if process.returncode == 0:
        return process.stdout
    variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return "".join(
        f":env:.{name[4:].lower().replace('_', '-')}={value!r}\n"
        for name, value in variables.items()
    )


def folders_of(settings: Mapping[str, str]) -> list[Path]:
    """Return the host's folders in the settings. The container has them at the same paths."""
    folders = []
    for option in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        for value in settings.get(option, "").split():
            url = urlsplit(value)
            if url.scheme not in ("", "file"):
                continue
            path = Path(unquote(url.path))
            # Pages of a local index refer to ../../files/..., so mount the parent of the index. But
            # a mount directly below / could hide parts of the image.
            is_index = option != "PIP_FIND_LINKS" and len(path.parts) > 3
            folders.append(path.parent if is_index or path.is_file() else path)
    return sorted({folder for folder in folders if folder.is_dir() and len(folder.parts) > 1})


@contextlib.contextmanager
def private_folder(image: Image, settings: Mapping[str, str]) -> Iterator[Path]:
    """Yield a temporary folder with script, locks and settings that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="rocm-recipes-") as name:
        folder = Path(name)
        variables = dict(settings)
        for option in ("PIP_CERT", "PIP_CLIENT_CERT"):
            if variables.get(option) and Path(variables[option]).is_file():
                copy(Path(variables[option]), folder / option.lower())
                variables[option] = f"{INSIDE}/{option.lower()}"
        for name_inside, file in files_of(image).items():
            copy(file, folder / name_inside)
        (folder / "locks.txt").write_text("\n".join(lock_names(image)), encoding="utf-8")
        secret = os.open(folder / "settings.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(secret, "w", encoding="utf-8") as opened:
            json.dump(variables, opened)
        yield folder


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o400)


# ---- Fetching


def bind(source: Path, target: str, read_only: bool = True) -> docker.types.Mount:
    """Return a bind mount. The engine fails if `source` is missing, unlike with docker's -v."""
    return docker.types.Mount(target=target, source=str(source), type="bind", read_only=read_only)


def inspect(client: docker.DockerClient, base: str) -> dict[str, Any]:
    """Run `install.py inspect` in the base and return its output. Raises HostError, BuildFailed."""
    config = client.api.create_host_config(
        network_mode="none",
        mounts=[bind(FOLDER / "install.py", f"{INSIDE}/install.py")],
        **READABLE,
    )
    argv = [engine.PYTHON, "-B", f"{INSIDE}/install.py", "inspect"]
    code, lines = engine.run(client, base, argv, lambda line: None, host_config=config, user="0:0")
    if code or not lines:
        raise failed(code, lines, f"The base {base} must run {engine.PYTHON}, 3.10 or newer.")
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def folder_for(image: Image, facts: Mapping[str, Any]) -> Path:
    """Return the cache folder for an image's locks and the Python and machine in `facts`."""
    python = ".".join(str(facts["python"]).split(".")[:2])
    key = hashlib.sha256(f"{lock_hash(image)} {python} {facts['machine']}".encode()).hexdigest()
    return cache() / "wheels" / key[:16]


def wheels(
    client: docker.DockerClient,
    image: Image,
    base: str,
    facts: Mapping[str, Any],
    show: engine.Show,
) -> Path:
    """Return a folder with the locks' files for the base's Python. Fetch them if it is missing.

    Raises HostError, BuildFailed.
    """
    folder = folder_for(image, facts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as guard:
        # If several builds have the same locks, only one fetches.
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not folder.is_dir():
            # An interrupted download leaves this folder, and the next one reuses its files.
            partial = folder.with_suffix(".partial")
            partial.mkdir(exist_ok=True)
            download(client, image, base, partial, show)
            partial.rename(folder)
    return folder


def download(
    client: docker.DockerClient, image: Image, base: str, folder: Path, show: engine.Show
) -> None:
    settings = pip_settings(listed_by_pip(), os.environ)
    with private_folder(image, settings) as private:
        mounts = [bind(private, INSIDE), bind(folder, WHEELS_INSIDE, read_only=False)]
        mounts += [bind(local, str(local)) for local in folders_of(settings)]
        config = client.api.create_host_config(network_mode="host", mounts=mounts, **READABLE)
        code, lines = engine.run(
            client,
            base,
            [engine.PYTHON, "-B", f"{INSIDE}/install.py", "download", WHEELS_INSIDE],
            show,
            host_config=config,
            user=engine.caller(client),
            environment={"HOME": "/tmp", "TMPDIR": "/tmp"},
            working_dir="/tmp",
        )
    if code:
        raise failed(
            code,
            lines,
            "Use a network that reaches an index with the file, or set PIP_FIND_LINKS=<folder with "
            "the file>.",
            settings,
        )


def failed(code: int, lines: list[str], remedy: str, settings: Mapping[str, str] = {}) -> Exception:
    """Return install.py's error: HostError for a cause outside the locks, else BuildFailed.

    `remedy` applies unless a disk is full or the proxy in `settings` fails.
    """
    output = "\n".join(lines)
    message = "\n".join(error_lines(lines) or lines[-LAST_LINES:])
    full = causes.full_disk(
        output,
        f"Docker's disk or that of {cache()}",
        f"{engine.FREE}, or use another XDG_CACHE_HOME.",
    )
    if code == 4 and not full:
        return BuildFailed(message)
    return HostError(f"{message}\n{full or causes.wrong_proxy(output, settings) or remedy}")


def error_lines(lines: list[str]) -> list[str]:
    """Return the lines from install.py's last `error: ` on, or [] if it printed no error."""
    at = max((i for i, line in enumerate(lines) if line.startswith("error: ")), default=len(lines))
    return [line.removeprefix("error: ") for line in lines[at:]]
