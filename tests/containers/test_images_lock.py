"""Test containers/images.lock.yaml and images.py, which reads it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from containers import images
from containers.images import Image
from containers.tools import PRESENT, TOOLS
from launch.core.errors import UserError
from launch.schema.trainer_args import lock as trainer_args
from tests.conftest import composed

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
ENTRIES = images.load()
STACKS = {name: image for name, image in ENTRIES.items() if image.trl != images.NONE}
SEEDS = ("seed_mi300x", "seed_mi350x")

# Requires-Dist of TRL's extra `vllm`, from PyPI's metadata of each release.
TRL_TAKES = {"0.20.0": ">=0.8.3", "0.26.2": "<0.12.0,>=0.10.2", "1.16.0": "<=0.31.0,>=0.22.0"}
# Requires-Dist of vLLM for transformers, from the same source. 0.8.6 was never released, so use the
# range of 0.8.5.
VLLM_TAKES = {
    "0.8.6": ">=4.51.1", "0.11.2": "<5,>=4.56.0", "0.28.0": ">=5.5.3", "0.31.0": "<5.18.0,>=5.10.4",
}  # fmt: skip


def pins(file: Path) -> dict[str, str]:
    """Return the versions in a lock. If markers differ, return the last version."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", file.read_text(), flags=re.MULTILINE))


def installed(image: Image) -> dict[str, str]:
    """Return the versions that an image's locks install."""
    return {
        name: version
        for lock in image.locks
        for name, version in pins(images.FOLDER / lock).items()
    }


# ---- The file


def test_names_of_images():
    rocm = {"rocm", "rocm_train", "rocm_gfx908", "rocm_gfx906"}
    rocm |= {"rocm_rdna", "rocm_strix_halo"}
    assert set(ENTRIES) == {*rocm, *SEEDS, "cpu", "sandbox"}


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (CONF / "hardware").glob("*.yaml") if file.stem != "auto")
)
def test_image_supports_its_hardware(name):
    """Check GPU target, TRL, Liger (with Triton), and packages for fp8 and nf4."""
    hardware = composed(f"hardware={name}").hardware
    if hardware.container == "none":
        assert not any(hardware.gfx in image.gfx for image in ENTRIES.values())
        return
    image = ENTRIES[hardware.container]
    packages = set(installed(image))
    assert hardware.gfx in image.gfx
    assert image.trl == trainer_args()["trl"]
    assert ("liger-kernel" in packages) is hardware.triton
    # For tests, a CPU supports nf4, but not in its image.
    low = {"fp8", "nf4"} & set(hardware.precisions) and name != "cpu"
    assert bool({"torchao", "bitsandbytes"} <= packages) is bool(low)


def test_container_options_match_images():
    groups = {
        file.stem: yaml.safe_load(file.read_text()) for file in (CONF / "container").glob("*.yaml")
    }
    assert set(groups) == {*ENTRIES, "auto", "none", "custom"} - {"sandbox"}, (
        "no run uses the sandbox"
    )
    assert all(content["name"] == name for name, content in groups.items())
    assert {name for name, content in groups.items() if set(content) != {"name"}} == {"custom"}
    assert groups["custom"]["reference"] == "???"


@pytest.mark.parametrize("name", STACKS)
def test_versions_in_image_are_compatible(name):
    image, packages = ENTRIES[name], installed(ENTRIES[name])
    assert image.trl == packages["trl"]
    if image.vllm not in (images.NONE, images.UNKNOWN):
        assert SpecifierSet(TRL_TAKES[image.trl]).contains(image.vllm)
        assert SpecifierSet(VLLM_TAKES[image.vllm]).contains(packages["transformers"])
    assert image.locks[0] == "cpu/tools.lock", "the build tools come first"
    # Only the cpu image installs torch; the other bases have it.
    assert packages.get("torch") == (f"{image.torch}+cpu" if name == "cpu" else None)
    builds = r"(nvidia|cuda)-|(pytorch-)?triton|vllm|flash-attn"
    assert not [package for package in packages if re.match(builds, package)]


@pytest.mark.parametrize("name", ENTRIES)
def test_values_of_fields(name):
    image, digest = ENTRIES[name], "sha256:[0-9a-f]{64}"
    assert re.fullmatch(f"{digest}|unverified", image.digest)
    assert re.fullmatch(r"[\d.]+|unknown", image.download_gb)
    assert re.fullmatch(rf"[^@\s]+:[0-9a-f]{{16}}@{digest}|unbuilt", image.pushed)
    assert image.tools.items() <= {*itertools.product(TOOLS, [PRESENT, images.UNKNOWN])}
    texts = [*image.gfx, *image.locks, *image.env.values()]
    texts += [getattr(image, field) for field in images.VERSIONS]
    assert all(isinstance(text, str) and text for text in texts)
    # The container that installs them has them in one folder.
    assert len({Path(lock).name for lock in image.locks}) == len(image.locks)


def test_each_base_has_one_digest():
    stated = {(image.base, image.digest) for image in ENTRIES.values()}
    assert len(stated) == len({base for base, _ in stated})


# ---- The locks


@pytest.mark.parametrize("name", SEEDS)
def test_seed_lock_satisfies_its_source(name):
    folder = images.FOLDER / name
    lines = [
        line.split("#")[0].strip() for line in (folder / "requirements.in").read_text().splitlines()
    ]
    locked = pins(folder / "requirements.lock")
    for package, specifier in (
        re.fullmatch(r"([a-z-]+)(.*)", line).groups() for line in lines if line
    ):
        if package == "torch":
            assert specifier == f"=={ENTRIES[name].torch}"
            assert f'version = "{ENTRIES[name].torch}"' in (folder / "uv.toml").read_text()
        else:
            assert SpecifierSet(specifier).contains(locked[package])


# ---- Validation

VALID = {
    "base": "example.com/a/base:1.0",
    "digest": "sha256:" + "0" * 64,
    "python": "3.12",
    "torch": "2.13.0",
    "rocm": "none",
    "rccl": "none",
    "vllm": "unknown",
    "aiter": "none",
    "flash_attn": "none",
    "trl": "1.16.0",
    "gfx": ["gfx942"],
    "source": "a page",
    "dockerfile": "Dockerfile",
    "locks": ["one.lock", "two.lock"],
    "tools": {"rocprofv3": "present"},
    "env": {"HSA_ENABLE_IPC_MODE_LEGACY": "1"},
    "download_gb": "11.3",
    "pushed": "unbuilt",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a temporary folder that replaces containers/."""
    for name in "Dockerfile other/Dockerfile install.py one.lock two.lock".split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"content of {name}\n")
    monkeypatch.setattr(images, "FOLDER", tmp_path)
    return tmp_path


def written(folder: Path, text: str) -> Path:
    (folder / "images.lock.yaml").write_text(text)
    return folder / "images.lock.yaml"


def test_read_valid_entry(folder):
    image = images.load(written(folder, yaml.safe_dump({"images": {"mine": VALID}})))["mine"]
    assert dataclasses.asdict(image) == {"name": "mine", **VALID}
    assert image.base_reference == f"example.com/a/base:1.0@{VALID['digest']}"


@pytest.mark.parametrize(("change", "key"), [
    ({"python": 3.12}, "python"),
    ({"trl": None}, "trl"),
    ({"gfx": "gfx942"}, "gfx"),
    ({"flavour": "x"}, "flavour"),
    ({"tools": ["rocprofv3"]}, "tools"),
])  # fmt: skip
def test_reject_wrong_type(folder, change, key):
    with pytest.raises(UserError, match=rf"images\.mine\b.*\b{key}\b"):
        images.entry("mine", {**VALID, **change})


def test_reject_missing_fields(folder):
    fields = {key: value for key, value in VALID.items() if key not in ("source", "base")}
    with pytest.raises(UserError, match="images.mine: .*'base' and 'source'"):
        images.entry("mine", fields)


# ---- The tag


def test_reference_of_pushed_image(folder):
    tag, digest = images.entry("mine", VALID).tag, "sha256:" + "1" * 64
    image = images.entry("mine", {**VALID, "pushed": f"example.com/mine:{tag}@{digest}"})
    assert image.reference == f"example.com/mine@{digest}"
    older = images.entry("mine", {**VALID, "pushed": f"example.com/mine:{'0' * 16}@{digest}"})
    assert older.reference == older.local_reference, "the pushed image was built from other inputs"
    assert image.local_reference == f"rocm-recipes/mine:{image.tag}"


OTHERS = {"gfx": ["gfx950"], "source": "another"}
OTHERS["pushed"] = f"example.com/mine:{'0' * 16}@sha256:{'1' * 64}"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"base": "a/b:1.1"}, False),
        ({"digest": "unverified"}, False),
        ({"dockerfile": "other/Dockerfile"}, False),
        *(({"locks": locks}, False) for locks in (["one.lock"], ["two.lock", "one.lock"], [])),
        (
            {**dict.fromkeys(images.VERSIONS, "unknown"), **OTHERS},
            True,
        ),  # not inputs
    ],
)
def test_tag_depends_on_base_and_inputs(folder, change, same):
    before = images.entry("mine", VALID).tag
    (folder / "build.py").write_text("another file")
    os.utime(folder / "one.lock", (0, 0))
    (folder / "install.py").chmod(0o755)
    assert (images.entry("another", {**VALID, **change}).tag == before) is same


@pytest.mark.parametrize("file", ["Dockerfile", "install.py", "one.lock", "two.lock"])
def test_tag_changes_with_each_input_file(folder, file):
    before = images.entry("mine", VALID).tag
    (folder / file).write_text("changed")
    assert images.entry("mine", VALID).tag != before
