"""Test containers/install.py, which installs locked packages in an image."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import images, install
from tests.helpers.build_examples import HASH

# ---- Locks


@pytest.mark.parametrize("lock", sorted(images.FOLDER.rglob("*.lock")), ids=str)
def test_locks_have_only_pins_with_hashes_and_no_urls(lock):
    text = lock.read_text()
    pins = install.read_lock(lock, lock.name)
    assert len(pins) == len(re.findall(r"^[A-Za-z0-9].*==", text, re.MULTILINE)) > 0
    assert sum(pin.text.count("--hash=") for pin in pins) == len(re.findall(r"--hash=", text))
    assert not any("://" in pin.text for pin in pins)


def lock_with(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "a.lock"
    file.write_text("\n".join(lines))
    return file


def test_parse_pin(tmp_path):
    file = lock_with(
        tmp_path,
        "# comment",
        "Foo_Bar.baz[extra]==1.0+cpu ; python_version < '3.12' and sys_platform == 'linux' \\\n   "
        f" {HASH} \\\n    {HASH}",
        "    # via x",
    )
    (pin,) = install.read_lock(file, "a.lock")
    assert (pin.name, pin.version, pin.marker) == (
        "foo-bar-baz",
        "1.0+cpu",
        "python_version < '3.12' and sys_platform == 'linux'",
    )
    assert pin.text.count(HASH) == 2


@pytest.mark.parametrize(
    "line", ["foo==1.0", "foo>=1.0 " + HASH, "--index-url http://x", "./wheel"]
)
def test_reject_other_lines(tmp_path, line):
    with pytest.raises(install.InstallError, match=r"a\.lock: `") as error:
        install.read_lock(lock_with(tmp_path, line), "a.lock")
    assert error.value.code == 4


def pin_of(name: str, version: str, marker: str = "") -> install.Pin:
    return install.Pin("a.lock", name, version, marker, f"{name}=={version} {HASH}")


def test_skip_pins_for_another_python():
    now = "{}.{}".format(*sys.version_info)
    ours, other = (
        pin_of("a", "1", f"python_version == '{now}'"),
        pin_of("a", "2", f"python_version != '{now}'"),
    )
    assert install.applicable([ours, other, pin_of("b", "1")]) == [ours, pin_of("b", "1")]


def test_guarded_packages():
    names = "torch torchvision triton pytorch-triton-rocm triton-kernels vllm flash-attn amd-aiter"
    packages = dict.fromkeys([*names.split(), "rocm-sdk-core"], "1.0")
    packages |= {"for-amd": "1.0+rocm7.2", "by-hand": "1.0+gitabc"}
    others = {"for-a-cpu": "1.0+cpu", "torchmetrics": "1.0", "numpy": "2.4"}
    assert install.guarded({**packages, **others}) == packages


def test_pins_of_the_base_s_packages(capsys):
    base = {"torch": "2.13.0+rocm7.2", "vllm": "0.31.0", "triton": "3.7-by-hand"}
    others = [pin_of("numpy", "2.4")]
    assert install.missing_pins([pin_of("torch", "2.13.0"), *others], base) == others
    assert "the base's torch 2.13.0+rocm7.2" in capsys.readouterr().out
    pins = [pin_of("torch", "2.14.0"), pin_of("vllm", "0.30.0"), pin_of("triton", "3.7")]
    with pytest.raises(install.InstallError) as error:
        install.missing_pins(pins, base)
    for pin, line in zip(pins, str(error.value).splitlines(), strict=False):
        assert f"{pin.name}=={pin.version}" in line
        assert base[pin.name] in line


# ---- Requirements


def dist(version: str, *requires: str) -> SimpleNamespace:
    return SimpleNamespace(version=version, requires=list(requires))


def test_unmet_requirements():
    everything = {
        "ours": dist(
            *"1.0 there>=2 missing odd substituted".split(),
            "not-here ; sys_platform == 'win32'",
            "server[fast] ; extra == 'vllm'",
        ),
        "there": dist("1.5"),
        "odd": dist("by-hand-1", "unheard-of"),  # requirements of the base are not checked
        "server": dist("1"),
    }
    assert install.unmet(["ours"], everything, ["substituted"]) == [
        "ours 1.0 needs there>=2, but the image has there 1.5",
        "ours 1.0 needs missing, which is not in the image",
    ]


def installed_in(site: Path, **packages: tuple[str, ...]) -> None:
    """Write metadata for packages given as name=(version, requirement, ...)."""
    for name, (version, *requires) in packages.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )


@pytest.fixture
def overlay(tmp_path, monkeypatch) -> Path:
    """Return the site-packages of a new environment, and make Python use it."""
    site = tmp_path / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    site.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


@pytest.mark.parametrize(("needs", "hidden", "code", "shown"), [
    (["pycosat", "pip"], False, 0, "1 packages in the overlay, "),  # pycosat has a substitute
    (["not-there-at-all"], False, 4, "error: ours 2.0 needs not-there-at-all, which is not "),
    ([], True, 4, "error: ours 2.0 is not importable"),
])  # fmt: skip
def test_check(overlay, tmp_path, monkeypatch, capsys, needs, hidden, code, shown):
    installed_in(overlay, ours=("2.0", *needs))
    (overlay / "pycosat.py").write_text("")
    if hidden:
        installed_in(tmp_path / "vendor", ours=("1.0",))
        monkeypatch.setattr(sys, "path", [str(tmp_path / "vendor"), *sys.path])
    assert install.main(["check"]) == code
    assert capsys.readouterr().out.startswith(shown)


def test_reject_our_image_as_base(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(install, "OVERLAY", tmp_path)
    assert install.main(["inspect"]) == 4
    assert capsys.readouterr().out.startswith(f"error: the base already has {tmp_path}")


MISMATCH = """Collecting a==1
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. \
If you have updated the package versions, please ...
    a==1 from https://example.com/a-1.whl:
        Expected sha256 00
             Got        11
"""


@pytest.mark.parametrize(("output", "code", "message"), [
    (MISMATCH, 4,
     "\na==1 from https://example.com/a-1.whl:\nExpected sha256 00\nGot        11"),
    ("Looking\nERROR: No match for a==1\nnoise\n", 3, "l: pip failed:\nERROR: No match for a==1"),
    ("one\ntwo\nthree\nfour\n", 3, "l: pip failed:\ntwo\nthree\nfour"),
])  # fmt: skip
def test_failure_of_pip(output, code, message):
    error = install.failure("l", output, 3)
    assert error.code == code
    assert str(error).endswith(message)
