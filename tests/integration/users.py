"""Run programs as a user who has access to docker, but is not root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

from containers.images import LABEL
from tests.conftest import ROOT
from tests.integration.conftest import PATIENCE_S, wait_until

UID = 12345  # a user without a name, home or password


def can(identity: dict, test: str, path: Path) -> bool:
    return subprocess.run(["/usr/bin/test", test, str(path)], **identity).returncode == 0


def python_of(identity: dict, root: Path = ROOT) -> str:
    """Return a Python of this version that the user can execute."""
    version = "python{}.{}".format(*sys.version_info[:2])
    system = shutil.which(version, path="/usr/bin:/usr/local/bin")
    pythons = [str(root / ".venv/bin/python"), *filter(None, [system])]
    return next(python for python in pythons if can(identity, "-x", Path(python)))


class Caller:
    """A user who has access to docker, but is not root."""

    def __init__(self, home: Path, cache: Path, engine: docker.DockerClient) -> None:
        self.home, self.cache, self.engine = home, cache, engine
        self.uid = UID if os.getuid() == 0 else os.getuid()
        self.identity: dict[str, object] = {}
        if os.getuid() == 0:
            groups = sorted({Path("/var/run/docker.sock").stat().st_gid, *gpu_gids()})
            self.identity = {"user": UID, "group": UID, "extra_groups": groups}
            for folder in (home, cache):
                os.chown(folder, UID, UID)
        readable = can(self.identity, "-r", ROOT / "README.md")
        self.root = ROOT if readable else self.bind_mounted()
        self.python = python_of(self.identity, self.root)
        keep = {k: v for k, v in os.environ.items() if k not in ("XDG_RUNTIME_DIR", "HF_HOME")}
        self.env = {
            **keep,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(cache),
            "COLUMNS": "200",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        site = next(path for path in sys.path if path.endswith("site-packages"))
        self.env["PYTHONPATH"] = site.replace(str(ROOT), str(self.root))

    def bind_mounted(self) -> Path:
        """Bind-mount the repository to a path that the user can read."""
        root = self.home.with_name(f"{self.home.name}-repository")
        root.mkdir()
        subprocess.run(["mount", "--bind", str(ROOT), str(root)], check=True)
        return root

    def leave(self) -> None:
        if self.root != ROOT:
            subprocess.run(["umount", str(self.root)], check=True)
            self.root.rmdir()
        shutil.rmtree(self.home, ignore_errors=True)

    def argv(self, *overrides: str, program: str = "launch/run.py") -> list[str]:
        return [self.python, str(self.root / program), *overrides]

    def run(
        self, *overrides: str, program: str = "launch/run.py", **env: str
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.argv(*overrides, program=program),
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
        """Start a launcher in the background. Kill it and remove its containers afterwards."""
        process = self.starting(*overrides, **env)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            for container in self.containers():
                container.remove(force=True)

    def containers(self) -> list[docker.models.containers.Container]:
        """Return the user's containers in any state."""
        return self.engine.containers.list(
            all=True,
            filters={"label": [f"{LABEL}.run", f"{LABEL}.uid={self.uid}"]},
            ignore_removed=True,
        )

    def container(self, process: subprocess.Popen) -> docker.models.containers.Container:
        """Wait for the launcher's container, and return it."""
        return wait_until(
            lambda: next((c for c in self.containers() if c.status == "running"), None), process
        )

    def newest_run(self) -> Path:
        return max(
            (p.parent for p in self.home.glob("runs/*/[0-9]*/record.json")),
            key=lambda p: p.stat().st_mtime_ns,
        )


def gpu_gids() -> set[int]:
    return {
        int(row.split(":")[2])
        for row in Path("/etc/group").read_text().splitlines()
        if row.split(":")[0] in ("video", "render")
    }
