"""Test what containers/build.py rejects, with a real engine.

There is one message, its exit code, and no image.
"""

from __future__ import annotations

import io
import re
import socket
import tarfile
from pathlib import Path

import docker
import pytest

from containers import engine as engines
from containers import fetch, images
from launch.core.errors import HostError
from tests.integration.conftest import FAKE_ROCM, TRUTH, as_somebody, inside, lock_of, stanzas

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_is_left")]


# ---- Locks


def test_a_corrupted_hash_fails_before_there_is_an_image(tiny, engine, tmp_path):
    lock = stanzas(tmp_path / "wrong.lock", "cpu/tools.lock", "setuptools")
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, lock.read_text()))
    done = tiny(locks=[str(lock)])
    assert done.returncode == 4
    assert (
        "0-wrong.lock: a file has another hash than the lock states, and is not used:\nsetuptools=="
        in done.stderr
    )
    assert "Expected sha256 " + "0" * 64 in done.stderr
    assert re.search(r"Got +[0-9a-f]{64}", done.stderr)
    assert engines.find(engine, tiny.reference) is None


def test_a_file_that_cannot_be_had_is_named_with_the_remedy(tiny, tmp_path):
    lock = tmp_path / "missing.lock"
    lock.write_text(f"rocm-recipes-has-no-such-package==1.0 --hash=sha256:{'0' * 64}\n")
    done = tiny(locks=[str(lock)], environ={"PIP_NO_INDEX": "1"})
    assert done.returncode == 3
    assert "0-missing.lock: pip failed:" in done.stderr
    assert "rocm-recipes-has-no-such-package==1.0" in done.stderr
    assert "PIP_FIND_LINKS=<folder>" in done.stderr


def test_a_lock_that_lacks_a_requirement_fails_the_build(tiny, engine, tmp_path):
    lock = stanzas(tmp_path / "partial.lock", "cpu/requirements.lock", "markdown-it-py")
    done = tiny(locks=["cpu/tools.lock", str(lock)])
    assert done.returncode == 4
    assert re.search(
        r"\nmarkdown-it-py \S+ needs mdurl\S*, which is not in the image\nLock what is missing",
        done.stderr,
    )
    assert Path(re.search(r"All of its output: (.+)", done.stderr)[1]).is_file()
    assert engines.find(engine, tiny.reference) is None


def test_an_image_on_a_rocm_base_keeps_its_torch(tiny, fake_rocm, engine):
    done = tiny(on=fake_rocm, **TRUTH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python 3." in done.stdout
    assert (
        "torch 2.13.0+rocm7.2, hip 7.2.53211, vllm 0.31.0+rocm723, rccl 2.27.9, gfx90a gfx942 "
        "gfx950" in done.stdout
    )
    assert inside(engine, tiny.reference, "cat", "/opt/recipes/constraints.txt").split() == [
        "torch==2.13.0+rocm7.2",
        "vllm==0.31.0+rocm723",
    ]
    assert engine.images.get(tiny.reference).labels["io.rocm-recipes.gfx"] == "gfx90a,gfx942"
    shown = "import torch, setuptools; print(torch.__file__, setuptools.__file__)"
    torch, setuptools = inside(engine, tiny.reference, "python", "-c", shown).split()
    assert torch == "/usr/lib/python3/dist-packages/torch.py"
    assert setuptools.startswith("/opt/recipes/")
    with pytest.raises(
        docker.errors.ContainerError, match=r"Cannot install torch==2\.14\.0 because .* conflicting"
    ):
        inside(
            engine, tiny.reference, "python3", "-m", "pip", "install", "--no-index", "torch==2.14.0"
        )


@pytest.mark.parametrize("pinned", ["2.14.0", "2.13.0+cpu"])
def test_a_lock_that_would_replace_the_bases_torch_fails_the_build(
    tiny, fake_rocm, engine, tmp_path, pinned
):
    lock = tmp_path / "torch.lock"
    lock.write_text(f"torch=={pinned} --hash=sha256:{'0' * 64}\n")
    done = tiny(on=fake_rocm, **TRUTH, locks=["cpu/tools.lock", str(lock)])
    assert done.returncode == 4
    assert (
        f"1-torch.lock pins torch=={pinned}, and the image holds torch 2.13.0+rocm7.2"
        in done.stderr
    )
    assert "The base's own build is never replaced" in done.stderr
    assert engines.find(engine, tiny.reference) is None


def test_the_build_itself_refuses_too(tiny, fake_rocm, engine, tmp_path, monkeypatch):
    """Reject files that were fetched for another base of the same Python."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = tmp_path / "torch.lock"
    lock.write_text(f"torch==2.14.0 --hash=sha256:{'0' * 64}\n")
    image = images.load.__wrapped__(lock_of(tmp_path, fake_rocm, locks=[str(lock)]))["tiny"]
    fetch.folder_for(image, fetch.inspect(engine, fake_rocm)).mkdir(parents=True)
    done = tiny(on=fake_rocm, **TRUTH, locks=[str(lock)])
    assert done.returncode == 4
    assert done.stderr.startswith(
        "The build of tiny failed:\n0-torch.lock pins torch==2.14.0, and the image holds torch "
        "2.13.0+rocm7.2\n"
    )
    assert engines.find(engine, tiny.reference) is None


def test_a_lock_that_names_the_bases_own_torch_leaves_it_there(tiny, fake_rocm, engine, tmp_path):
    lock = tmp_path / "torch.lock"
    lock.write_text(f"torch==2.13.0 --hash=sha256:{'0' * 64}\n")
    done = tiny(on=fake_rocm, **TRUTH, locks=["cpu/tools.lock", str(lock)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2.13.0+rocm7.2" in inside(
        engine, tiny.reference, "python", "-c", "import torch; print(torch.__version__)"
    )


def test_a_lock_that_lies_fails_and_leaves_no_image(tiny, fake_rocm, engine):
    done = tiny(
        on=fake_rocm,
        torch="2.12.0",
        rocm="6.4.1",
        vllm="none",
        trl="1.16.0",
        gfx=["gfx942", "gfx1100"],
    )
    assert done.returncode == 4
    for line in (
        "torch: the lock says 2.12.0, the image holds 2.13.0+rocm7.2",
        "rocm: the lock says 6.4.1, the image holds 7.2",
        "vllm: the lock says none, the image holds 0.31.0+rocm723",
        "trl: the lock says 1.16.0, the image holds none",
        "gfx: the lock says gfx942, gfx1100, the image holds gfx90a, gfx942, gfx950",
    ):
        assert f"  {line}\n" in done.stderr
    assert "python:" not in done.stderr
    assert engines.find(engine, tiny.reference) is None


def test_what_the_lock_does_not_know_is_said(tiny, fake_rocm):
    done = tiny(on=fake_rocm, **{**TRUTH, "vllm": "unknown"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: vllm is unknown to the lock, the image holds 0.31.0+rocm723" in done.stdout


def test_an_image_of_ours_is_no_base(tiny, cpu_image):
    done = tiny(f"base={cpu_image}", digest="unverified")
    assert done.returncode == 4
    assert "the base has a /opt/recipes already" in done.stderr


# ---- Bases


def test_a_base_that_is_not_there(tiny, registry):
    done = tiny(f"base={registry}/nothing:1", digest="unverified")
    assert done.returncode == 3
    assert f"The image {registry}/nothing:1 is not here and cannot be pulled: " in done.stderr
    assert "docker login" in done.stderr
    assert "base=<reference>" in done.stderr


def test_a_registry_that_does_not_answer(tiny):
    done = tiny("base=127.0.0.1:1/debian:1", digest="unverified")
    assert done.returncode == 3
    assert "The image 127.0.0.1:1/debian:1 is not here and cannot be pulled: " in done.stderr
    assert "refused" in done.stderr


def test_a_base_with_another_digest(tiny, base, fake_rocm, registry):
    by_digest = tiny(f"base={fake_rocm}")
    assert by_digest.returncode == 3
    assert (
        f"pins the base of tiny to {base.partition('@')[2]}, and base={fake_rocm} names another "
        "digest." in by_digest.stderr
    )
    by_tag = tiny(f"base={registry}/{FAKE_ROCM}:1")
    assert by_tag.returncode == 3
    assert f"base={registry}/{FAKE_ROCM}:1 has {fake_rocm.partition('@')[2]}." in by_tag.stderr


def test_a_base_larger_than_the_disk(tiny, registry):
    done = tiny(f"base={registry}/nothing:1", digest="unverified", size_gb=1_000_000)
    assert done.returncode == 3
    assert re.search(
        r"takes at least 1e\+06 GB, and .+, where the engine keeps images, has [\d.]+ GB free",
        done.stderr,
    )


def test_a_base_without_python(tiny, engine, registry, remove):
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"))
    engine.api.import_image_from_data(
        empty.getvalue(), f"{registry}/empty", "1", changes=['CMD ["bash"]']
    )
    done = tiny(f"base={registry}/empty:1", digest="unverified")
    assert done.returncode == 3
    assert f"The base {registry}/empty:1 does not start: " in done.stderr
    assert "It needs a python3 in its PATH." in done.stderr


# ---- The engine


def test_no_engine(tiny, tmp_path):
    done = tiny(environ={"DOCKER_HOST": f"unix://{tmp_path}/absent.sock"})
    assert done.returncode == 3
    assert (
        f"No docker engine answers at unix://{tmp_path}/absent.sock. Install or start one"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_socket_that_is_not_for_this_user_names_the_group(base, home):
    lock = lock_of(home, base)
    path = home / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0)
        done = as_somebody(
            home, "image=tiny", f"lock={lock}", groups=[], DOCKER_HOST=f"unix://{path}"
        )
    assert done.returncode == 3
    assert f"The docker engine's socket (unix://{path}) is not open to this user." in done.stderr
    assert "sudo usermod -aG docker $USER" in done.stderr


def test_an_engine_that_does_not_see_the_files_of_this_machine(engine, base, tmp_path):
    config = engine.api.create_host_config(mounts=[fetch.bind(tmp_path / "absent", "/mnt")])
    with pytest.raises(HostError, match="does not see this machine's files .* unset DOCKER_HOST"):
        engines.run(engine, base, ["true"], print, host_config=config)
