"""Run programs as a user who may use the docker socket and is not root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest

from containers.images import LABEL
from tests.conftest import ROOT

UID = 12345  # unused: a user without a name, a home or a password
PATIENCE_S = 480  # after which a test gives up on an event that never comes


def can(identity: dict, test: str, path: Path) -> bool:
    return subprocess.run(["/usr/bin/test", test, str(path)], **identity).returncode == 0


def python_of(identity: dict, root: Path = ROOT) -> str:
    """Return a Python of this version that the user may run; root's own may be in root's home."""
    version = "python{}.{}".format(*sys.version_info[:2])
    system = shutil.which(version, path="/usr/bin:/usr/local/bin")
    pythons = [str(root / ".venv/bin/python"), *filter(None, [system])]
    return next(python for python in pythons if can(identity, "-x", Path(python)))


def identity_of(*folders: Path, groups: list[int]) -> dict[str, object]:
    """Return subprocess's arguments for a user who is not root, and give them the folders."""
    if os.getuid() != 0:
        return {}
    for folder in folders:
        os.chown(folder, UID, UID)
    return {"user": UID, "group": UID, "extra_groups": groups}


def environ_of(home: Path, root: Path = ROOT) -> dict[str, str]:
    """Return the environment of a user whose repository is at `root`."""
    own = ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME")
    site = next(path for path in sys.path if path.endswith("site-packages"))
    return {
        **{name: value for name, value in os.environ.items() if name not in own},
        "HOME": str(home),
        "COLUMNS": "200",
        "PYTHONPATH": site.replace(str(ROOT), str(root)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def as_somebody(
    home: Path, *arguments: str, groups: list[int], **environ: str
) -> subprocess.CompletedProcess:
    """Run build.py as a user who is not root."""
    identity = identity_of(home, *home.iterdir(), groups=groups)
    return subprocess.run(
        [python_of(identity), str(ROOT / "containers/build.py"), *arguments],
        env={**environ_of(home), **environ},
        cwd=home,
        capture_output=True,
        text=True,
        **identity,
    )


class Caller:
    """Be a user who may use the docker socket and is not root."""

    def __init__(self, home: Path, cache: Path, engine: docker.DockerClient) -> None:
        self.home, self.cache, self.engine = home, cache, engine
        self.uid = UID if os.getuid() == 0 else os.getuid()
        groups = sorted({Path("/var/run/docker.sock").stat().st_gid, *gpu_gids()})
        self.identity = identity_of(home, cache, groups=groups)
        readable = can(self.identity, "-r", ROOT / "README.md")
        self.root = ROOT if readable else self.bind_mounted()
        self.python = python_of(self.identity, self.root)
        self.env = {**environ_of(home, self.root), "XDG_CACHE_HOME": str(cache)}

    def bind_mounted(self) -> Path:
        """Mount the repository where the user can read it, even if its own folder is closed."""
        root = self.home.with_name(f"{self.home.name}-repository")
        root.mkdir()
        subprocess.run(["mount", "--bind", str(ROOT), str(root)], check=True)
        return root

    def leave(self) -> None:
        if self.root != ROOT:
            subprocess.run(["umount", str(self.root)], check=True)
            self.root.rmdir()
        shutil.rmtree(self.home, ignore_errors=True)

    def argv(self, *overrides: str) -> list[str]:
        return [self.python, str(self.root / "launch/run.py"), *overrides]

    def run(self, *overrides: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.argv(*overrides),
            cwd=self.home,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            **self.identity,
        )

    def starting(
        self,
        *overrides: str,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.STDOUT,
        **env: str,
    ) -> subprocess.Popen:
        """Start a launcher in the background."""
        return subprocess.Popen(
            self.argv(*overrides),
            cwd=self.home,
            env={**self.env, **env},
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
            **self.identity,
        )

    @contextmanager
    def running(self, *overrides: str, **env: str) -> Iterator[subprocess.Popen]:
        """Start a launcher in the background; kill it and remove its container afterwards."""
        process = self.starting(*overrides, **env)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            for container in self.containers():
                container.remove(force=True)

    def containers(self) -> list[docker.models.containers.Container]:
        """Return our containers in any state."""
        return self.engine.containers.list(
            all=True,
            filters={"label": [f"{LABEL}.run", f"{LABEL}.uid={self.uid}"]},
            ignore_removed=True,
        )

    def container(self, process: subprocess.Popen) -> docker.models.containers.Container:
        """Return the container of a launcher in the background once it runs."""
        return until(
            lambda: next((c for c in self.containers() if c.status == "running"), None), process
        )

    def newest_run(self) -> Path:
        return max(
            (p.parent for p in self.home.glob("runs/*/*/record.json")),
            key=lambda p: p.stat().st_mtime_ns,
        )


def until(there, process: subprocess.Popen):
    """Return what `there` returns once it returns something.

    Fails with the launcher's output if that ends, or after PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if answer := there():
            return answer
        if process.poll() is not None:
            pytest.fail(
                f"the launcher ended first, with {process.returncode}:\n{process.stdout.read()}"
            )
        time.sleep(0.05)
    process.kill()
    return pytest.fail(f"nothing came:\n{process.communicate()[0]}")


def gpu_gids() -> set[int]:
    return {
        int(row.split(":")[2])
        for row in Path("/etc/group").read_text().splitlines()
        if row.split(":")[0] in ("video", "render")
    }
