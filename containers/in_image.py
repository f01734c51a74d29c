"""Use the torch and vLLM of the image that this container was started from.

`make setup-in-image` (environment.py --torch image) installs the locked packages in .venv and then
runs this program, which makes the packages of the image's Python importable behind them. The
overlay of our own images works in the same way (install.py). The image's packages stay unchanged.

    .venv/bin/python containers/in_image.py FOLDER...    the image's folders of packages

Exit codes: 0 done, 4 the packages do not fit together.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from containers import install
from launch.core.errors import HostError

# Releases of torch in the images that use the same locks (images.lock.yaml).
OLDEST, NEWEST = (2, 11), (2, 13)
REMEDY = "Use a container of another image, or a torch of our own: make setup TORCH=rocm"
WITHOUT_VLLM = (
    "vLLM cannot be imported, so GRPO generates with transformers (topology=single or ddp), and "
    "topology=split, method=serve and engine=vllm do not run"
)


class Image(NamedTuple):
    """The packages of the image's Python."""

    folders: tuple[str, ...]
    kept: dict[str, str]  # versions of packages that must not be replaced, such as torch

    @property
    def torch(self) -> str:
        return self.kept["torch"]


def find(venv: Path) -> Image:
    """Return the packages of this Python, except those in `venv`. Raises HostError."""
    folders = [f for f in install.package_folders() if not Path(f).is_relative_to(venv)]
    kept = install.guarded(install.versions(folders))
    if problem := torch_problem(kept.get("torch")):
        raise HostError(f"make setup-in-image: {sys.executable} has {problem}. {REMEDY}")
    return Image(tuple(folders), kept)


def torch_problem(version: str | None) -> str | None:
    """Return why the locks do not support this torch; None if they do."""
    if version is None:
        return "no torch. If another Python here has it: make setup-in-image PYTHON=<its path>"
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if OLDEST <= release <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return f"torch {version}, but our locked packages support {oldest} to {newest}"


def lock_without_kept(lock: Path, image: Image, folder: Path) -> Path:
    """Write a copy of a lock without the packages that must not be replaced; return its path."""
    pins = [pin for pin in install.read_lock(lock, lock.name) if pin.name not in image.kept]
    copy = folder / lock.name
    copy.write_text("".join(f"{pin.text}\n" for pin in pins), encoding="utf-8")
    return copy


def main(folders: list[str]) -> int:
    """Add the folders to the environment that runs this program, and check all requirements."""
    venv, python = Path(sys.prefix), sys.executable
    install.add_base(install.site_of(venv), folders)
    # Like PIP_CONSTRAINT in our images, this keeps a later `pip install` from replacing torch.
    constraints = venv / "constraints.txt"
    install.write_constraints(constraints, install.guarded(install.versions(folders)))
    (venv / "pip.conf").write_text(f"[install]\nconstraint = {constraints}\n", encoding="utf-8")
    for argv in ([install.__file__, "check"], ["-c", "import torch; print(torch.__version__)"]):
        if subprocess.run([python, "-B", *argv], check=False).returncode:
            return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
