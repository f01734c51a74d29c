"""Test containers/install.py, which fills an image.

What a lock may say, what the base keeps, what must be met.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import images, install
from tests.helpers.build_examples import HASH

# ---- Inside the base: locks


@pytest.mark.parametrize("lock", sorted(images.FOLDER.rglob("*.lock")), ids=str)
def test_every_lock_is_wholly_pinned_and_hashed_and_names_no_place(lock):
    text = lock.read_text()
    pins = install.read_lock(lock, lock.name)
    assert len(pins) == len(re.findall(r"^[A-Za-z0-9].*==", text, re.MULTILINE)) > 0
    assert sum(pin.text.count("--hash=") for pin in pins) == len(re.findall(r"--hash=", text))
    assert not any("://" in pin.text for pin in pins)


def lock_with(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "a.lock"
    file.write_text("\n".join(lines))
    return file


def test_a_pin_is_name_version_marker_and_hashes(tmp_path):
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
def test_a_lock_may_contain_nothing_else(tmp_path, line):
    with pytest.raises(
        install.Refused, match=r"a\.lock: `.*` is not `name==version --hash"
    ) as error:
        install.read_lock(lock_with(tmp_path, line), "a.lock")
    assert error.value.code == 4


def pin_of(name: str, version: str, marker: str = "") -> install.Pin:
    return install.Pin("a.lock", name, version, marker, f"{name}=={version} {HASH}")


def test_pins_for_another_python_are_left_out():
    now = "{}.{}".format(*sys.version_info)
    ours, other = (
        pin_of("a", "1", f"python_version == '{now}'"),
        pin_of("a", "2", f"python_version != '{now}'"),
    )
    assert install.applicable([ours, other, pin_of("b", "1")]) == [ours, pin_of("b", "1")]


def test_packages_that_pip_must_not_replace():
    names = "torch torchvision triton pytorch-triton-rocm triton-kernels vllm flash-attn amd-aiter"
    packages = dict.fromkeys([*names.split(), "rocm-sdk-core"], "1.0")
    packages |= {"for-amd": "1.0+rocm7.2", "by-hand": "1.0+gitabc"}
    others = {"for-a-cpu": "1.0+cpu", "torchmetrics": "1.0", "numpy": "2.4"}
    assert install.guarded({**packages, **others}) == packages


def test_a_pin_of_what_the_base_holds_is_kept_or_refused(capsys):
    held = {"torch": "2.13.0+rocm7.2", "vllm": "0.31.0", "triton": "3.7-by-hand"}
    others = [pin_of("numpy", "2.4")]
    assert install.refuse_conflicts([pin_of("torch", "2.13.0"), *others], held) == others
    assert "kept: the base's torch 2.13.0+rocm7.2, as a.lock asks" in capsys.readouterr().out
    pins = [pin_of("torch", "2.14.0"), pin_of("vllm", "0.30.0"), pin_of("triton", "3.7")]
    with pytest.raises(install.Refused) as refusal:
        install.refuse_conflicts(pins, held)
    assert str(refusal.value).splitlines()[:3] == [
        "a.lock pins torch==2.14.0, and the image holds torch 2.13.0+rocm7.2",
        "a.lock pins vllm==0.30.0, and the image holds vllm 0.31.0",
        "a.lock pins triton==3.7, and the image holds triton 3.7-by-hand",
    ]
    assert "Take the pin out of the lock" in str(refusal.value)


# ---- Inside the base: requirements


def dist(version: str, *requires: str) -> SimpleNamespace:
    return SimpleNamespace(version=version, requires=list(requires))


def test_unmet_requirements_are_named():
    everything = {
        "ours": dist(
            *"1.0 there>=2 missing odd stood-in".split(),
            "not-here ; sys_platform == 'win32'",
            "server[fast] ; extra == 'vllm'",
        ),
        "there": dist("1.5"),
        "odd": dist("by-hand-1", "unheard-of"),  # the base's own affair
        "server": dist("1"),
    }
    assert install.unmet(["ours"], everything, ["stood-in"]) == [
        "ours 1.0 needs there>=2, and the image holds there 1.5",
        "ours 1.0 needs missing, which is not in the image",
    ]


def installed_in(site: Path, **packages: tuple[str, ...]) -> None:
    """Lay out name=(version, requirement, ...) as metadata."""
    for name, (version, *requires) in packages.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )


@pytest.fixture
def overlay(tmp_path, monkeypatch) -> Path:
    """Return site-packages of an environment that `check` takes for its own."""
    site = tmp_path / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    site.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


@pytest.mark.parametrize(("needs", "hidden", "code", "shown"), [
    (["pycosat", "pip"], False, 0, "1 packages in the overlay, "),  # pycosat has a stand-in
    (["not-there-at-all"], False, 4, "error: ours 2.0 needs not-there-at-all, which is not "),
    ([], True, 4, "error: ours 2.0 is hidden by 1.0 of the base"),
])  # fmt: skip
def test_check(overlay, tmp_path, monkeypatch, capsys, needs, hidden, code, shown):
    installed_in(overlay, ours=("2.0", *needs))
    (overlay / "pycosat.py").write_text("")
    if hidden:
        installed_in(tmp_path / "vendor", ours=("1.0",))
        monkeypatch.setattr(sys, "path", [str(tmp_path / "vendor"), *sys.path])
    assert install.main(["check"]) == code
    assert capsys.readouterr().out.startswith(shown)


def test_a_base_of_ours_is_refused(monkeypatch, tmp_path, capsys):
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
     "not used:\na==1 from https://example.com/a-1.whl:\nExpected sha256 00\nGot        11"),
    ("Looking\nERROR: No match for a==1\nnoise\n", 3, "l: pip failed:\nERROR: No match for a==1"),
    ("one\ntwo\nthree\nfour\n", 3, "l: pip failed:\ntwo\nthree\nfour"),
])  # fmt: skip
def test_a_failure_of_pip_is_its_reason(output, code, message):
    refusal = install.failure("l", output, 3)
    assert refusal.code == code
    assert str(refusal).endswith(message)
