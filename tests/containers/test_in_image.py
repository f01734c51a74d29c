"""Test containers/in_image.py with real environments and a stand-in for the image's packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pip
import pytest

from containers import environment, images, in_image, install
from launch.core.errors import HostError


def package(site: Path, name: str, version: str, *requires: str) -> None:
    """Write a module that only has a version, and its metadata."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (site / f"{name}.py").write_text(f"__version__ = {version!r}\n")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return the folder of an image's packages: torch, vLLM and an older NumPy."""
    site = tmp_path / "image" / "site-packages"
    package(site, "torch", "2.13.0+rocm7.2")
    package(site, "vllm", "0.31.0+rocm723")
    package(site, "numpy", "1.0")
    return site


def joined(venv: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
    argv = [str(venv / "bin/python"), "-B", in_image.__file__, *map(str, folders)]
    return subprocess.run(argv, capture_output=True, text=True)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    folder = tmp_path / ".venv"
    # A link to pip takes a hundredth of the time that venv needs to install it.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (install.site_of(folder) / "pip").symlink_to(Path(pip.__file__).parent)
    return folder


def test_the_image_s_packages_are_importable_and_unchanged(image: Path, venv: Path) -> None:
    package(install.site_of(venv), "numpy", "2.3")
    package(install.site_of(venv), "trl", "1.16.0", "torch>=2", "numpy>=2")
    before = sorted(image.rglob("*"))
    done = joined(venv, image)
    assert done.returncode == 0, done.stdout + done.stderr
    show = "import torch, vllm, numpy; print(torch.__file__, vllm.__version__, numpy.__version__)"
    argv = [str(venv / "bin/python"), "-B", "-c", show]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert shown == [str(image / "torch.py"), "0.31.0+rocm723", "2.3"]
    assert sorted(image.rglob("*")) == before
    constraints = (venv / "constraints.txt").read_text().split()
    assert constraints == ["torch==2.13.0+rocm7.2", "vllm==0.31.0+rocm723"]
    assert str(venv / "constraints.txt") in (venv / "pip.conf").read_text()


def test_packages_that_do_not_fit(image: Path, venv: Path) -> None:
    package(install.site_of(venv), "trl", "1.16.0", "torch>=2.14")
    done = joined(venv, image)
    assert done.returncode == 4
    assert "trl 1.16.0 needs torch>=2.14, but the image has torch 2.13.0+rocm7.2" in done.stdout


@pytest.mark.parametrize(("torch", "is_supported"), [
    ("2.10.0+git8514f05", False),
    ("2.11.0", True),
    ("2.13.0+rocm7.2", True),
    ("2.14.0.dev20261101+rocm7.2", False),
    (None, False),
])  # fmt: skip
def test_supported_torch(image, tmp_path, monkeypatch, torch, is_supported):
    for file in image.glob("torch*"):
        file.rename(tmp_path / file.name)
    if torch:
        package(image, "torch", torch)
    monkeypatch.setattr(sys, "path", [str(image), str(environment.VENV / "site-packages")])
    if is_supported:
        found = in_image.find(environment.VENV)
        assert found == ((str(image),), {"torch": torch, "vllm": "0.31.0+rocm723"})
    else:
        with pytest.raises(HostError, match="^make setup-in-image: .*TORCH=rocm$"):
            in_image.find(environment.VENV)


def test_releases_of_torch_are_those_of_images_with_the_same_lock():
    torch = [
        tuple(map(int, re.findall(r"\d+", entry.torch)[:2]))
        for entry in images.load().values()
        if "cpu/requirements.lock" in entry.locks
    ]
    assert (min(torch), max(torch)) == (in_image.OLDEST, in_image.NEWEST)


def test_no_step_replaces_the_image_s_packages(tmp_path, monkeypatch):
    kept = {"torch": "2.13.0", "triton": "3.7", "accelerate": "1.15.0+git1"}
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    image = in_image.Image(("/image/site-packages",), kept)
    steps = environment.plan(venv / "bin/python", "image", "3.12.3", image)
    locks = {argv[-1] for step in steps for argv in step.attempts if "--require-hashes" in argv}
    pinned = {pin.name for lock in locks for pin in install.read_lock(Path(lock), lock)}
    assert {"trl", "transformers", "liger-kernel", "pytest"} <= pinned
    assert not pinned & {*kept, "torchvision", "vllm", "flash-attn", "amd-aiter"}
    assert [step.optional for step in steps[-2:]] == [False, True]
    assert "/image/site-packages" in steps[-2].attempts[0]
    without = in_image.Image(image.folders, {"torch": "2.13.0"})
    assert len(environment.plan(venv / "bin/python", "image", "3.12.3", without)) == len(steps) - 1
